"""A head's layers begin as the target's last ones, as far as those are like Llama's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.architecture import Architecture
from peagle.drafter.head_spec import HeadSpec
from peagle.drafter.target_weights import TargetWeights

_PROJECTIONS = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
_COPIED = {
    *_PROJECTIONS,
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}
_NO_WEIGHT = "self_attn.rotary_emb.inv_freq"  # which old Llama checkpoints hold
# What a layer may have besides: without it a head's attention differs from the target's, but begins near it.
_LEFT_OUT = {
    **{f"self_attn.{name}_proj.bias": f"bias of {name}_proj" for name in "qkvo"},
    **{f"self_attn.{name}_norm.weight": f"{name}_norm" for name in "qk"},
}


def what_hinders(weights: TargetWeights, architecture: Architecture, num_layers: int) -> str | None:
    """Why the target's last layers cannot be a head's first weights; None where they can."""
    if architecture.hidden_act != "silu":
        return f"its MLPs have {architecture.hidden_act}, a head's silu"
    if architecture.norm_offset:
        return f"its norms add {architecture.norm_offset} to their weights"
    for index in _last_layers(architecture, num_layers):
        names = weights.names_in_layer(index)
        if missing := sorted(_COPIED - names):
            return f"its layer {index} has no {missing[0]}"
        if further := sorted(names - _COPIED - _LEFT_OUT.keys() - {_NO_WEIGHT}):
            return f"its layer {index} has {further[0]}, a head's has not"
        if odd := sorted(
            name for name, shape in _shapes(architecture).items() if _shape(weights, index, name) != shape
        ):
            return f"its layer {index} has {odd[0]} of {_shape(weights, index, odd[0])}, config.json says otherwise"
    return None


def init_for(target: Path, architecture: Architecture, spec: HeadSpec, say: Callable[[str], None]) -> str:
    """The `init` of a head: the one asked for, or "random" where "warm" cannot be; `say` is told what is otherwise."""
    if spec.init != "warm":
        return spec.init
    weights = TargetWeights(target, architecture)
    if hindrance := what_hinders(weights, architecture, spec.num_layers):
        say(f"the head starts at random, not from the target's last layers: {hindrance}")
        return "random"
    names = set().union(*map(weights.names_in_layer, _last_layers(architecture, spec.num_layers)))
    if left_out := [called for name, called in _LEFT_OUT.items() if name in names]:
        say(f"the head starts from the target's last layers without their {', '.join(left_out)}")
    return spec.init


@torch.no_grad()
def warm_start(head: Any, weights: TargetWeights, architecture: Architecture) -> None:
    """Copy the target's last layers and norm; the first layer's projections keep noise for the embeddings' half.

    The first layer reads [embedding, state] side by side: the state's half takes the target's weights.
    """
    hidden = architecture.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden)
    head.norm.weight.copy_(weights.final_norm())
    for own, index in zip(head.layers, _last_layers(architecture, len(head.layers)), strict=True):
        prefix = f"layers.{index}."
        for name, parameter in own.named_parameters():
            if name == "hidden_norm.weight":
                parameter.copy_(weights[f"{prefix}input_layernorm.weight"])
            elif name != "input_layernorm.weight" or not hasattr(own, "hidden_norm"):
                _copy_projection(parameter, weights[prefix + name], architecture.head_dim)


def repeated(projection: torch.Tensor, num_rows: int, head_dim: int) -> torch.Tensor:
    """A projection's heads side by side as often as it takes for so many rows."""
    heads = projection.view(-1, head_dim, projection.shape[1])
    return heads.repeat_interleave(num_rows // projection.shape[0], dim=0).flatten(0, 1)


def _copy_projection(own: torch.Tensor, target: torch.Tensor, head_dim: int) -> None:
    """Copy the target's weight, its KV heads repeated to the head's number; what is left of a wider input is noise."""
    if own.shape[0] != target.shape[0]:
        target = repeated(target, own.shape[0], head_dim)
    if own.shape != target.shape:
        own.normal_(std=0.02)
        own = own[:, -target.shape[1] :]
    own.copy_(target)


def _last_layers(architecture: Architecture, num_layers: int) -> Sequence[int]:
    return range(architecture.num_hidden_layers - num_layers, architecture.num_hidden_layers)


def _shape(weights: TargetWeights, index: int, name: str) -> list[int]:
    return weights.shape(f"layers.{index}.{name}")


def _shapes(architecture: Architecture) -> dict[str, list[int]]:
    """Of the matrices that a head of these sizes has."""
    hidden, wide = architecture.hidden_size, architecture.intermediate_size
    rows = [
        architecture.head_dim * heads for heads in (architecture.num_attention_heads, architecture.num_key_value_heads)
    ]
    return {
        "self_attn.q_proj.weight": [rows[0], hidden],
        "self_attn.k_proj.weight": [rows[1], hidden],
        "self_attn.v_proj.weight": [rows[1], hidden],
        "self_attn.o_proj.weight": [hidden, rows[0]],
        "mlp.gate_proj.weight": [wide, hidden],
        "mlp.up_proj.weight": [wide, hidden],
        "mlp.down_proj.weight": [hidden, wide],
    }
