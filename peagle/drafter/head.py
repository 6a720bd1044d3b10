"""Build a P-EAGLE or EAGLE-3 head for a target, with its first weights.

They are the target's last layers, a saved head, or random.

The networks are `speculators`' models. Their form on disk is `head_folder.py`'s.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.catalog.shipped_heads import whole_head
from peagle.drafter.architecture import Architecture
from peagle.drafter.attention import DOCUMENT_ATTENTION
from peagle.drafter.head_folder import is_saved, model_class_of, silence_library
from peagle.drafter.head_spec import HeadSpec, require_buildable
from peagle.drafter.target_weights import TargetWeights, share_output
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.errors import ConfigError

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
    """Why the target's last layers cannot start a head; None where they can."""
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
    """The `init` of a head: the one asked for, or "random" where "warm" cannot be.

    `say` is told of the difference.
    """
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
    """Copy the target's last layers and norm into a head.

    The first layer's projections keep noise for the embeddings' half.

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
    """Copy the target's weight, with KV heads repeated to the head's number.

    The rest of a wider input is noise.
    """
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


_MAPS = ("d2t", "t2d")
_KV_PROJECTIONS = ("k_proj.weight", "v_proj.weight")
_LAYER_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def build_head(target: Path, spec: HeadSpec, vocabulary: DraftVocabulary, *, seed: int = 0) -> Any:
    """A new float32 PEagleDraftModel or Eagle3DraftModel for the target.

    `target` is its folder.

    Raises:
        ConfigError: there can be no such head for it, or the head to go on from is another one.
        DrafterError: rows of lm_head are missing from the head to go on from, and are not an embedded target's.
    """
    silence_library()
    architecture = require_buildable(target, spec)
    weights = TargetWeights(target, architecture)
    hindrance = None if spec.init == "random" else what_hinders(weights, architecture, spec.num_layers)
    if spec.init == "warm" and hindrance:
        raise ConfigError(f"{target}: a head cannot start from its last layers: {hindrance}", hint="give --init random")
    torch.manual_seed(seed)
    head = (
        model_class_of(spec.algorithm)
        .from_training_args(
            architecture.layer_config(num_layers=spec.num_layers, num_key_value_heads=spec.num_key_value_heads),
            t2d=vocabulary.t2d(),
            d2t=vocabulary.d2t(),
            draft_vocab_size=vocabulary.size,
            target_layer_ids=list(spec.aux_layers),
            mask_token_id=spec.mask_token_id,
            num_depths=spec.num_depths,
            ttt_steps=spec.num_depths,
            norm_before_residual=False,
            verifier_name_or_path=str(target),
            draft_attn_impl=DOCUMENT_ATTENTION,
        )
        .float()
    )
    share_output(head, weights, architecture)
    if spec.algorithm == "peagle":
        # Real states are hundreds long and a learning rate of 1e-3 moves the mask state by 1 in 1,000 steps: from zero,
        # what attention brings decides a mask row, from a mean of real states it would be lost beside that mean.
        torch.nn.init.zeros_(head.mask_hidden)
    head.config.embed_requires_grad = spec.train_embeddings
    head.embed_tokens.requires_grad_(spec.train_embeddings)
    if spec.init == "warm":
        warm_start(head, weights, architecture)
    elif spec.init != "random":
        folder = whole_head(Path(spec.init))
        saved = _read_weights(folder)
        if _num_layers(saved) < spec.num_layers and not hindrance:
            warm_start(head, weights, architecture)
        _go_on_from(head, folder, saved)
    head.lm_head.requires_grad_(spec.train_lm_head)
    if spec.num_frozen_layers:
        _freeze(head, spec.num_frozen_layers)
    return head


def _freeze(head: Any, num_layers: int) -> None:
    """Freeze the first layers and their inputs, so that their outputs stay."""
    for name, parameter in head.named_parameters():
        if name.startswith(("fc.", "mask_hidden", *(f"layers.{index}." for index in range(num_layers)))):
            parameter.requires_grad_(requires_grad=False)


@torch.no_grad()
def _go_on_from(head: Any, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Take the weights of the head saved in `folder`.

    A mask state that it has not learnt, as an EAGLE-3 head, starts where all do. Layers behind its last one keep what
    they have, but add nothing to what passes through them until they are trained: the head drafts what it drafted.

    Raises:
        ConfigError: it has another shape; names the first weight that differs.
    """
    own = {name: parameter for name, parameter in head.named_parameters() if is_saved(head, name)}
    if "mask_hidden" not in weights:
        own.pop("mask_hidden", None)
    num_saved = _num_layers(weights)
    for index, layer in enumerate(head.layers[num_saved:], start=num_saved):
        for name, parameter in layer.named_parameters():
            own.pop(f"layers.{index}.{name}")
            if name in _LAYER_OUTPUTS:
                parameter.zero_()
    weights = {name: _with_kv_heads(tensor, name, own, head) for name, tensor in weights.items()}
    for name in sorted(own.keys() | {name for name in weights if name not in _MAPS}):
        shapes = [tuple(side[name].shape) if name in side else None for side in (weights, own)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"{folder}: its {name} is {shapes[0]}, the head to train wants {shapes[1]}",
                hint="give the algorithm, layers and vocabulary of that head, or another init",
            )
        own[name].copy_(weights[name])


def _with_kv_heads(tensor: torch.Tensor, name: str, own: Mapping[str, torch.Tensor], head: Any) -> torch.Tensor:
    """A saved weight with its KV heads repeated to the head's multiple of them."""
    if not name.endswith(_KV_PROJECTIONS) or name not in own or own[name].shape[0] % tensor.shape[0]:
        return tensor
    return repeated(tensor, own[name].shape[0], head.config.transformer_layer_config.head_dim)


def _num_layers(weights: Mapping[str, torch.Tensor]) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("layers.")})


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
