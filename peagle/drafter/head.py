"""A P-EAGLE or EAGLE-3 head: built for a target, warm-started from its layers, saved as vLLM takes it, read back.

The networks are `speculators`' models; this file gives them their first weights and their last form on disk. What
the target has already (embeddings, unless they are trained, its own norm and lm_head) is never saved; with a draft
vocabulary, the few rows of lm_head that it needs are, since vLLM cannot take them from the target.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.catalog.fit import read_head
from peagle.catalog.folders import read_config
from peagle.drafter.attention import DOCUMENT_ATTENTION
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.errors import ConfigError, DrafterError
from peagle.files import write_atomic

_MAPS = ("d2t", "t2d")
_KV_PROJECTIONS = ("k_proj.weight", "v_proj.weight")
_LAYER_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_OWNED_BY_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")
ALGORITHMS = ("peagle", "eagle3")
INITS = ("warm", "random")
FURTHER_LAYERS = ("identity", "unrolled")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """The shape of a head.

    Attributes:
        algorithm: "peagle" drafts all tokens in one pass, "eagle3" one after the other.
        aux_layers: the target's layers whose inputs the head reads.
        num_layers: decoder layers of its own.
        num_key_value_heads: of its attention; None for as many as the target has. A mask row knows its context only
            through them, so a head may want more: the target's are then repeated at the start.
        num_depths: K_train, the number of tokens it learns to draft at once.
        mask_token_id: the token that stands at depths 1 and up.
        init: "warm": layers from the target's last ones, `fc` passes the last aux state on; "random"; or the folder of
            a saved head to go on from: of the same shape, or with fewer layers or KV heads, which are then repeated. A
            P-EAGLE head may go on from an EAGLE-3 one.
        further_layers: those that the head to go on from has not begin as the "identity", or "unrolled": as steps of
            the EAGLE-3 head that it is (unroll.py).
        train_lm_head: whether lm_head is trained, rather than kept equal to the target's rows.
        train_embeddings: whether embeddings are trained, rather than shared with the target. They are then saved with
            the head: vocabulary x hidden size, most of its bytes.
    """

    aux_layers: tuple[int, ...]
    algorithm: str = "peagle"
    num_layers: int = 1
    num_key_value_heads: int | None = None
    num_depths: int = 8
    mask_token_id: int = 0
    init: str = "warm"
    further_layers: str = "identity"
    train_lm_head: bool = False
    train_embeddings: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= 8:
            raise ConfigError(f"num_layers must be from 1 to 8, got {self.num_layers}")
        if self.num_depths < 1:
            raise ConfigError(f"num_depths must be at least 1, got {self.num_depths}")
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}")
        if self.further_layers not in FURTHER_LAYERS:
            raise ConfigError(f"further_layers must be one of {', '.join(FURTHER_LAYERS)}, got {self.further_layers!r}")
        if self.init not in INITS and not Path(self.init).is_dir():
            raise ConfigError(f"init must be one of {', '.join(INITS)} or the folder of a head, got {self.init!r}")


def build_head(target: Path, spec: HeadSpec, vocabulary: DraftVocabulary, *, seed: int = 0) -> Any:
    """A new float32 PEagleDraftModel or Eagle3DraftModel for the target in the folder `target`.

    Raises:
        ConfigError: there can be no such head for it, or the head to go on from is another one.
    """
    _silence_library()
    config = require_buildable(target, spec)
    target_layers = config.num_hidden_layers
    config.num_hidden_layers = spec.num_layers
    config.num_key_value_heads = spec.num_key_value_heads or config.num_key_value_heads
    torch.manual_seed(seed)
    head = (
        _model_class(spec.algorithm)
        .from_training_args(
            config,
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
    if spec.algorithm == "peagle":
        # Real states are hundreds long and a learning rate of 1e-3 moves the mask state by 1 in 1,000 steps: from zero,
        # what attention brings decides a mask row, from a mean of real states it would be lost beside that mean.
        torch.nn.init.zeros_(head.mask_hidden)
    head.config.embed_requires_grad = spec.train_embeddings
    head.embed_tokens.requires_grad_(spec.train_embeddings)
    last_layers = range(target_layers - spec.num_layers, target_layers)
    if spec.init == "warm":
        _warm_start(head, target, last_layers)
    elif spec.init != "random":
        saved = _read_weights(Path(spec.init))
        if _num_layers(saved) < spec.num_layers:
            _warm_start(head, target, last_layers)
        _go_on_from(head, Path(spec.init), saved)
    head.lm_head.requires_grad_(spec.train_lm_head)
    return head


def require_buildable(target: Path, spec: HeadSpec) -> Any:
    """Make sure that there can be such a head for a target, from its configuration alone, which is returned.

    Raises:
        ConfigError: there cannot.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    if config.model_type != "llama":
        raise ConfigError(f"{target}: heads are made for Llama-like targets, not {config.model_type!r}")
    if spec.init != "random" and spec.num_layers > config.num_hidden_layers:
        raise ConfigError(
            f"{spec.num_layers} layers cannot start as the last ones of a target that has {config.num_hidden_layers}",
            hint="give fewer --num-layers, or --init random",
        )
    num_heads, num_kv_heads, own = config.num_attention_heads, config.num_key_value_heads, spec.num_key_value_heads
    if own is not None and num_heads % own:
        raise ConfigError(f"{own} KV heads do not divide {num_heads} heads")
    if own is not None and own % num_kv_heads and spec.init != "random":
        raise ConfigError(
            f"{own} KV heads cannot start as copies of the target's {num_kv_heads}",
            hint="give a multiple of them, or --init random",
        )
    if spec.init not in INITS:
        _require_same_reading(Path(spec.init), spec)
    if spec.further_layers == "unrolled":
        _require_unrollable(config, spec)
    return config


