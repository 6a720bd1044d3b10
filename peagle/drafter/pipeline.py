"""The steps of `peagle train`: from responses to a head that vLLM serves.

Each is resumable by itself.

`prepare` reads the documents and has the target's states computed; `train_prepared` trains, alone or as one of several
workers; `finish` estimates the acceptance and saves the head. `train_head` is the three in one process.

Layout of the output folder: `features/` (the target's states), `training/` (checkpoint.pt, metrics.jsonl,
metrics.svg), `head/` (config.json, model.safetensors, README.md), `run.json` (configuration, data and figures).
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from peagle.drafter.checkpoint import has_checkpoint, load_checkpoint
from peagle.drafter.checks import check_training, head_spec
from peagle.drafter.config import TrainConfig
from peagle.drafter.estimate import estimate_acceptance
from peagle.drafter.features import (
    BATCH_TOKENS,
    GPU_BATCH_TOKENS,
    ComputedFeatures,
    FeatureJob,
    extract,
    load_reader,
    samples_fingerprint,
    target_fingerprint,
)
from peagle.drafter.head import build_head
from peagle.drafter.head_spec import INITS, HeadSpec
from peagle.drafter.metrics import PLOT, Metrics, TrainingProgress, training_plot
from peagle.drafter.micro import sampled_batch
from peagle.drafter.prompt_sources import TrainingDocuments, read_corpus
from peagle.drafter.publish import publish
from peagle.drafter.recipe import TrainingConfig, plan_batches
from peagle.drafter.spending import training_spending
from peagle.drafter.store import Features, FeatureSpec, FeatureStore
from peagle.drafter.target import Target, end_tokens
from peagle.drafter.training import TrainingOutcome, train
from peagle.drafter.unroll import unroll
from peagle.drafter.vocabulary import DraftVocabulary, frequent_vocabulary, vocabulary_of_head
from peagle.drafter.workers import Workers
from peagle.errors import DivergedError
from peagle.files import sha256, write_atomic, writing
from peagle.hardware import detect
from peagle.machine import identified

_RECIPE = (
    "batch_tokens", "micro_batch_tokens", "num_depths", "cod_ratio", "depth_decay", "depth_weight", "loss",
    "optimizer", "learning_rate", "muon_learning_rate", "final_learning_rate", "warmup_steps", "weight_decay",
    "clip_norm", "precision", "seed",
)  # fmt: skip

_TOKENS_PER_DIMENSION = 8  # of documents that further layers are fitted to
_ESTIMATED_TOKENS = 2**16  # of documents that the acceptance is estimated on

# Has a store filled, and tells how far it is: shards done, and in all.
Extract = Callable[[FeatureJob, Callable[[int, int], None]], None]


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what happens: sentences, shards extracted, training steps."""

    say: Callable[[str], None] = lambda message: None
    shard: Callable[[int, int], None] = lambda done, total: None
    step: Callable[[TrainingProgress], None] = lambda progress: None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that a training starts from."""

    config: TrainConfig
    target: Target
    device: torch.device
    corpus: TrainingDocuments
    store: Features
    vocabulary: DraftVocabulary

    @property
    def folder(self) -> Path:
        """Where the checkpoint and the metrics are."""
        return self.config.output / "training"

    @cached_property
    def spec(self) -> HeadSpec:
        """The shape of the head."""
        return head_spec(self.config, self.target)

    @cached_property
    def recipe(self) -> TrainingConfig:
        """How it is trained."""
        config = self.config
        lengths = [self.store.num_tokens(index) for index in self.corpus.trained]
        steps_per_epoch = len(plan_batches(lengths, batch_tokens=config.batch_tokens, seed=config.seed))
        return TrainingConfig(
            num_steps=max(1, round(config.epochs * steps_per_epoch)),
            **{name: getattr(config, name) for name in _RECIPE},
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The settings that must be equal for a training to go on, beside the recipe."""
        init = self.config.init
        head = asdict(self.spec)
        if not self.spec.num_frozen_layers:
            del head["num_frozen_layers"]  # so that trainings from before there were any go on
        return {
            "features": asdict(self.store.spec),
            "head": head,
            "init": None if init in INITS else sha256(Path(init) / "model.safetensors"),
            "vocabulary": hashlib.sha256(repr(self.vocabulary.token_ids).encode()).hexdigest(),
        }

    def new_head(self, *, is_told: bool = False) -> Any:
        """The head with its first weights.

        Args:
            is_told: another worker tells them, so that what takes long to compute is left out; as where a checkpoint
                takes their place.

        Raises:
            ConfigError: layers cannot be unrolled on these documents.
        """
        head = build_head(self.target.folder, self.spec, self.vocabulary, seed=self.config.seed).to(self.device)
        if self.spec.further_layers == "unrolled" and not is_told and not has_checkpoint(self.folder):
            chosen = self.sample(self.corpus.trained, _TOKENS_PER_DIMENSION * self.target.hidden_size)
            unroll(head, sampled_batch(self.store, chosen, self.recipe, step=0).to(self.device))
        return head

    def sample(self, documents: Sequence[int], num_tokens: int) -> list[int]:
        """Some of the documents, drawn by the seed until they hold so many tokens, or all."""
        chosen: list[int] = []
        for index in random.Random(self.config.seed).sample(documents, len(documents)):
            if num_tokens <= 0:
                break
            num_tokens -= self.store.num_tokens(index)
            chosen.append(index)
        return chosen


