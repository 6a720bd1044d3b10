"""The stages of `peagle train`, from responses to a head that vLLM can serve. Each stage can be resumed.

The output folder contains `features/` (hidden states), `training/` (checkpoint.pt, metrics.jsonl, metrics.svg), `head/`
(config.json, model.safetensors, README.md) and `run.json` (configuration, data and results).
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from peagle.catalog.drafters import find_head
from peagle.catalog.folders import read_config
from peagle.catalog.head_files import check_fit, read_dtypes
from peagle.catalog.shipped_heads import complete_head
from peagle.drafter.config import TrainConfig
from peagle.drafter.features import (
    BATCH_TOKENS,
    GPU_BATCH_TOKENS,
    ComputedFeatures,
    FeatureJob,
    Features,
    FeatureSpec,
    FeatureStore,
    extract_here,
    load_reader,
    samples_fingerprint,
    target_fingerprint,
)
from peagle.drafter.forward import estimate_acceptance
from peagle.drafter.head import INITS, HeadSpec, build_head, possible_init, require_buildable, save_head
from peagle.drafter.metrics import PLOT, Metrics, TrainingProgress, training_plot
from peagle.drafter.model_card import render_card
from peagle.drafter.prompt_sources import TrainingDocuments, read_corpus
from peagle.drafter.spending import training_spending
from peagle.drafter.target import SERVED_TYPES, Target, end_tokens, load_target
from peagle.drafter.training import (
    SingleProcess,
    TrainingConfig,
    TrainingOutcome,
    load_checkpoint,
    plan_batches,
    train,
)
from peagle.drafter.vocabulary import DraftVocabulary, frequent_vocabulary, vocabulary_of_head
from peagle.engine.spec import BLOCK_METHODS
from peagle.errors import ConfigError, DivergedError
from peagle.files import converted_write_errors, sha256, write_atomic, write_json
from peagle.hardware import detect_machine


def check_training(config: TrainConfig, say: Callable[[str], None]) -> tuple[TrainConfig, Target, torch.device]:
    """Check that the head can be built for the target and trained on this machine.

    Returns the configuration with a supported `init`, the target, and the device of this process.
    """
    has_gpu = torch.cuda.is_available()
    # With several workers, the cluster does this check.
    if config.device == "cuda" and config.workers == 1 and not has_gpu:
        raise ConfigError("--device cuda: torch does not find a GPU on this machine", hint="use --device cpu")
    device = torch.device("cuda" if config.device != "cpu" and has_gpu else "cpu")
    if config.init not in INITS:
        config = config.model_copy(update={"init": find_head(config.init)})
    target = load_target(config.model, config.aux_layers, say)
    spec = head_spec(config, target)
    architecture = require_buildable(target.folder, spec)
    if config.mask_token_id >= target.vocab_size:
        raise ConfigError(
            f"--mask-token-id {config.mask_token_id}: the target's tokens are 0 to {target.vocab_size - 1}"
        )
    if config.init in INITS and config.draft_vocab_size > target.vocab_size:
        raise ConfigError(
            f"--draft-vocab-size {config.draft_vocab_size}: the target has only {target.vocab_size} tokens",
            hint=f"use --draft-vocab-size {target.vocab_size} or less",
        )
    if config.init not in INITS:
        init_folder = Path(config.init)
        check_fit(read_config(init_folder, ConfigError), target.model.config)
        dtypes = read_dtypes(complete_head(init_folder))
        if quantised := sorted(name for name, dtype in dtypes.items() if dtype.startswith("F8")):
            raise ConfigError(
                f"{init_folder}: {quantised[0]} is in FP8, which cannot be trained",
                hint="convert the head to bf16 with `peagle quantize-drafter --dequantize`",
            )
    if architecture.model_type not in SERVED_TYPES:
        say(
            f"vLLM 0.29 might not serve heads for {architecture.model_type!r} targets; it serves them for"
            f" {', '.join(SERVED_TYPES)}"
        )
    if config.verifier is None and target.model.upstream_id is None:
        say(
            f"the head will name {target.model.name!r} as its target; `vllm serve HEAD` loads the target by that name,"
            " so pass the target's hub id as --verifier"
        )
    init = possible_init(target.folder, architecture, spec, say)
    return config.model_copy(update={"init": init}), target, device


def head_spec(config: TrainConfig, target: Target) -> HeadSpec:
    options = [field.name for field in fields(HeadSpec) if field.name != "aux_layers"]
    return HeadSpec(aux_layers=target.aux_layers, **{name: getattr(config, name) for name in options})


_ACCEPTANCE_TOKENS = 2**16  # estimate the acceptance with this many tokens of held-out documents

# Fills a feature store, and passes the number of finished shards and of all shards to a callback.
Extract = Callable[[FeatureJob, Callable[[int, int], None]], None]


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks for messages, finished shards and training steps."""

    say: Callable[[str], None] = lambda message: None
    on_shard: Callable[[int, int], None] = lambda done, total: None
    on_step: Callable[[TrainingProgress], None] = lambda progress: None