def _require_unrollable(config: Any, spec: HeadSpec) -> None:
    """Whether the head to go on from can be unrolled into the one to train."""
    saved = None if spec.init in INITS else read_head(read_config(Path(spec.init), ConfigError))
    if saved is None or saved.method != "eagle3" or saved.num_layers != 1 or spec.algorithm != "peagle":
        raise ConfigError(
            "only an EAGLE-3 head of one layer can be unrolled, into a P-EAGLE head",
            hint="give its folder as --init, or leave --further-layers unrolled out",
        )
    if spec.num_layers < 3 or spec.num_layers % 2 == 0:
        raise ConfigError(
            f"unrolled steps are two layers each behind the first: {spec.num_layers} layers cannot hold them",
            hint="give --num-layers 3, 5 or 7",
        )
    if spec.num_depths <= spec.num_layers // 2:
        raise ConfigError(
            f"{spec.num_layers} layers draft {spec.num_layers // 2 + 1} tokens, K_train is {spec.num_depths}",
            hint="give more --num-depths",
        )
    wanted = next(
        number
        for number in range(1, config.num_attention_heads + 1)
        if config.num_attention_heads % number == 0
        and number % config.num_key_value_heads == 0
        and number * config.head_dim >= config.hidden_size
    )
    own = spec.num_key_value_heads or config.num_key_value_heads
    if own < wanted:
        raise ConfigError(
            f"{own} KV heads of {config.head_dim} cannot bring a state of {config.hidden_size} from row to row",
            hint=f"give --num-key-value-heads {wanted}",
        )


def _require_same_reading(folder: Path, spec: HeadSpec) -> None:
    """Whether a saved head reads the layers, and knows the mask token, that the one to train does."""
    saved = read_head(read_config(folder, ConfigError))
    if saved.aux_layer_ids and saved.aux_layer_ids != spec.aux_layers:
        raise ConfigError(
            f"{folder}: reads layers {list(saved.aux_layer_ids)}, the head to train {list(spec.aux_layers)}",
            hint="give its --aux-layers, or another init",
        )
    if saved.method == spec.algorithm == "peagle" and saved.mask_token_id != spec.mask_token_id:
        raise ConfigError(
            f"{folder}: its mask token is {saved.mask_token_id}, that of the head to train {spec.mask_token_id}",
            hint="give its --mask-token-id, or another init",
        )


def _model_class(algorithm: str) -> Any:
    if algorithm == "peagle":
        from speculators.models.peagle import PEagleDraftModel

        return PEagleDraftModel
    from speculators.models.eagle3 import Eagle3DraftModel

    return Eagle3DraftModel


@torch.no_grad()
def _warm_start(head: Any, target: Path, layers: Sequence[int]) -> None:
    """Copy the target's last layers and norm; the first layer's projections keep noise for the embeddings' half.

    The first layer reads [embedding, state] side by side: the state's half takes the target's weights.
    """
    weights = _read_weights(target)
    hidden = head.config.transformer_layer_config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden)
    head.norm.weight.copy_(weights["model.norm.weight"])
    for own, index in zip(head.layers, layers, strict=True):
        prefix = f"model.layers.{index}."
        for name, parameter in own.named_parameters():
            if name == "hidden_norm.weight":
                parameter.copy_(weights[f"{prefix}input_layernorm.weight"])
            elif name != "input_layernorm.weight" or not hasattr(own, "hidden_norm"):
                _copy_projection(parameter, weights[prefix + name], head.config.transformer_layer_config.head_dim)


