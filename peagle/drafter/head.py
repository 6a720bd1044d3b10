"""Build a head for a target, and save it in the format that vLLM loads.

The networks are `speculators`' models. Weights that the head shares with the target (norm, lm_head, and embeddings
unless they are trained) are not saved. With a draft vocabulary, the rows of lm_head are saved, because vLLM cannot take
them from the target.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.catalog.folders import read_config
from peagle.catalog.head_files import read_head
from peagle.catalog.shipped_heads import complete_head
from peagle.drafter.attention import DOCUMENT_ATTENTION
from peagle.drafter.target import Architecture, TargetWeights, read_architecture, set_verifier_output
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.engine.spec import BLOCK_METHODS
from peagle.errors import ConfigError
from peagle.files import write_atomic

INITS = ("warm", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """The architecture of a head, its initial weights, and which of them are trained."""

    aux_layers: tuple[int, ...]  # the head reads the states that enter these layers of the target
    algorithm: str = "peagle"
    num_layers: int = 1
    # KV heads of the drafter's attention; None means the target's number. A mask token gets its context only through
    # attention, so more KV heads may help; they start as copies of the target's.
    num_key_value_heads: int | None = None
    num_depths: int = 8  # K during training
    mask_token_id: int = 0
    # "warm", "random" or a folder. With "warm", layers start as the target's last layers, which must be like Llama's,
    # and `fc`, which combines the states of the aux layers, returns the last one. A folder is a saved head to continue,
    # with the same shape, or with fewer layers (new layers start as the identity) or KV heads (which are repeated). A
    # P-EAGLE head may also continue an EAGLE-3 head.
    init: str = "warm"
    # The first layers of the saved head that are not trained. Their inputs (`fc`, mask state, embeddings) are not
    # trained either.
    num_frozen_layers: int = 0
    train_lm_head: bool = False
    # Train embeddings instead of sharing the target's. They are then saved with the head, and are most of its bytes.
    train_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.init not in INITS and not Path(self.init).is_dir():
            raise ConfigError(f"init must be one of {', '.join(INITS)} or the folder of a head, got {self.init!r}")
        if not 0 <= self.num_frozen_layers < self.num_layers:
            raise ConfigError(
                f"num_frozen_layers must be from 0 to {self.num_layers - 1}, got {self.num_frozen_layers}",
                hint="at least the last layer must be trained",
            )
        if self.num_frozen_layers and self.init in INITS:
            raise ConfigError(
                f"num_frozen_layers requires a saved head to continue, but init is {self.init!r}",
                hint="set init to the folder of a head",
            )
        if self.num_frozen_layers and self.train_embeddings:
            raise ConfigError(
                "train_embeddings cannot be combined with num_frozen_layers: embeddings are an input of frozen layers",
                hint="set only one of these options",
            )


def require_buildable(target: Path, spec: HeadSpec) -> Architecture:
    """Check from the configurations that a head can be built for a target; return the target's architecture."""
    architecture = read_architecture(target)
    if spec.init != "random" and spec.num_layers > architecture.num_hidden_layers:
        raise ConfigError(
            f"{spec.num_layers} layers cannot start as the last layers of a target that has "
            f"{architecture.num_hidden_layers}",
            hint="decrease --num-layers, or use --init random",
        )
    num_kv_heads, target_kv_heads = spec.num_key_value_heads, architecture.num_key_value_heads
    if num_kv_heads is not None and architecture.num_attention_heads % num_kv_heads:
        raise ConfigError(f"{num_kv_heads} KV heads do not divide {architecture.num_attention_heads} attention heads")
    if num_kv_heads is not None and num_kv_heads % target_kv_heads and spec.init != "random":
        raise ConfigError(
            f"{num_kv_heads} KV heads cannot start as copies of the target's {target_kv_heads}",
            hint="use a multiple of the target's KV heads, or --init random",
        )
    if spec.init not in INITS:
        _require_compatible(Path(spec.init), spec)
    return architecture


