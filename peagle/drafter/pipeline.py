"""From responses to a head that vLLM serves: the steps of `peagle train`, each resumable by itself.

Layout of the output folder: `features/` (the target's states), `training/` (checkpoint.pt, metrics.jsonl), `head/`
(config.json, model.safetensors, README.md), `run.json` (configuration, data and figures).
"""

import hashlib
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.catalog.targets import ResolvedModel, resolve_model
from peagle.drafter.config import TrainConfig
from peagle.drafter.data import Rejected, Row, Sample, build_samples, read_responses
from peagle.drafter.decontamination import Dropped, NgramIndex, decontaminate, humaneval_references
from peagle.drafter.estimate import estimate_acceptance
from peagle.drafter.features import (
    HiddenStateReader,
    default_aux_layers,
    extract_features,
    samples_fingerprint,
    target_fingerprint,
)
from peagle.drafter.head import INITS, HeadSpec, build_head, save_head
from peagle.drafter.model_card import CardFacts, render_card
from peagle.drafter.recipe import TrainingConfig
from peagle.drafter.store import FeatureSpec, FeatureStore
from peagle.drafter.training import Progress, TrainingOutcome, plan_batches, train
from peagle.drafter.vocabulary import DraftVocabulary, frequent_vocabulary, vocabulary_of_head
from peagle.errors import ConfigError, InputError
from peagle.files import sha256, write_atomic, write_json
from peagle.speculation import SpeculationStats


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what happens: sentences, shards extracted, training steps."""

    say: Callable[[str], None] = lambda message: None
    shard: Callable[[int, int], None] = lambda done, total: None
    step: Callable[[Progress], None] = lambda progress: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The documents of a training, and what was left out.

    Attributes:
        held_out: indices of the documents that are not trained on.
    """

    samples: list[Sample]
    rejected: list[Rejected]
    dropped: list[Dropped[Row]]
    held_out: frozenset[int]

    @property
    def trained(self) -> list[int]:
        """Indices of the documents that are trained on."""
        return [index for index in range(len(self.samples)) if index not in self.held_out]


def train_head(config: TrainConfig, listener: Listener) -> dict[str, Any]:
    """Train a head as `config` says and save it; the figures of the run.

    Raises:
        ConfigError: something asked for cannot be; says what.
        PeagleError: the loss is not finite, or the disk is full.
    """
    device = _device(config.device)
    model = resolve_model(config.target, announce=listener.say)
    target = Path(model.path)
    if not target.is_dir():
        raise ConfigError(f"{model.path}: a head is trained from a local folder", hint="download the target first")
    corpus = _read_corpus(config, target, listener)
    store = _extract(config, target, corpus.samples, device, listener)
    vocabulary = _vocabulary(config, model, store, corpus.trained)
    listener.say(f"draft vocabulary of {vocabulary.size:,} tokens covers {vocabulary.coverage:.2%} of the documents'")
    head = build_head(target, _head_spec(config, store), vocabulary, seed=config.seed).to(device)
    outcome = _train(config, head, store, corpus.trained, vocabulary, device, listener)
    estimate = _estimate(config, head.eval(), store, corpus.held_out, device)
    return _publish(config, model, head, corpus, store, vocabulary, outcome, estimate)


def _read_corpus(config: TrainConfig, target: Path, listener: Listener) -> Corpus:
    from transformers import AutoTokenizer

    rows = [row for source in config.responses for row in read_responses(source)]
    references = humaneval_references() if config.exclude == "humaneval" else []
    checked = decontaminate(rows, NgramIndex(references), text=lambda row: _text(row, config.prompt_column))
    tokenizer = AutoTokenizer.from_pretrained(target)
    samples, rejected = build_samples(
        checked.kept, tokenizer, prompt_column=config.prompt_column, max_tokens=config.max_document_tokens
    )
    if not samples:
        reason = rejected[0].reason if rejected else "every row overlaps the evaluation set"
        sources = ", ".join(map(str, config.responses))
        raise InputError(f"{sources}: no row gives a document; the first: {reason}")
    listener.say(f"{len(samples):,} documents, {len(rejected)} rejected, {len(checked.dropped)} dropped for overlap")
    for drop in checked.dropped:
        listener.say(f"  overlaps {config.exclude}: {drop.item.get('id', '?')}: {drop.overlap!r}")
    num_held_out = round(len(samples) * config.held_out)
    by_hash = sorted(range(len(samples)), key=lambda i: hashlib.sha256(samples[i].id.encode()).digest())
    return Corpus(
        samples=samples,
        rejected=rejected,
        dropped=checked.dropped,
        held_out=frozenset(by_hash[:num_held_out]),
    )


def _text(row: Row, prompt_column: str) -> str:
    messages = "\n".join(str(message.get("content", "")) for message in row.get("messages") or ())
    return f"{messages}\n{row.get(prompt_column, '')}\n{row.get('response', '')}"