@torch.no_grad()
def _go_on_from(head: Any, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Take the weights of the head saved in `folder`.

    A mask state that it has not learnt, as an EAGLE-3 head, starts where all do. Layers behind its last one keep what
    they have, but add nothing to what passes through them until they are trained: the head drafts what it drafted.

    Raises:
        ConfigError: it has another shape; names the first weight that differs.
    """
    own = {name: parameter for name, parameter in head.named_parameters() if _is_saved(head, name)}
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
    """A saved weight, its KV heads repeated where the head to train has a multiple of them."""
    if not name.endswith(_KV_PROJECTIONS) or name not in own or own[name].shape[0] % tensor.shape[0]:
        return tensor
    heads = tensor.view(-1, head.config.transformer_layer_config.head_dim, tensor.shape[1])
    return heads.repeat_interleave(own[name].shape[0] // tensor.shape[0], dim=0).flatten(0, 1)


def _num_layers(weights: Mapping[str, torch.Tensor]) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("layers.")})


def _copy_projection(own: torch.Tensor, target: torch.Tensor, head_dim: int) -> None:
    """Copy the target's weight, its KV heads repeated to the head's number; what is left of a wider input is noise."""
    if own.shape[0] != target.shape[0]:
        heads = target.view(-1, head_dim, target.shape[1])
        target = heads.repeat_interleave(own.shape[0] // target.shape[0], dim=0).flatten(0, 1)
    if own.shape != target.shape:
        own.normal_(std=0.02)
        own = own[:, -target.shape[1] :]
    own.copy_(target)


def _read_weights(target: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(target.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def save_head(head: Any, folder: Path, *, verifier: str, num_speculative_tokens: int | None = None) -> None:
    """Write `config.json` and `model.safetensors` (bf16) as vLLM loads them.

    Args:
        head: the trained head.
        folder: created when missing.
        verifier: the target's public name, which takes the place of the path it was trained with.
        num_speculative_tokens: the default K of whoever serves the head without naming one.
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
    tensors = {name: _as_saved(tensor) for name, tensor in head.state_dict().items() if _is_saved(head, name)}
    # `save_file` would make a file that only its owner may read.
    write_atomic(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_head(folder: Path, target: Path) -> Any:
    """Read a saved head back, with what it shares taken from the target's folder.

    Raises:
        DrafterError: not a head in this format, or weights are missing.
    """
    from safetensors.torch import load_file

    _silence_library()
    raw = json.loads((folder / "config.json").read_text())
    algorithm = raw.get("speculators_model_type")
    if algorithm not in ALGORITHMS:
        raise DrafterError(f"{folder}: neither a P-EAGLE nor an EAGLE-3 head in speculators' format")
    if raw.get("quantization_config"):
        raise DrafterError(
            f"{folder} is quantised", hint="`peagle quantize-drafter --dequantize` makes a bf16 head of it"
        )
    model_class = _model_class(algorithm)
    config = model_class.config_class.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = str(target)
    config.transformer_layer_config._attn_implementation = DOCUMENT_ATTENTION
    head = model_class(config=config)
    tensors = load_file(folder / "model.safetensors")
    if head.use_draft_vocab:
        target_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["t2d"] = torch.zeros(head.verifier_vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True)
    missing, _ = head.load_state_dict(tensors, strict=False)
    # The library's default for this is true, also in heads that share the target's embeddings.
    head.config.embed_requires_grad = "embed_tokens.weight" in tensors
    lost = [name for name in missing if _is_saved(head, name) and name != "lm_head.weight"]
    if lost:
        raise DrafterError(f"{folder}: weights are missing: {', '.join(lost)}")
    head.load_verifier_weights()
    return head.float()


def _silence_library() -> None:
    """It logs every tensor of the target that it looks up."""
    from loguru import logger

    logger.disable("speculators")


def _is_saved(head: Any, name: str) -> bool:
    if name == "embed_tokens.weight":
        return bool(head.config.embed_requires_grad)
    shared = name == "lm_head.weight" and not head.use_draft_vocab and not head.lm_head.weight.requires_grad
    return name not in _OWNED_BY_TARGET and not shared


def _as_saved(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
