"""Train on several workers: extract features with Ray Data, then train with Ray Train (gloo on CPU, nccl on GPU).

Documents, features and checkpoints are in the output folder, which every node must be able to access. The driver does
not train, because it might have no GPU. Actors write shards into the feature store. The driver checks each shard before
it adds the shard to the store's index, so an incomplete shard of a crashed actor is rewritten.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from peagle.catalog.cards import load_catalog
from peagle.catalog.local import local_model_path
from peagle.drafter.config import TrainConfig
from peagle.drafter.data import Sample
from peagle.drafter.decontamination import NAMED_SETS
from peagle.drafter.features import FeatureJob, load_reader, open_store, shard_tensors, write_shard
from peagle.drafter.head import INITS
from peagle.drafter.metrics import Metrics
from peagle.drafter.pipeline import Listener, PreparedTraining, finish_from_checkpoint, prepare, train_prepared
from peagle.drafter.prompts import is_built_in_source
from peagle.drafter.spending import TrainingSpending, training_spending
from peagle.drafter.training import ProcessGroup, checkpoint_mtime_ns
from peagle.errors import DivergedError, PeagleError
from peagle.private import restrict_new_files, user_path
from peagle.storage import storage_path
from pipelines.cluster import ray as cluster
from pipelines.cluster.failures import to_peagle_error
from pipelines.cluster.inspection import inspect
from pipelines.cluster.ray import has_gpus, ray_cluster, require_workers

_SCHEMA = pa.schema(
    [("shard", pa.int64()), ("id", pa.string()), ("token_ids", pa.list_(pa.int32())), ("num_prompt_tokens", pa.int64())]
)


def extract_on_actors(
    job: FeatureJob, progress: Callable[[int, int], None], *, reference: str, workers: int, device: str
) -> None:
    """Extract features with at most `workers` actors, each with its own copy of the target named `reference`."""
    job = replace(job, device=device)
    writer, missing_shards = open_store(job.samples, job.spec, job.folder)
    if not missing_shards:
        return
    num_actors = min(workers, len(missing_shards))
    cluster.require_workers(num_actors, on_gpu=_on_gpu(job))
    try:
        for row in _dataset(job, missing_shards, reference, num_actors).iter_rows():
            writer.add_written(row["shard"], row["checksum"])
            progress(writer.num_written, writer.num_shards)
    except (PeagleError, BrokenPipeError):  # BrokenPipeError: nobody reads this process's output any more
        raise
    except Exception as error:
        hint = "the same command resumes the extraction after the last shard"
        raise to_peagle_error(error, "the extraction failed", hint=hint) from error


def _dataset(job: FeatureJob, missing_shards: dict[int, list[Sample]], reference: str, num_actors: int) -> Any:
    import ray.data

    cluster.keep_block_sizes()
    tables = []
    for number, samples in missing_shards.items():
        rows = [{"shard": number, **asdict(sample)} for sample in samples]
        tables.append(pa.Table.from_pylist(rows, schema=_SCHEMA))
    return ray.data.from_arrow(tables).map_batches(
        _ShardWriter,
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=num_actors),
        num_cpus=1,
        num_gpus=1 if _on_gpu(job) else None,
        fn_constructor_args=(reference, job.spec.aux_layers, str(job.folder.resolve()), job.device),
    )


class _ShardWriter:
    """An actor that computes and writes one shard per block of documents, and returns its checksum."""

    def __init__(self, reference: str, aux_layers: tuple[int, ...], folder: str, device: str) -> None:
        restrict_new_files()
        self._reader = load_reader(Path(local_model_path(reference)), aux_layers, device)
        self._folder, self._device = Path(folder), device

    def __call__(self, table: pa.Table) -> pa.Table:
        number = table["shard"][0].as_py()
        rows = table.drop_columns(["shard"]).to_pylist()
        samples = [Sample(**{**row, "token_ids": tuple(row["token_ids"])}) for row in rows]
        checksum = write_shard(self._folder, number, shard_tensors(samples, self._reader, device=self._device))
        return pa.table({"shard": [number], "checksum": [checksum]})


def _on_gpu(job: FeatureJob) -> bool:
    return job.device.startswith("cuda")


_POLL_S = 2.0


def train_on_workers(config: TrainConfig, listener: Listener) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        with ray_cluster():
            config = config.model_copy(
                update={"device": ("cuda" if has_gpus() else "cpu") if config.device == "auto" else config.device}
            )
            on_gpu = config.device == "cuda"
            require_workers(config.workers, on_gpu=on_gpu)
            extract_features = functools.partial(
                extract_on_actors,
                reference=_target_for_workers(config),
                workers=config.workers,
                device=config.device,
            )
            spending = stack.enter_context(
                training_spending(config, inspect(), listener.say, on_gpu=on_gpu, num_devices=config.workers)
            )
            prepared = prepare(config, listener, extract=spending.recording(extract_features))
            spending.start()
            with _ProgressFollower(prepared.folder.resolve(), listener, spending):
                divergence = _run_trainer(prepared)
        if divergence is not None:
            spending.record_lost()
        result = finish_from_checkpoint(prepared, divergence)
        spending.record_saved()
        return result


def _run_trainer(prepared: PreparedTraining) -> DivergedError | None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    config = prepared.config
    trainer = TorchTrainer(
        _train_worker,
        train_loop_config={
            "settings": _worker_config(config).model_dump(mode="json"),
            "fingerprint": prepared.fingerprint,
        },
        scaling_config=ScalingConfig(
            num_workers=config.workers, use_gpu=config.device == "cuda", resources_per_worker={"CPU": 1}
        ),
        run_config=RunConfig(
            name="workers",
            storage_path=str((config.output / "ray").resolve()),
            failure_config=FailureConfig(max_failures=config.worker_failures),
        ),
    )
    try:
        result = _run_in_thread(trainer.fit)
    except Exception as error:
        raise PeagleError(
            f"the workers failed: {_failure_reason(error)}",
            hint=f"the same command resumes from the last checkpoint in {prepared.folder}",
        ) from error
    divergence: DivergedError | None = result.return_value
    return divergence


def _run_in_thread(fit: Callable[[], Any]) -> Any:
    """Call `fit` in a thread and return its result.

    In the main thread Ray Train (2.60, `DataParallelTrainer._register_sigint_handler`) replaces the handler of SIGINT
    permanently: Ctrl-C ends the process with exit code 0 during the training, and has no effect later. With a thread,
    Ctrl-C ends this process and the workers, and their last checkpoint remains.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(fit())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="trainer", daemon=True).start()
        # Poll, because the system may deliver the signal to another thread. Python handles it when this thread runs.
        while not wait([future], timeout=_POLL_S).done:
            pass
        return future.result()
    finally:
        if not future.done():
            cluster.abandon()