def _require_compatible(folder: Path, spec: HeadSpec) -> None:
    """Check that a saved head can initialise the head to train. It may have fewer layers, and be an EAGLE-3 head."""
    saved = read_head(read_config(folder, ConfigError))
    if saved.method != spec.algorithm and (saved.method, spec.algorithm) != ("eagle3", "peagle"):
        raise ConfigError(
            f"{folder}: has method {saved.method}, but the head to train has {spec.algorithm}",
            hint=f"use --algorithm {saved.method}, or another --init",
        )
    if saved.aux_layer_ids and saved.aux_layer_ids != spec.aux_layers:
        raise ConfigError(
            f"{folder}: reads layers {list(saved.aux_layer_ids)}, but the head to train reads {list(spec.aux_layers)}",
            hint="use the --aux-layers of that head, or another --init",
        )
    if saved.method == spec.algorithm != "eagle3" and saved.mask_token_id != spec.mask_token_id:
        raise ConfigError(
            f"{folder}: has mask token {saved.mask_token_id}, but the head to train has {spec.mask_token_id}",
            hint="use the --mask-token-id of that head, or another --init",
        )
    if saved.num_layers > spec.num_layers:
        raise ConfigError(
            f"{folder}: has {saved.num_layers} layers, but the head to train has {spec.num_layers}",
            hint=f"increase --num-layers to at least {saved.num_layers}",
        )
    if saved.num_layers < spec.num_frozen_layers:
        raise ConfigError(
            f"{folder}: has {saved.num_layers} layers, fewer than num_frozen_layers={spec.num_frozen_layers}",
            hint=f"decrease --num-frozen-layers to {saved.num_layers} or less",
        )


_PROJECTIONS = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
_COPIED = {  # weights of a target's layer that a head also has
    *_PROJECTIONS,
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}
_IGNORED = {"self_attn.rotary_emb.inv_freq"}  # in old Llama checkpoints
_NORMS = {f"self_attn.{name}_norm.weight": f"{name}_norm" for name in "qk"}  # of DFlash and DSpark heads
# Optional weights of a target's layer that a head does not have. Without them, the head's attention differs slightly.
_LEFT_OUT = {**{f"self_attn.{name}_proj.bias": f"bias of {name}_proj" for name in "qkvo"}, **_NORMS}


def warm_start_obstacle(weights: TargetWeights, architecture: Architecture, num_layers: int) -> str | None:
    """Return why a head cannot start from the target's last layers; None if it can."""
    if architecture.hidden_act != "silu":
        return f"the target's MLPs use {architecture.hidden_act}, but a head's use silu"
    if architecture.norm_offset:
        return f"the target's norms add {architecture.norm_offset} to their weights"
    for index in _last_layers(architecture, num_layers):
        names = weights.names_in_layer(index)
        if missing := sorted(_COPIED - names):
            return f"the target's layer {index} has no {missing[0]}"
        if unsupported := sorted(names - _COPIED - _LEFT_OUT.keys() - _IGNORED):
            return f"the target's layer {index} has {unsupported[0]}, which a head does not have"
        for name, expected in sorted(_projection_shapes(architecture).items()):
            if (shape := weights.shape(f"layers.{index}.{name}")) != expected:
                return f"the target's layer {index} has {name} of {shape}, but config.json implies {expected}"
    return None


def possible_init(target: Path, architecture: Architecture, spec: HeadSpec, say: Callable[[str], None]) -> str:
    """Return the requested `init`, or "random" with a warning if "warm" is not possible."""
    if spec.init != "warm":
        return spec.init
    weights = TargetWeights(target, architecture)
    if obstacle := warm_start_obstacle(weights, architecture, spec.num_layers):
        say(f"the head starts with random weights, not with the target's last layers: {obstacle}")
        return "random"
    names = set().union(*map(weights.names_in_layer, _last_layers(architecture, spec.num_layers)))
    if spec.algorithm in BLOCK_METHODS:
        names -= _NORMS.keys()
    if left_out := [label for name, label in _LEFT_OUT.items() if name in names]:
        say(f"the head starts with the target's last layers, without their {', '.join(left_out)}")
    return spec.init


@torch.no_grad()
def warm_start(head: Any, weights: TargetWeights, architecture: Architecture) -> None:
    """Copy the target's last layers and norm into a head.

    The first layer's input is [embedding, state]. The target's weights are copied to the half for the state; the half
    for the embedding is random. The layers of a block head read states only through attention.
    """
    hidden = architecture.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden)
    head.norm.weight.copy_(weights.final_norm())
    for layer, index in zip(head.layers, _last_layers(architecture, len(head.layers)), strict=True):
        prefix, names = f"layers.{index}.", weights.names_in_layer(index)
        for name, parameter in layer.named_parameters():
            if name == "hidden_norm.weight":
                parameter.copy_(weights[f"{prefix}input_layernorm.weight"])
            elif name in _NORMS.keys() - names:
                continue
            elif name != "input_layernorm.weight" or not hasattr(layer, "hidden_norm"):
                _copy_weight(parameter, weights[prefix + name], architecture.head_dim)
    if head.config.speculators_model_type in BLOCK_METHODS:
        _adapt_to_context(head, weights, architecture)