def train_head(config: TrainConfig, listener: Listener) -> dict[str, Any]:
    """Train a head as `config` says and save it; the figures of the run.

    Raises:
        ConfigError: something asked for cannot be; says what.
        DivergedError: the loss is not finite; the head of the last checkpoint is saved.
        CapacityError: the disk is full.
        PriceError: a price was asked for and there is none.
    """
    on_gpu, hardware = config.device != "cpu" and torch.cuda.is_available(), identified(detect())
    num_devices = 1 if on_gpu else hardware.num_cpus
    with training_spending(config, hardware, listener.say, on_gpu=on_gpu, num_devices=num_devices) as spending:

        def progress(step: TrainingProgress) -> None:
            spending.beat()
            listener.step(step)

        prepared = prepare(config, listener, extract=spending.counting(extract))
        head = prepared.new_head()
        spending.start()
        try:
            outcome = train_prepared(prepared, head, progress=progress, saved=spending.keep)
        except DivergedError as error:
            spending.drop()
            return finish_from_checkpoint(prepared, error)
        result = finish(prepared, head, outcome)
        spending.keep()
        return result


def prepare(config: TrainConfig, listener: Listener, *, extract: Extract = extract, verify: bool = True) -> Prepared:
    """Read the documents and compute the target's missing states.

    `extract` computes them.

    Args:
        verify: compare stored states with their checksums. Of several processes one does it for all.

    Raises:
        ConfigError: there can be no such training, or the folder holds the features of something else.
        InputError: no document is left to train on.
        CapacityError: the disk cannot hold the features.
    """
    config, target, device = check_training(config, listener.say)
    corpus = read_corpus(config, target, listener.say)
    store = _features(config, target, corpus, device, listener, extract, verify=verify)
    vocabulary = _vocabulary(config, target, corpus)
    listener.say(f"draft vocabulary of {vocabulary.size:,} tokens covers {vocabulary.coverage:.2%} of the documents'")
    return Prepared(config=config, target=target, device=device, corpus=corpus, store=store, vocabulary=vocabulary)


def train_prepared(
    prepared: Prepared,
    head: Any,
    *,
    workers: Workers | None = None,
    identity: dict[str, Any] | None = None,
    progress: Callable[[TrainingProgress], None],
    saved: Callable[[], None] = lambda: None,
) -> TrainingOutcome:
    """Train `head` in place, from the last checkpoint when there is one.

    Args:
        identity: what a checkpoint must be a training of, where another process has said it; None for `prepared`'s own.
        progress, saved: called after every step, and after every checkpoint.
    """
    return train(
        head,
        prepared.store,
        prepared.corpus.trained,
        prepared.recipe,
        prepared.folder,
        fingerprint=prepared.identity if identity is None else identity,
        device=prepared.device,
        workers=workers,
        time_budget_s=prepared.config.time_budget_s,
        name_of=lambda index: prepared.corpus.samples[index].id,
        progress=progress,
        saved=saved,
    )