def _extract(
    config: TrainConfig, target: Path, samples: list[Sample], device: torch.device, listener: Listener
) -> FeatureStore:
    """The store of the samples' features, computed as far as it is not there."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.from_pretrained(target)
    spec = FeatureSpec(
        target=target_fingerprint(target),
        aux_layers=tuple(config.aux_layers or default_aux_layers(shape.num_hidden_layers)),
        hidden_size=shape.hidden_size,
        samples=samples_fingerprint(samples),
    )
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    listener.say(
        f"states entering layers {', '.join(map(str, spec.aux_layers))} and the final norm: {num_tokens:,} tokens,"
        f" {spec.bytes_per_token:,} bytes each, {num_tokens * spec.bytes_per_token / 2**30:.1f} GiB"
    )
    folder = config.features or config.output / "features"
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).to(device).eval()
    extract_features(
        samples,
        HiddenStateReader(model, spec.aux_layers),
        spec,
        folder,
        device=device,
        progress=listener.shard,
    )
    return FeatureStore(folder)


def _vocabulary(
    config: TrainConfig, model: ResolvedModel, store: FeatureStore, documents: list[int]
) -> DraftVocabulary:
    """Counted over prompts too: responses repeat them, and those of other prompts will repeat other words."""
    text = model.config.get("text_config") or model.config
    token_ids = (token for index in documents for token in store[index].token_ids_T.tolist())
    if config.init not in INITS:
        return vocabulary_of_head(Path(config.init), token_ids, target_size=text["vocab_size"])
    end = text.get("eos_token_id")
    return frequent_vocabulary(
        token_ids,
        size=config.draft_vocab_size,
        target_size=text["vocab_size"],
        always=end if isinstance(end, list) else [end] if end is not None else [],
    )


def _head_spec(config: TrainConfig, store: FeatureStore) -> HeadSpec:
    return HeadSpec(
        aux_layers=store.spec.aux_layers,
        algorithm=config.algorithm,
        num_layers=config.num_layers,
        num_key_value_heads=config.num_key_value_heads,
        num_depths=config.num_depths,
        mask_token_id=config.mask_token_id,
        init=config.init,
        train_lm_head=config.train_lm_head,
    )


def _train(
    config: TrainConfig,
    head: Any,
    store: FeatureStore,
    documents: list[int],
    vocabulary: DraftVocabulary,
    device: torch.device,
    listener: Listener,
) -> TrainingOutcome:
    lengths = [store.num_tokens(index) for index in documents]
    steps_per_epoch = len(plan_batches(lengths, batch_tokens=config.batch_tokens, seed=config.seed))
    recipe = TrainingConfig(
        num_steps=max(1, round(config.epochs * steps_per_epoch)),
        **{name: getattr(config, name) for name in _RECIPE_KEYS},
    )
    identity = {
        "features": asdict(store.spec),
        "head": asdict(_head_spec(config, store)),
        "init": None if config.init in INITS else sha256(Path(config.init) / "model.safetensors"),
        "vocabulary": hashlib.sha256(repr(vocabulary.token_ids).encode()).hexdigest(),
    }
    return train(
        head,
        store,
        documents,
        recipe,
        config.output / "training",
        fingerprint=identity,
        device=device,
        time_budget_s=config.time_budget_s,
        progress=listener.step,
    )


_RECIPE_KEYS = (
    "batch_tokens",
    "micro_batch_tokens",
    "num_depths",
    "cod_ratio",
    "depth_decay",
    "learning_rate",
    "final_learning_rate",
    "warmup_steps",
    "weight_decay",
    "clip_norm",
    "precision",
    "seed",
)


def _estimate(
    config: TrainConfig, head: Any, store: FeatureStore, held_out: frozenset[int], device: torch.device
) -> SpeculationStats:
    with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
        return estimate_acceptance(head, store, sorted(held_out), num_speculative_tokens=config.num_speculative_tokens)


def _publish(
    config: TrainConfig,
    model: ResolvedModel,
    head: Any,
    corpus: Corpus,
    store: FeatureStore,
    vocabulary: DraftVocabulary,
    outcome: TrainingOutcome,
    estimate: SpeculationStats,
) -> dict[str, Any]:
    """Save head, model card and run.json; what run.json says."""
    verifier = config.verifier or (model.card.name if model.card else model.name)
    folder = config.output / "head"
    save_head(head, folder, verifier=verifier, num_speculative_tokens=config.num_speculative_tokens)
    facts = CardFacts(
        verifier=verifier,
        target_fingerprint=store.spec.target,
        licence=model.card.licence.name if model.card else None,
        config=config,
        aux_layers=store.spec.aux_layers,
        num_parameters=sum(p.numel() for p in head.parameters() if p.requires_grad),
        num_documents=len(corpus.trained),
        num_response_tokens=sum(corpus.samples[index].num_response_tokens for index in corpus.trained),
        num_tokens_seen=outcome.num_tokens,
        vocabulary_coverage=vocabulary.coverage,
        train_s=outcome.train_s,
        hardware=_hardware(),
        held_out=estimate,
    )
    write_atomic(folder / "README.md", render_card(facts).encode())
    result = {
        "config": config.model_dump(mode="json"),
        "finished": outcome.finished,
        "steps": outcome.step,
        "documents": len(corpus.trained),
        "held_out_documents": len(corpus.held_out),
        "rejected": [asdict(rejected) for rejected in corpus.rejected],
        "dropped": [{"id": str(drop.item.get("id")), "overlap": drop.overlap} for drop in corpus.dropped],
        "tokens_seen": outcome.num_tokens,
        "train_s": outcome.train_s,
        "vocabulary_coverage": vocabulary.coverage,
        "held_out_acceptance": estimate.to_dict(),
        "head": str(folder),
    }
    write_json(config.output / "run.json", result)
    return result


def _device(asked: str) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here", hint="use --device cpu")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def _hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"
