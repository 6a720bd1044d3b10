"""The model card of a trained head."""
# ruff: noqa: E501 - a Markdown table has its rows on one line

import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from peagle.drafter.config import TrainConfig
from peagle.drafter.head import INITS
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.engine.spec import BLOCK_METHODS
from peagle.speculation import SpeculationStats


def render_card(
    config: TrainConfig,
    *,
    device: torch.device,
    target_id: str,
    target_fingerprint: str,
    licence: str | None,
    aux_layers: tuple[int, ...],
    num_parameters: int,
    num_documents: int,
    num_response_tokens: int,
    num_tokens_seen: int,
    num_passes: float,
    vocabulary: DraftVocabulary,
    train_s: float,
    held_out: SpeculationStats,
) -> str:
    """Return the card as Markdown, with the front matter that model hubs read."""
    layers = f"{config.num_layers} layer{'s' if config.num_layers > 1 else ''}"
    if config.num_key_value_heads is not None:
        layers += f" of {config.num_key_value_heads} KV heads"
    method_names = {"peagle": "P-EAGLE", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}
    method, is_block = method_names[config.algorithm], config.algorithm in BLOCK_METHODS
    vllm_method = config.algorithm if is_block else "eagle3"
    parallel_option = ', "parallel_drafting": True' if config.algorithm == "peagle" else ""
    drafting_order = "one after another" if config.algorithm == "eagle3" else "all in one pass"
    responses = "existing responses"
    if config.responses == "regenerate":
        share = f"{config.sampled_share:.0%} of the prompts at temperature {config.temperature:g}"
        responses = f"responses of the target ({share}, the others greedy)"
    embeddings = "shares the target's embeddings; the file does not contain them"
    if config.train_embeddings:
        embeddings = "has its own embeddings"
    loss = f", depth decay {config.depth_decay:g}" if config.depth_decay != 1 else ""
    loss += ", D-PACE" if config.depth_weight == "dpace" else ""
    sampling = f"COD ratio {config.cod_ratio:g}" + (f", anchor share {config.anchor_share:g}" if is_block else "")
    # Cards are published, so they do not name the user's folders.
    start = f"{config.init} start" if config.init in INITS else "start from an earlier head"
    optimizer = f"AdamW, peak learning rate {config.learning_rate:g}"
    if config.optimizer == "muon":
        optimizer = f"Muon and AdamW, peak learning rates {config.muon_learning_rate:g} and {config.learning_rate:g}"
    num_frozen = config.num_frozen_layers
    frozen = f", the first {num_frozen} layer{'s' if num_frozen > 1 else ''} frozen" if num_frozen else ""
    return f"""---
library_name: vllm
base_model: {target_id}
license: {(licence or "unknown").lower()}
tags: [speculative-decoding, {method.lower()}, speculators]
---
# {method} head for {target_id}

Drafts tokens {drafting_order} for `{target_id}`. vLLM loads this folder directly:

```python
speculative_config = {{
    "method": "{vllm_method}", "model": "THIS FOLDER", "num_speculative_tokens": {config.num_speculative_tokens}{parallel_option}
}}
```

The head {embeddings}.

| | |
|---|---|
| Architecture | {method}, {layers}, {num_parameters / 1e6:.1f} M trained parameters, bf16 |
| Reads | states entering layers {", ".join(map(str, aux_layers))} of the target |
| Draft vocabulary | {vocabulary.size:,} tokens, which cover {vocabulary.coverage:.2%} of the tokens in the training documents |
| Data | {num_documents:,} {responses}, {num_response_tokens:,} tokens, from {_names_of(config.prompts)}; overlap with {_names_of(config.exclude)} removed |
| Seen | {num_tokens_seen:,} tokens in {num_passes:.3g} passes{"" if config.init in INITS else ", in addition to those of the head that it continues"} |
| Recipe | K_train {config.num_depths}, {sampling}{loss}, {start}, {optimizer}, {config.batch_tokens:,} tokens per step, lm_head {"trained" if config.train_lm_head else "frozen"}{frozen} |
| Hardware | {_hardware(config, device)}, {train_s / 3600:.2f} h of training |
| Target's fingerprint | `{target_fingerprint[:16]}` |
| Licence | {licence or "that of its target"} |

## Acceptance

{_acceptance(held_out, config.num_speculative_tokens)}
"""


def _names_of(sources: Sequence[str]) -> str:
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


def _hardware(config: TrainConfig, device: torch.device) -> str:
    if config.workers > 1:
        return f"{config.workers} workers with a {'GPU' if config.device == 'cuda' else 'CPU'} each"
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"
