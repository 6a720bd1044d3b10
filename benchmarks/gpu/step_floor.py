"""A lower bound on the time of a decoding step: the bytes that it must read, divided by the memory bandwidth.

The target reads its weights once per step. The drafter reads its weights once per pass: one pass with P-EAGLE, K passes
with EAGLE-3. Of a mixture's experts, those count that the step's tokens would use if routed independently; similar
tokens use fewer. Activations, norms and writes are not counted. All is computed from `config.json`, without an engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

_BF16 = 2
_SKIPPED_STEPS = 3  # the step that computes the prompts, and the first ones after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """The bytes that a step reads."""

    target_weights: float
    target_kv: float
    drafter_weights: float = 0.0
    drafter_kv: float = 0.0

    @property
    def target(self) -> float:
        """The target's weights and KV cache."""
        return self.target_weights + self.target_kv

    @property
    def drafter(self) -> float:
        """The drafter's weights and KV cache."""
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
    """Return the bytes that a step with `concurrency` requests reads.

    Args:
        target, head: their `config.json`; `head` is None without speculation.
        k: draft tokens per step and request.
        context_tokens: average context length of a request.
        weight_bytes: bytes per weight of the target's layers; vLLM keeps lm_head and router in bf16.
        kv_bytes: bytes per element of the KV cache, for target and drafter.
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
        drafter_weights=num_passes * _head_weights(head, layer)
        + 3 * layer["hidden_size"] ** 2 * _head_weight_bytes(head),
        drafter_kv=num_passes * layer["num_hidden_layers"] * _kv_elements(layer) * cached,
    )


def expected_experts(num_experts: int, num_experts_per_token: int, num_tokens: int) -> float:
    """Return how many experts of a layer are used on average if each token is routed independently.

    >>> expected_experts(128, 8, 1), round(expected_experts(128, 8, 8), 1)
    (8.0, 51.6)
    """
    return num_experts * (1 - (1 - num_experts_per_token / num_experts) ** num_tokens)


def median_step(steps: Sequence[Mapping[str, float]], num_requests: int) -> dict[str, float] | None:
    """Return the median milliseconds of each part over the steps with `num_requests` requests; None without any.

    `step` is the time from the start of a step to the start of the next. `host` is `step` minus the other parts.
    """
    full_steps = [
        (step, (after["began_s"] - step["began_s"]) * 1000)
        for step, after in pairwise(steps)
        if step["num_requests"] == after["num_requests"] == num_requests
    ][_SKIPPED_STEPS:]
    if not full_steps:
        return None
    parts = {
        name: median(step.get(part, 0.0) for step, _ in full_steps)
        for name, part in (
            ("target", "forward"),
            ("logits", "postprocess"),
            ("sampling", "sample"),
            ("drafter", "draft"),
        )
    }
    whole = median(wall_ms for _, wall_ms in full_steps)
    return {"step": whole, **parts, "host": whole - sum(parts.values()), "num_steps": len(full_steps)}


def _attention(layer: Mapping[str, Any], input_width: int) -> float:
    heads, kv_heads = (layer[name] * _head_dim(layer) for name in ("num_attention_heads", "num_key_value_heads"))
    return float(input_width * (heads + 2 * kv_heads) + heads * layer["hidden_size"])


def _feed_forward(layer: Mapping[str, Any], num_tokens: int, weight_bytes: int) -> float:
    """Return the bytes of a layer's used experts and router, or of its dense feed-forward block."""
    hidden = layer["hidden_size"]
    if "num_experts" not in layer:
        return float(3 * hidden * layer["intermediate_size"] * weight_bytes)
    used = expected_experts(layer["num_experts"], layer["num_experts_per_tok"], num_tokens)
    return 3 * hidden * layer["moe_intermediate_size"] * used * weight_bytes + hidden * layer["num_experts"] * _BF16


def _head_weights(head: Mapping[str, Any], layer: Mapping[str, Any]) -> float:
    """Return the bytes of one pass: the layers, and the rows of lm_head in the draft vocabulary.

    The first layer's input is the concatenation of embedding and hidden state.
    """
    hidden, num_layers, dtype_bytes = layer["hidden_size"], layer["num_hidden_layers"], _head_weight_bytes(head)
    attention = _attention(layer, 2 * hidden) + (num_layers - 1) * _attention(layer, hidden)
    feed_forward = num_layers * 3 * hidden * layer["intermediate_size"]
    vocabulary = head.get("draft_vocab_size") or layer["vocab_size"]
    return (attention + feed_forward) * dtype_bytes + vocabulary * hidden * _BF16


def _head_weight_bytes(head: Mapping[str, Any]) -> int:
    return 1 if head.get("quantization_config") else _BF16


def _kv_elements(layer: Mapping[str, Any]) -> int:
    return int(2 * layer["num_key_value_heads"] * _head_dim(layer))


def _head_dim(layer: Mapping[str, Any]) -> int:
    return int(layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"])