@dataclass(frozen=True, kw_only=True)
class PreparedTraining:
    """A checked configuration, with the documents to train on, and the target's hidden states."""

    config: TrainConfig
    target: Target
    device: torch.device
    corpus: TrainingDocuments
    store: Features
    vocabulary: DraftVocabulary

    @property
    def folder(self) -> Path:
        return self.config.output / "training"

    @cached_property
    def spec(self) -> HeadSpec:
        return head_spec(self.config, self.target)

    @cached_property
    def recipe(self) -> TrainingConfig:
        config = self.config
        lengths = [self.store.num_tokens(index) for index in self.corpus.training_indices]
        steps_per_epoch = len(plan_batches(lengths, batch_tokens=config.batch_tokens, seed=config.seed))
        options = {
            field.name: getattr(config, field.name)
            for field in fields(TrainingConfig)
            if field.name in TrainConfig.model_fields
        }
        if config.algorithm in BLOCK_METHODS:
            # A block has a row for every depth: deep rows are not dropped but get a lower weight.
            options["depth_decay"] *= config.cod_ratio
        else:
            options["anchor_share"] = None
        return TrainingConfig(num_steps=max(1, round(config.epochs * steps_per_epoch)), **options)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The settings, in addition to the recipe, that must be equal to resume a run."""
        init = self.config.init
        head = asdict(self.spec)
        if not self.spec.num_frozen_layers:
            del head["num_frozen_layers"]  # checkpoints of earlier versions do not have it
        return {
            "features": asdict(self.store.spec),
            "head": head,
            "init": None if init in INITS else sha256(Path(init) / "model.safetensors"),
            "vocabulary": hashlib.sha256(repr(self.vocabulary.token_ids).encode()).hexdigest(),
        }

    def new_head(self) -> Any:
        return build_head(self.target.folder, self.spec, self.vocabulary, seed=self.config.seed).to(self.device)

    def sample_documents(self, documents: Sequence[int], num_tokens: int) -> list[int]:
        """Return random documents with at least `num_tokens` tokens in total, or all documents."""
        chosen: list[int] = []
        for index in random.Random(self.config.seed).sample(documents, len(documents)):
            if num_tokens <= 0:
                break
            num_tokens -= self.store.num_tokens(index)
            chosen.append(index)
        return chosen


def train_head(config: TrainConfig, listener: Listener) -> dict[str, Any]:
    on_gpu, hardware = config.device != "cpu" and torch.cuda.is_available(), detect_machine()
    num_devices = 1 if on_gpu else hardware.num_cpus
    with training_spending(config, hardware, listener.say, on_gpu=on_gpu, num_devices=num_devices) as spending:

        def progress(step: TrainingProgress) -> None:
            spending.beat()
            listener.on_step(step)

        prepared = prepare(config, listener, extract=spending.recording(extract_here))
        head = prepared.new_head()
        spending.start()
        try:
            outcome = train_prepared(prepared, head, progress=progress, on_save=spending.record_saved)
        except DivergedError as error:
            spending.record_lost()
            return finish_from_checkpoint(prepared, error)
        result = finish(prepared, head, outcome)
        spending.record_saved()
        return result


def prepare(
    config: TrainConfig, listener: Listener, *, extract: Extract = extract_here, verify: bool = True
) -> PreparedTraining:
    """Read the documents, and compute the target's missing hidden states with `extract`.

    `verify` compares stored states with their checksums, which only one of several processes needs to do.
    """
    config, target, device = check_training(config, listener.say)
    corpus = read_corpus(config, target, listener.say)
    store = _features(config, target, corpus, device, listener, extract, verify=verify)
    vocabulary = _vocabulary(config, target, corpus)
    listener.say(
        f"draft vocabulary: {vocabulary.size:,} tokens, which cover {vocabulary.coverage:.2%} of the documents"
    )
    return PreparedTraining(
        config=config, target=target, device=device, corpus=corpus, store=store, vocabulary=vocabulary
    )


def train_prepared(
    prepared: PreparedTraining,
    head: Any,
    *,
    workers: SingleProcess | None = None,
    fingerprint: dict[str, Any] | None = None,
    progress: Callable[[TrainingProgress], None],
    on_save: Callable[[], None] = lambda: None,
) -> TrainingOutcome:
    """Train `head` in place, starting from the last checkpoint if it exists.

    An existing checkpoint must have this `fingerprint`, by default that of `prepared`. `workers` are the processes
    that train together, by default only this one.
    """
    return train(
        head,
        prepared.store,
        prepared.corpus.training_indices,
        prepared.recipe,
        prepared.folder,
        fingerprint=prepared.fingerprint if fingerprint is None else fingerprint,
        device=prepared.device,
        workers=workers,
        time_budget_s=prepared.config.time_budget_s,
        name_of=lambda index: prepared.corpus.samples[index].id,
        progress=progress,
        on_save=on_save,
    )


def finish(prepared: PreparedTraining, head: Any, outcome: TrainingOutcome) -> dict[str, Any]:
    """Plot the metrics, estimate the acceptance, and save the head, its card and run.json; return run.json."""
    config = prepared.config
    steps, _ = Metrics(prepared.folder).read()
    if steps:  # the file may have been lost after the last step
        write_atomic(prepared.folder / PLOT, training_plot(steps).encode())
    with torch.autocast(prepared.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
        estimate = estimate_acceptance(
            head.eval(),
            prepared.store,
            prepared.sample_documents(sorted(prepared.corpus.held_out), _ACCEPTANCE_TOKENS),
            num_speculative_tokens=config.num_speculative_tokens,
        )
    corpus, model, features = prepared.corpus, prepared.target.model, prepared.store.spec
    verifier = config.verifier or model.upstream_id or model.name
    folder = config.output / "head"
    card = render_card(
        config,
        device=prepared.device,
        target_id=verifier,
        target_fingerprint=features.target,
        licence=model.card.licence.name if model.card else None,
        aux_layers=features.aux_layers,
        num_parameters=sum(p.numel() for p in head.parameters() if p.requires_grad),
        num_documents=len(corpus.training_indices),
        num_response_tokens=sum(corpus.samples[index].num_response_tokens for index in corpus.training_indices),
        num_tokens_seen=outcome.num_tokens,
        num_passes=config.epochs * outcome.step / prepared.recipe.num_steps,
        vocabulary=prepared.vocabulary,
        train_s=outcome.train_s,
        held_out=estimate,
    )
    result = {
        "config": config.model_dump(mode="json"),
        "finished": outcome.finished,
        "steps": outcome.step,
        "documents": len(corpus.training_indices),
        "held_out_documents": len(corpus.held_out),
        "rejected": [asdict(rejected) for rejected in corpus.rejected],
        "dropped": [
            {"id": str(drop.item.get("id")), "overlap": drop.overlap, "evaluation_set": drop.evaluation_set}
            for drop in corpus.dropped
        ],
        "tokens_seen": outcome.num_tokens,
        "train_s": outcome.train_s,
        "vocabulary_coverage": prepared.vocabulary.coverage,
        "held_out_acceptance": estimate.to_dict(),
        "head": str(folder),
    }
    with converted_write_errors(
        config.output, SafetensorError, hint="free some space and run the same command to save the head"
    ):
        save_head(head, folder, verifier=verifier, num_speculative_tokens=config.num_speculative_tokens)
        write_atomic(folder / "README.md", card.encode())
        write_json(config.output / "run.json", result)
    return result


def finish_from_checkpoint(prepared: PreparedTraining, diverged: DivergedError | None = None) -> dict[str, Any]:
    """Finish with the head of the last checkpoint; then raise `diverged`, if set, with a hint."""
    checkpoint = load_checkpoint(prepared.folder)
    if checkpoint is None:
        assert diverged is not None
        raise DivergedError(diverged.message, hint="there is no checkpoint yet; use lower learning rates") from diverged
    head = prepared.new_head()
    checkpoint.copy_to(head)
    outcome = TrainingOutcome(
        step=checkpoint.step,
        finished=checkpoint.step >= prepared.recipe.num_steps,
        num_tokens=checkpoint.num_tokens,
        train_s=checkpoint.train_s,
    )
    result = finish(prepared, head, outcome)
    if diverged is not None:
        hint = (
            f"continue from the last checkpoint with --init {result['head']}, lower learning rates and another --output"
        )
        raise DivergedError(diverged.message, hint=hint) from diverged
    return result


def _features(
    config: TrainConfig,
    target: Target,
    corpus: TrainingDocuments,
    device: torch.device,
    listener: Listener,
    extract: Extract,
    *,
    verify: bool,
) -> Features:
    samples = corpus.samples
    spec = FeatureSpec(
        target=target_fingerprint(target.folder),
        aux_layers=target.aux_layers,
        hidden_size=target.hidden_size,
        samples=samples_fingerprint(samples),
    )
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    listener.say(
        f"hidden states before layers {', '.join(map(str, spec.aux_layers))} and the final norm: {num_tokens:,} tokens,"
        f" {spec.bytes_per_token:,} bytes each, {num_tokens * spec.bytes_per_token / 2**30:.1f} GiB"
        + (", computed in each pass instead of stored" if config.on_the_fly else "")
    )
    if config.on_the_fly:
        # A user who sets micro-batches wants to save memory.
        use_large_batches = device.type != "cpu" and config.micro_batch_tokens is None
        batch_tokens = GPU_BATCH_TOKENS if use_large_batches else BATCH_TOKENS
        reader = partial(load_reader, target.folder, spec.aux_layers, device)
        return ComputedFeatures(samples, reader, spec, device=device, batch_tokens=batch_tokens)
    folder = config.features or config.output / "features"
    extract(
        FeatureJob(target=target.folder, samples=samples, spec=spec, folder=folder, device=str(device)),
        listener.on_shard,
    )
    return FeatureStore(folder, verify=verify)


def _vocabulary(config: TrainConfig, target: Target, corpus: TrainingDocuments) -> DraftVocabulary:
    text_config = target.model.config.get("text_config") or target.model.config
    # Prompts are counted, too, because responses repeat words of their prompts.
    token_ids = (token for index in corpus.training_indices for token in corpus.samples[index].token_ids)
    if config.init not in INITS:
        return vocabulary_of_head(Path(config.init), token_ids, target_size=target.vocab_size)
    return frequent_vocabulary(
        token_ids,
        size=config.draft_vocab_size,
        target_size=target.vocab_size,
        required=end_tokens(text_config),
    )
