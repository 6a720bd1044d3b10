"""The target's states extracted by Ray Data actors: a block is a shard, an actor a target.

Actors write their shards where the store is; the driver alone names them in the index, after it has checked them. So a
shard that is done twice, or half, by an actor that dies is written again, and the store equals one of a single process.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from peagle.catalog.targets import localize
from peagle.drafter.data import Sample
from peagle.drafter.features import FeatureJob, open_store, shard_tensors
from peagle.drafter.hidden_states import load_reader
from peagle.drafter.store import write_shard
from peagle.errors import PeagleError
from peagle.private import keep_private
from pipelines.batch import cluster
from pipelines.failures import explain

_SCHEMA = pa.schema(
    [("shard", pa.int64()), ("id", pa.string()), ("token_ids", pa.list_(pa.int32())), ("num_prompt_tokens", pa.int64())]
)


def extract_on_actors(
    job: FeatureJob, progress: Callable[[int, int], None], *, reference: str, workers: int, device: str
) -> None:
    """Do `job` with so many actors, each with the target.

    Args:
        progress: called with (shards done, shards in all) after each.
        reference: the target by a name that every node can resolve.
        workers: most actors at once.
        device: of the actors, in place of the job's; on "cuda" each has a GPU.

    Raises:
        ConfigError: the store holds the features of something else.
        CapacityError: the disk or the cluster cannot hold what was asked for.
        PeagleError: an actor could not do its shard; those that are done stay.
    """
    job = replace(job, device=device)
    writer, missing = open_store(job.samples, job.spec, job.folder)
    if not missing:
        return
    num_actors = min(workers, len(missing))
    cluster.require_workers(num_actors, on_gpu=_on_gpu(job))
    for shard, checksum in _written(_dataset(job, missing, reference, num_actors)):
        writer.take(shard, checksum)
        progress(writer.num_written, writer.num_shards)


def _dataset(job: FeatureJob, missing: dict[int, list[Sample]], reference: str, num_actors: int) -> Any:
    import ray.data

    cluster.keep_blocks()
    return ray.data.from_arrow([_table(number, samples) for number, samples in missing.items()]).map_batches(
        _ShardWriter,
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=num_actors),
        num_cpus=1,
        num_gpus=1 if _on_gpu(job) else None,
        fn_constructor_args=(reference, job.spec.aux_layers, str(job.folder.resolve()), job.device),
    )


def _written(dataset: Any) -> Iterator[tuple[int, str]]:
    """Shards and checksums as they are done."""
    try:
        for row in dataset.iter_rows():
            yield row["shard"], row["checksum"]
    except PeagleError:
        raise
    except Exception as error:
        raise explain(
            error, "the extraction broke off", hint="the same command goes on; finished shards stay"
        ) from error


class _ShardWriter:
    """An actor with a target; a block of documents in, their shard's checksum out."""

    def __init__(self, reference: str, aux_layers: tuple[int, ...], folder: str, device: str) -> None:
        keep_private()
        self._reader = load_reader(Path(localize(reference)), aux_layers, device)
        self._folder, self._device = Path(folder), device

    def __call__(self, table: pa.Table) -> pa.Table:
        number = table["shard"][0].as_py()
        rows = table.drop_columns(["shard"]).to_pylist()
        samples = [Sample(**{**row, "token_ids": tuple(row["token_ids"])}) for row in rows]
        checksum = write_shard(self._folder, number, shard_tensors(samples, self._reader, device=self._device))
        return pa.table({"shard": [number], "checksum": [checksum]})


def _table(number: int, samples: list[Sample]) -> pa.Table:
    rows = [{"shard": number, **asdict(sample)} for sample in samples]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _on_gpu(job: FeatureJob) -> bool:
    return job.device.startswith("cuda")