@torch.no_grad()
def _adapt_to_context(head: Any, weights: TargetWeights, architecture: Architecture) -> None:
    """Adapt the target's layers to a block head, which normalises the context once for all layers.

    All layers get the input norm of the target's last layer, and their projections compensate for the change. If the
    target does not normalise queries and keys, the head's norms are set so that the mean sizes of queries and of keys
    stay the same.
    """
    last = architecture.num_hidden_layers - 1
    norm = weights[f"layers.{last}.input_layernorm.weight"].float()
    head.hidden_norm.weight.copy_(norm)
    for layer, index in zip(head.layers, _last_layers(architecture, len(head.layers)), strict=True):
        ratio = torch.where(norm == 0, 1.0, layer.input_layernorm.weight / norm)
        layer.input_layernorm.weight.copy_(norm)
        attention, names = layer.self_attn, weights.names_in_layer(index)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.mul_(ratio)
        for name in _NORMS.keys() - names:
            projection = getattr(attention, name.removeprefix("self_attn.").replace("norm.weight", "proj"))
            layer.get_parameter(name).fill_((projection.weight * norm).square().sum(1).mean().sqrt())


def repeat_heads(projection: torch.Tensor, num_rows: int, head_dim: int) -> torch.Tensor:
    """Repeat the heads of a projection until it has `num_rows` rows."""
    heads = projection.view(-1, head_dim, projection.shape[1])
    return heads.repeat_interleave(num_rows // projection.shape[0], dim=0).flatten(0, 1)


def _copy_weight(parameter: torch.Tensor, target_weight: torch.Tensor, head_dim: int) -> None:
    if parameter.shape[0] != target_weight.shape[0]:
        target_weight = repeat_heads(target_weight, parameter.shape[0], head_dim)
    if parameter.shape != target_weight.shape:  # the head's first layer also reads the embedding
        parameter.normal_(std=0.02)
        parameter = parameter[:, -target_weight.shape[1] :]
    parameter.copy_(target_weight)


def _last_layers(architecture: Architecture, num_layers: int) -> Sequence[int]:
    return range(architecture.num_hidden_layers - num_layers, architecture.num_hidden_layers)


def _projection_shapes(architecture: Architecture) -> dict[str, list[int]]:
    hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
    query_rows = architecture.head_dim * architecture.num_attention_heads
    kv_rows = architecture.head_dim * architecture.num_key_value_heads
    return {
        "self_attn.q_proj.weight": [query_rows, hidden],
        "self_attn.k_proj.weight": [kv_rows, hidden],
        "self_attn.v_proj.weight": [kv_rows, hidden],
        "self_attn.o_proj.weight": [hidden, query_rows],
        "mlp.gate_proj.weight": [intermediate, hidden],
        "mlp.up_proj.weight": [intermediate, hidden],
        "mlp.down_proj.weight": [hidden, intermediate],
    }


def build_head(target: Path, spec: HeadSpec, vocabulary: DraftVocabulary, *, seed: int = 0) -> Any:
    from safetensors.torch import load_file

    silence_speculators()
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
            block_size=spec.num_depths + (spec.algorithm == "dflash"),  # a DFlash block starts with the known token
            sliding_window_non_causal=True,  # otherwise vLLM's attention within a block is causal in all layers
            norm_before_residual=False,
            verifier_name_or_path=str(target),
            draft_attn_impl=DOCUMENT_ATTENTION,
        )
        .float()
    )
    set_verifier_output(head, weights, architecture)
    if spec.algorithm == "peagle":
        # The target's states have norms of hundreds, but a learning rate of 1e-3 changes the mask state by at most 1
        # over 1,000 steps. If it starts at zero, the attention output dominates a mask row; if it started as a mean of
        # the target's states, the attention output would be negligible.
        torch.nn.init.zeros_(head.mask_hidden)
    head.config.embed_requires_grad = spec.train_embeddings
    head.embed_tokens.requires_grad_(spec.train_embeddings)
    if spec.init == "warm":
        warm_start(head, weights, architecture)
    elif spec.init != "random":
        folder = complete_head(Path(spec.init))
        files = sorted(folder.glob("*.safetensors"))
        saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
        if _num_layers(saved) < spec.num_layers and not obstacle:
            warm_start(head, weights, architecture)
        _load_saved(head, folder, saved)
    head.lm_head.requires_grad_(spec.train_lm_head)
    if spec.num_frozen_layers:
        layers = (f"layers.{index}." for index in range(spec.num_frozen_layers))
        frozen = ("fc.", "hidden_norm.", "mask_hidden", *layers)
        for name, parameter in head.named_parameters():
            if name.startswith(frozen):
                parameter.requires_grad_(requires_grad=False)
    return head


