"""The least that a decoding step can take: the bytes that it must read over what the memory moves in a second.

Weights that a step needs are read once by the target, and by the drafter once a pass: one pass with P-EAGLE, K with
EAGLE-3. Of a mixture's experts those count that its tokens are likely to meet; tokens that resemble each other meet
fewer. Activations, norms and written bytes are left out: it is a floor. Pure; it knows configurations (`config.json`),
not engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

_BF16 = 2
_SKIPPED_STEPS = 3  # the prompts' own, and the first ones after


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """What a step reads."""

    target_weights: float
    target_kv: float
    drafter_weights: float = 0.0
    drafter_kv: float = 0.0

    @property
    def target(self) -> float:
        """All that the target reads."""
        return self.target_weights + self.target_kv

    @property
    def drafter(self) -> float:
        """All that the drafter reads."""
        return self.drafter_weights + self.drafter_kv


def step_bytes(
    target: Mapping[str, Any],
    head: Mapping[str, Any] | None,
    *,
    k: int,
    concurrency: int,
    context_tokens: float,
    weight_bytes: int,
    kv_bytes: int,
) -> Bytes:
    """What a step of `concurrency` requests reads.

    Args:
        target, head: their `config.json`; no head decodes without speculation.
        k: draft tokens a step.
        context_tokens: of a request, on average.
        weight_bytes: of a weight of the target's layers; its lm_head and router stay in bf16, as vLLM has it.
        kv_bytes: of an element of the KV cache, the drafter's too.
    """
    num_tokens, cached = concurrency * (k + 1), concurrency * context_tokens * kv_bytes
    weights = target["num_hidden_layers"] * (
        _attention(target, target["hidden_size"]) * weight_bytes + _feed_forward(target, num_tokens, weight_bytes)
    )
    target_weights = weights + target["vocab_size"] * target["hidden_size"] * _BF16
    target_kv = target["num_hidden_layers"] * _kv_elements(target) * cached
    if head is None:
        return Bytes(target_weights=target_weights, target_kv=target_kv)
    layer = head["transformer_layer_config"]
    num_passes = 1 if head["speculators_model_type"] == "peagle" else k
    return Bytes(
        target_weights=target_weights,
        target_kv=target_kv,
        drafter_weights=num_passes * _head_weights(head, layer) + 3 * layer["hidden_size"] ** 2 * _head_dtype(head),
        drafter_kv=num_passes * layer["num_hidden_layers"] * _kv_elements(layer) * cached,
    )


def experts_met(num_experts: int, num_experts_per_token: int, num_tokens: int) -> float:
    """How many experts of a layer so many tokens meet, each choosing on its own.

    >>> experts_met(128, 8, 1), round(experts_met(128, 8, 8), 1)
    (8.0, 51.6)
    """
    return num_experts * (1 - (1 - num_experts_per_token / num_experts) ** num_tokens)


def median_step(steps: Sequence[Mapping[str, float]], num_requests: int) -> dict[str, float] | None:
    """The parts of a step in milliseconds, each by its median over steps with so many requests; None without any.

    `step` is from the beginning of one to that of the next; `host` what is left of it beside the parts that compute.
    """
    busy = [
        (step, (after["began_s"] - step["began_s"]) * 1000)
        for step, after in pairwise(steps)
        if step["num_requests"] == after["num_requests"] == num_requests
    ][_SKIPPED_STEPS:]
    if not busy:
        return None
    found = {
        name: median(step.get(part, 0.0) for step, _ in busy)
        for name, part in (
            ("target", "forward"),
            ("logits", "postprocess"),
            ("sampling", "sample"),
            ("drafter", "draft"),
        )
    }
    whole = median(wall_ms for _, wall_ms in busy)
    return {"step": whole, **found, "host": whole - sum(found.values()), "num_steps": len(busy)}


def _attention(layer: Mapping[str, Any], width_read: int) -> float:
    heads, kv_heads = (layer[name] * _head_dim(layer) for name in ("num_attention_heads", "num_key_value_heads"))
    return float(width_read * (heads + 2 * kv_heads) + heads * layer["hidden_size"])


def _feed_forward(layer: Mapping[str, Any], num_tokens: int, weight_bytes: int) -> float:
    """Bytes of one layer's experts, or of its only feed-forward block."""
    hidden = layer["hidden_size"]
    if "num_experts" not in layer:
        return float(3 * hidden * layer["intermediate_size"] * weight_bytes)
    met = experts_met(layer["num_experts"], layer["num_experts_per_tok"], num_tokens)
    return 3 * hidden * layer["moe_intermediate_size"] * met * weight_bytes + hidden * layer["num_experts"] * _BF16


def _head_weights(head: Mapping[str, Any], layer: Mapping[str, Any]) -> float:
    """Bytes of one pass: the layers, of which the first reads [embedding, state], and the draft vocabulary's rows."""
    hidden, num_layers, dtype_bytes = layer["hidden_size"], layer["num_hidden_layers"], _head_dtype(head)
    attention = _attention(layer, 2 * hidden) + (num_layers - 1) * _attention(layer, hidden)
    feed_forward = num_layers * 3 * hidden * layer["intermediate_size"]
    vocabulary = head.get("draft_vocab_size") or layer["vocab_size"]
    return (attention + feed_forward) * dtype_bytes + vocabulary * hidden * _BF16


def _head_dtype(head: Mapping[str, Any]) -> int:
    return 1 if head.get("quantization_config") else _BF16


def _kv_elements(layer: Mapping[str, Any]) -> int:
    return int(2 * layer["num_key_value_heads"] * _head_dim(layer))


def _head_dim(layer: Mapping[str, Any]) -> int:
    return int(layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"])