def _worker_config(config: TrainConfig) -> TrainConfig:
    """Return the configuration with absolute paths, because workers have other working directories."""
    return config.model_copy(
        update={
            "model": _target_for_workers(config),
            "prompts": [
                source if is_built_in_source(source) else str(storage_path(source)) for source in config.prompts
            ],
            "output": config.output.resolve(),
            "features": config.features and config.features.resolve(),
            "exclude": [name if name in NAMED_SETS else str(Path(name).resolve()) for name in config.exclude],
            "init": config.init if config.init in INITS else str(Path(config.init).resolve()),
            "workers": 1,
        }
    )


def _target_for_workers(config: TrainConfig) -> str:
    """Return a name of the target that every node can resolve."""
    folder = user_path(config.model)
    is_folder = load_catalog().find(config.model) is None and folder.is_dir()
    return str(folder.resolve()) if is_folder else config.model


def _train_worker(loop_config: dict[str, Any]) -> DivergedError | None:
    """Train as one worker, with the inputs that the driver prepared.

    The fingerprint is the driver's, with paths as typed, so that a training run with one worker can be resumed with
    several, and vice versa. `DivergedError` is returned, because Ray would restart the workers if it were raised.
    """
    restrict_new_files()
    # The feature store is complete. If this node cannot access it, opening it fails.
    settings = TrainConfig(**loop_config["settings"])
    prepared = prepare(settings, Listener(), extract=lambda _job, _progress: None, verify=False)
    workers = ProcessGroup(prepared.device)
    head = prepared.new_head()
    try:
        train_prepared(prepared, head, workers=workers, fingerprint=loop_config["fingerprint"], progress=lambda _: None)
    except DivergedError as error:
        return error
    return None


def _failure_reason(error: Exception) -> str:
    """Return the last line of the first failed worker's traceback."""
    failures = getattr(error, "worker_failures", None) or {0: error}
    lines = [line for line in str(next(iter(failures.values()))).splitlines() if line[:1].strip()]
    return lines[-1] if lines else repr(error)


@dataclass
class _ProgressFollower:
    """Reports the first worker's steps and records its checkpoints, by polling the files in `folder`."""

    folder: Path
    listener: Listener
    spending: TrainingSpending
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> None:
        self._metrics = Metrics(self.folder)
        self._num_bytes_read, self._checkpoint_mtime_ns = self._metrics.num_bytes, checkpoint_mtime_ns(self.folder)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._report()

    def _follow(self) -> None:
        while not self._stop.wait(_POLL_S):
            self._report()

    def _report(self) -> None:
        """Report new steps. After a restart, the steps since the checkpoint are reported again."""
        previous_mtime_ns, self._checkpoint_mtime_ns = self._checkpoint_mtime_ns, checkpoint_mtime_ns(self.folder)
        if self._metrics.num_bytes < self._num_bytes_read:
            self.spending.record_lost()  # workers crashed, and new ones resume from the checkpoint
        elif self._checkpoint_mtime_ns != previous_mtime_ns:
            self.spending.record_saved()
        self.spending.beat()
        steps, self._num_bytes_read = self._metrics.read(self._num_bytes_read)
        for step in steps:
            self.listener.on_step(step)
