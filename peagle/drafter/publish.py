"""Publish a trained head: a folder for vLLM, its model card, and run.json."""
# ruff: noqa: E501 - a Markdown table has its rows on one line

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.catalog.targets import ResolvedModel
from peagle.drafter.config import TrainConfig
from peagle.drafter.features import Features
from peagle.drafter.head import INITS, save_head
from peagle.drafter.prompt_sources import TrainingDocuments
from peagle.drafter.training import TrainingOutcome
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.files import write_atomic, write_json
from peagle.speculation import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """The figures on a model card."""

    verifier: str
    target_fingerprint: str
    licence: str | None
    config: TrainConfig
    aux_layers: tuple[int, ...]
    num_parameters: int
    num_documents: int
    num_response_tokens: int
    num_tokens_seen: int
    num_passes: float
    vocabulary_size: int
    vocabulary_coverage: float
    train_s: float
    hardware: str
    held_out: SpeculationStats


_METHODS = {"peagle": "P-EAGLE", "eagle3": "EAGLE-3"}
_HOW = {"peagle": "all in one pass", "eagle3": "one after another"}


def render_card(facts: CardFacts) -> str:
    """Return the card as Markdown, with the front matter that model hubs read."""
    config = facts.config
    layers = f"{config.num_layers} layer{'s' if config.num_layers > 1 else ''}"
    if config.num_key_value_heads is not None:
        layers += f" of {config.num_key_value_heads} KV heads"
    method = _METHODS[config.algorithm]
    parallel = ', "parallel_drafting": True' if config.algorithm == "peagle" else ""
    embeddings = "shares the target's embeddings; the file does not contain them"
    if config.train_embeddings:
        embeddings = "has its own embeddings"
    loss = f", depth decay {config.depth_decay:g}" if config.depth_decay != 1 else ""
    loss += ", D-PACE" if config.depth_weight == "dpace" else ""
    # Cards are published, so they do not name the user's folders.
    start = f"{config.init} start" if config.init in INITS else "start from an earlier head"
    optimizer = f"AdamW, peak learning rate {config.learning_rate:g}"
    if config.optimizer == "muon":
        optimizer = f"Muon and AdamW, peak learning rates {config.muon_learning_rate:g} and {config.learning_rate:g}"
    frozen = f", the first {config.num_frozen_layers} layers frozen" if config.num_frozen_layers else ""
    return f"""---
library_name: vllm
base_model: {facts.verifier}
license: {(facts.licence or "unknown").lower()}
tags: [speculative-decoding, {method.lower()}, speculators]
---
# {method} head for {facts.verifier}

Drafts tokens {_HOW[config.algorithm]} for `{facts.verifier}`. vLLM loads this folder directly:

```python
speculative_config = {{
    "method": "eagle3", "model": "THIS FOLDER", "num_speculative_tokens": {config.num_speculative_tokens}{parallel}
}}
```

The head {embeddings}.

| | |
|---|---|
| Architecture | {method}, {layers}, {facts.num_parameters / 1e6:.1f} M trained parameters, bf16 |
| Reads | states entering layers {", ".join(map(str, facts.aux_layers))} of the target |
| Draft vocabulary | {facts.vocabulary_size:,} tokens, {facts.vocabulary_coverage:.2%} of the training documents |
| Data | {facts.num_documents:,} {_responses(config)}, {facts.num_response_tokens:,} tokens, from {_by_name(config.prompts)}; overlap with {_by_name(config.exclude)} removed |
| Seen | {facts.num_tokens_seen:,} tokens in {facts.num_passes:.3g} passes{"" if config.init in INITS else ", in addition to those of the head that it continues"} |
| Recipe | K_train {config.num_depths}, COD ratio {config.cod_ratio:g}{loss}, {start}, {optimizer}, {config.batch_tokens:,} tokens per step, lm_head {"trained" if config.train_lm_head else "frozen"}{frozen} |
| Hardware | {facts.hardware}, {facts.train_s / 3600:.2f} h of training |
| Target's fingerprint | `{facts.target_fingerprint[:16]}` |
| Licence | {facts.licence or "that of its target"} |

## Acceptance

{_acceptance(facts.held_out, config.num_speculative_tokens)}
"""


def _responses(config: TrainConfig) -> str:
    if config.responses == "given":
        return "existing responses"
    return (
        f"responses of the target ({config.sampled_share:.0%} of the prompts at temperature {config.temperature:g}, the"
        " others greedy)"
    )


def _by_name(sources: Sequence[str]) -> str:
    """Join the names of files and folders, without their paths."""
    return ", ".join(Path(source).absolute().name for source in sources)


def _acceptance(stats: SpeculationStats, num_speculative_tokens: int) -> str:
    if stats.acceptance_length is None:
        return "Unknown, because no documents were held out."
    positions = " | ".join(f"{rate:.3f}" for rate in stats.acceptance_rates)
    heading = " | ".join(str(position + 1) for position in range(len(stats.acceptance_rates)))
    return (
        f"Estimated without an engine on held-out documents, K={num_speculative_tokens}; by position, the share of drafts"
        f" whose token at that position was accepted.\n\n| acceptance length | {heading} |\n|---|{'---|' * len(stats.acceptance_rates)}\n"
        f"| **{stats.acceptance_length:.2f}** | {positions} |"
    )


def publish(
    *,
    config: TrainConfig,
    model: ResolvedModel,
    device: torch.device,
    head: Any,
    corpus: TrainingDocuments,
    store: Features,
    vocabulary: DraftVocabulary,
    outcome: TrainingOutcome,
    num_passes: float,
    estimate: SpeculationStats,
) -> dict[str, Any]:
    """Save head, model card and run.json in `config.output`; return the contents of run.json."""
    verifier = config.verifier or model.upstream_id or model.name
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
        num_passes=num_passes,
        vocabulary_size=vocabulary.size,
        vocabulary_coverage=vocabulary.coverage,
        train_s=outcome.train_s,
        hardware=_hardware(config, device),
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
        "dropped": [
            {"id": str(drop.item.get("id")), "overlap": drop.overlap, "evaluation_set": drop.evaluation_set}
            for drop in corpus.dropped
        ],
        "tokens_seen": outcome.num_tokens,
        "train_s": outcome.train_s,
        "vocabulary_coverage": vocabulary.coverage,
        "held_out_acceptance": estimate.to_dict(),
        "head": str(folder),
    }
    write_json(config.output / "run.json", result)
    return result


def _hardware(config: TrainConfig, device: torch.device) -> str:
    if config.workers > 1:
        return f"{config.workers} workers with a {'GPU' if config.device == 'cuda' else 'CPU'} each"
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"
