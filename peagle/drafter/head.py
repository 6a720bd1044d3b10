"""Build a P-EAGLE or EAGLE-3 head for a target.

Its initial weights are the target's last layers, a saved head, or random. The networks are `speculators`' models.
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
_NO_WEIGHT = "self_attn.rotary_emb.inv_freq"  # in old Llama checkpoints
# Optional weights of a target's layer. A head does not have them, so its attention only starts near the target's.
_LEFT_OUT = {
    **{f"self_attn.{name}_proj.bias": f"bias of {name}_proj" for name in "qkvo"},
    **{f"self_attn.{name}_norm.weight": f"{name}_norm" for name in "qk"},
}


def warm_start_obstacle(weights: TargetWeights, architecture: Architecture, num_layers: int) -> str | None:
    """Return why a head cannot start from the target's last layers; None if it can."""
    if architecture.hidden_act != "silu":
        return f"the target's MLPs use {architecture.hidden_act}, a head's silu"
    if architecture.norm_offset:
        return f"the target's norms add {architecture.norm_offset} to their weights"
    for index in _last_layers(architecture, num_layers):
        names = weights.names_in_layer(index)
        if missing := sorted(_COPIED - names):
            return f"the target's layer {index} has no {missing[0]}"
        if unsupported := sorted(names - _COPIED - _LEFT_OUT.keys() - {_NO_WEIGHT}):
            return f"the target's layer {index} has {unsupported[0]}, which a head does not have"
        for name, expected in sorted(_shapes(architecture).items()):
            if (shape := weights.shape(f"layers.{index}.{name}")) != expected:
                return f"the target's layer {index} has {name} of {shape}, but config.json implies {expected}"
    return None


def init_for(target: Path, architecture: Architecture, spec: HeadSpec, say: Callable[[str], None]) -> str:
    """Return the requested `init`, or "random" with a warning if "warm" is not possible."""
    if spec.init != "warm":
        return spec.init
    weights = TargetWeights(target, architecture)
    if obstacle := warm_start_obstacle(weights, architecture, spec.num_layers):
        say(f"the head starts at random instead of from the target's last layers: {obstacle}")
        return "random"
    names = set().union(*map(weights.names_in_layer, _last_layers(architecture, spec.num_layers)))
    if left_out := [label for name, label in _LEFT_OUT.items() if name in names]:
        say(f"the head starts from the target's last layers without their {', '.join(left_out)}")
    return spec.init


@torch.no_grad()
def warm_start(head: Any, weights: TargetWeights, architecture: Architecture) -> None:
    """Copy the target's last layers and norm into a head.

    The first layer's input is [embedding, state]. The target's weights go to the state's half; the embedding's half
    keeps noise.
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
    """Repeat the heads of a projection until it has `num_rows` rows."""
    heads = projection.view(-1, head_dim, projection.shape[1])
    return heads.repeat_interleave(num_rows // projection.shape[0], dim=0).flatten(0, 1)


def _copy_projection(own: torch.Tensor, target: torch.Tensor, head_dim: int) -> None:
    """Copy the target's weight, with KV heads repeated to the head's number; additional inputs get noise."""
    if own.shape[0] != target.shape[0]:
        target = repeated(target, own.shape[0], head_dim)
    if own.shape != target.shape:
        own.normal_(std=0.02)
        own = own[:, -target.shape[1] :]
    own.copy_(target)


def _last_layers(architecture: Architecture, num_layers: int) -> Sequence[int]:
    return range(architecture.num_hidden_layers - num_layers, architecture.num_hidden_layers)


def _shapes(architecture: Architecture) -> dict[str, list[int]]:
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
    """Return a new float32 PEagleDraftModel or Eagle3DraftModel.

    Args:
        target: folder of the target.
    """
    silence_library()
    architecture = require_buildable(target, spec)
    weights = TargetWeights(target, architecture)
    obstacle = None if spec.init == "random" else warm_start_obstacle(weights, architecture, spec.num_layers)
    if spec.init == "warm" and obstacle:
        raise ConfigError(f"{target}: a head cannot start from its last layers: {obstacle}", hint="use --init random")
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
        # Real states have norms of hundreds, and a learning rate of 1e-3 moves the mask state by 1 in 1,000 steps. From
        # zero, the attention output dominates a mask row; from a mean of real states it would be negligible.
        torch.nn.init.zeros_(head.mask_hidden)
    head.config.embed_requires_grad = spec.train_embeddings
    head.embed_tokens.requires_grad_(spec.train_embeddings)
    if spec.init == "warm":
        warm_start(head, weights, architecture)
    elif spec.init != "random":
        folder = whole_head(Path(spec.init))
        saved = _read_weights(folder)
        if _num_layers(saved) < spec.num_layers and not obstacle:
            warm_start(head, weights, architecture)
        _load_saved(head, folder, saved)
    head.lm_head.requires_grad_(spec.train_lm_head)
    if spec.num_frozen_layers:
        _freeze(head, spec.num_frozen_layers)
    return head


def _freeze(head: Any, num_layers: int) -> None:
    """Freeze the first layers and their inputs, so that their outputs stay the same."""
    for name, parameter in head.named_parameters():
        if name.startswith(("fc.", "mask_hidden", *(f"layers.{index}." for index in range(num_layers)))):
            parameter.requires_grad_(requires_grad=False)


@torch.no_grad()
def _load_saved(head: Any, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights of the head saved in `folder`.

    The mask state of an EAGLE-3 head is initialised as usual. Additional layers start as the identity, so that the
    drafts stay the same.
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
                f"{folder}: its {name} has shape {shapes[0]}, but the head to train needs {shapes[1]}",
                hint="use the algorithm, layers and vocabulary of that head, or another --init",
            )
        own[name].copy_(weights[name])


def _with_kv_heads(tensor: torch.Tensor, name: str, own: Mapping[str, torch.Tensor], head: Any) -> torch.Tensor:
    """Repeat the KV heads of a saved weight to the head's number, if that is a multiple."""
    if not name.endswith(_KV_PROJECTIONS) or name not in own or own[name].shape[0] % tensor.shape[0]:
        return tensor
    return repeated(tensor, own[name].shape[0], head.config.transformer_layer_config.head_dim)


def _num_layers(weights: Mapping[str, torch.Tensor]) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("layers.")})


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