@torch.no_grad()
def _load_saved(head: Any, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights of the head saved in `folder`.

    If the saved head is an EAGLE-3 head, which has no mask state, `head` keeps its initial mask state. Additional
    layers start as the identity, so that the drafts stay the same.
    """
    parameters = {name: parameter for name, parameter in head.named_parameters() if is_saved(head, name)}
    if "mask_hidden" not in weights:
        parameters.pop("mask_hidden", None)
    num_saved = _num_layers(weights)
    for index, layer in enumerate(head.layers[num_saved:], start=num_saved):
        for name, parameter in layer.named_parameters():
            parameters.pop(f"layers.{index}.{name}")
            if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                parameter.zero_()
    weights = {name: _with_kv_heads(tensor, name, parameters, head) for name, tensor in weights.items()}
    for name in sorted(parameters.keys() | {name for name in weights if name not in ("d2t", "t2d")}):
        saved, needed = (tuple(side[name].shape) if name in side else None for side in (weights, parameters))
        if saved != needed:
            saved_text = "is missing" if saved is None else f"has shape {saved}"
            raise ConfigError(
                f"{folder}: {name} {saved_text}, but the head to train needs {needed or 'no such weight'}",
                hint="use the algorithm, layers and vocabulary of that head, or another --init",
            )
        parameters[name].copy_(weights[name])


def _with_kv_heads(tensor: torch.Tensor, name: str, parameters: Mapping[str, torch.Tensor], head: Any) -> torch.Tensor:
    """Repeat the KV heads of a saved weight, if the new head has a multiple of their number."""
    if not name.endswith(("k_proj.weight", "v_proj.weight")) or name not in parameters:
        return tensor
    num_rows = parameters[name].shape[0]
    if num_rows % tensor.shape[0]:
        return tensor
    return repeat_heads(tensor, num_rows, head.config.transformer_layer_config.head_dim)


def _num_layers(weights: Mapping[str, torch.Tensor]) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("layers.")})


def save_head(head: Any, folder: Path, *, verifier: str, num_speculative_tokens: int | None = None) -> None:
    """Write `config.json` and `model.safetensors` (bf16) in the format that vLLM loads.

    `verifier` is the target's public name, which replaces the path that was used in training.
    """
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    config = head.config.to_dict()
    config["dtype"] = "bfloat16"
    config["speculators_config"]["verifier"]["name_or_path"] = verifier
    config["transformer_layer_config"]["_name_or_path"] = verifier
    if num_speculative_tokens is not None:
        for method in config["speculators_config"]["proposal_methods"]:
            method["speculative_tokens"] = num_speculative_tokens
    tensors = {}
    for name, tensor in head.state_dict().items():
        if is_saved(head, name):
            tensor = tensor.detach().cpu().contiguous()
            tensors[name] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    # `save_file` would create a file that only its owner can read.
    write_atomic(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


_MODEL_CLASSES = {
    "peagle": "PEagleDraftModel",
    "eagle3": "Eagle3DraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
}


def model_class_of(algorithm: str) -> Any:
    return getattr(importlib.import_module(f"speculators.models.{algorithm}"), _MODEL_CLASSES[algorithm])


def silence_speculators() -> None:
    """Disable the logs of `speculators`, which name every tensor of the target."""
    from loguru import logger

    logger.disable("speculators")


def is_saved(head: Any, name: str) -> bool:
    """Return whether a weight is the head's own, not its target's."""
    if name == "embed_tokens.weight":
        return bool(head.config.embed_requires_grad)
    shared = name == "lm_head.weight" and not head.use_draft_vocab and not head.lm_head.weight.requires_grad
    return name not in ("verifier_norm.weight", "verifier_lm_head.weight", "t2d") and not shared