def finish(prepared: Prepared, head: Any, outcome: TrainingOutcome) -> dict[str, Any]:
    """Plot the training, estimate acceptance, and save the head with its card.

    The estimate is over documents held out, not more of them than tell it.

    Returns:
        What run.json says.
    """
    config = prepared.config
    steps, _ = Metrics(prepared.folder).read()
    if steps:  # none where the file was lost after the last of them
        write_atomic(prepared.folder / PLOT, training_plot(steps, loss_name=config.loss).encode())
    with torch.autocast(prepared.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
        estimate = estimate_acceptance(
            head.eval(),
            prepared.store,
            prepared.sample(sorted(prepared.corpus.held_out), _ESTIMATED_TOKENS),
            num_speculative_tokens=config.num_speculative_tokens,
        )
    with writing(config.output, SafetensorError, hint="free some space; the same command saves the head"):
        return publish(
            config=config,
            model=prepared.target.model,
            device=prepared.device,
            head=head,
            corpus=prepared.corpus,
            store=prepared.store,
            vocabulary=prepared.vocabulary,
            outcome=outcome,
            num_passes=config.epochs * outcome.step / prepared.recipe.num_steps,
            estimate=estimate,
        )


def finish_from_checkpoint(prepared: Prepared, diverged: DivergedError | None = None) -> dict[str, Any]:
    """`finish` with the head of the last checkpoint.

    Other processes trained it, or this one before it diverged.

    Raises:
        DivergedError: `diverged`, once the head is saved, with how to go on from it: the same training would come to
            the same step again, and its checkpoint is refused to another recipe.
    """
    checkpoint = load_checkpoint(prepared.folder)
    if checkpoint is None:
        assert diverged is not None
        raise DivergedError(
            diverged.message, hint="there was no checkpoint yet: give lower learning rates"
        ) from diverged
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
        hint = f"go on from the last checkpoint with --init {result['head']}, lower learning rates and another --output"
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
    """The features of the documents: the finished store, or what computes them."""
    samples = corpus.samples
    spec = FeatureSpec(
        target=target_fingerprint(target.folder),
        aux_layers=target.aux_layers,
        hidden_size=target.hidden_size,
        samples=samples_fingerprint(samples),
    )
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    listener.say(
        f"states entering layers {', '.join(map(str, spec.aux_layers))} and the final norm: {num_tokens:,} tokens,"
        f" {spec.bytes_per_token:,} bytes each, {num_tokens * spec.bytes_per_token / 2**30:.1f} GiB"
        + (", not stored but computed in each pass" if config.on_the_fly else "")
    )
    if config.on_the_fly:
        large = device.type != "cpu" and config.micro_batch_tokens is None  # which saves memory
        batch_tokens = GPU_BATCH_TOKENS if large else BATCH_TOKENS
        reader = partial(load_reader, target.folder, spec.aux_layers, device)
        return ComputedFeatures(samples, reader, spec, device=device, batch_tokens=batch_tokens)
    folder = config.features or config.output / "features"
    extract(
        FeatureJob(target=target.folder, samples=samples, spec=spec, folder=folder, device=str(device)), listener.shard
    )
    return FeatureStore(folder, verify=verify)


def _vocabulary(config: TrainConfig, target: Target, corpus: TrainingDocuments) -> DraftVocabulary:
    """The draft vocabulary, counted over prompts too.

    Responses repeat their prompts, and other prompts will repeat other words.
    """
    text = target.model.config.get("text_config") or target.model.config
    token_ids = (token for index in corpus.trained for token in corpus.samples[index].token_ids)
    if config.init not in INITS:
        return vocabulary_of_head(Path(config.init), token_ids, target_size=target.vocab_size)
    return frequent_vocabulary(
        token_ids,
        size=config.draft_vocab_size,
        target_size=target.vocab_size,
        always=end_tokens(text),
    )
