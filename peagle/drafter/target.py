"""The architecture, weights and tokenizer of a training run's target, all checked before the training starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.catalog.folders import read_config
from peagle.catalog.targets import ResolvedModel, fetched_model, resolve_model
from peagle.drafter.data import Sample
from peagle.errors import ConfigError
from peagle.requests.tokenizer import load_tokenizer

SUPPORTED = "heads require a decoder with RMSNorms, such as Llama, Mistral, Qwen2, Qwen3, gpt-oss or Gemma"
# Types of text models whose hidden states vLLM 0.29 passes to a head (`SupportsEagle3` in model_executor/models).
SERVED_TYPES = (
    "afmoe", "apertus", "arcee", "deepseek_v2", "deepseek_v3", "gemma4_text", "gpt_oss", "llama", "minimax_m2",
    "mistral", "nemotron_h", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip

_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")  # supported by Llama's rotary embedding
_MLP_RATIO = 3  # usual MLP width / hidden size, as in speculators 0.9; used for targets that have only experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The target's sizes, named as in its config.json."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    initializer_range: float
    # One rotary embedding over whole attention heads: the target's, or that of its full-attention layers. If that one
    # is partial or of an unsupported type, only its base is used.
    rope_parameters: Mapping[str, Any]
    norm_offset: int  # constant that the final norm adds to its weight: 1 for Gemma 2, Gemma 3 and Qwen3-Next, else 0
    logit_softcap: float | None  # logits are softcap * tanh(logits / softcap); None disables it
    ties_embeddings: bool  # whether lm_head and embeddings share their weights
    dtype: Any

    def layer_config(self, *, num_layers: int, num_key_value_heads: int | None) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=num_key_value_heads or self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            initializer_range=self.initializer_range,
            rope_parameters=dict(self.rope_parameters),
            dtype=self.dtype,
        )


def read_architecture(folder: Path) -> Architecture:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise ConfigError(f"{folder}: transformers cannot read its config.json: {_first_line(reason)}") from error
    text_config = config.get_text_config(decoder=True)
    layer = text_config.per_layer_config[0] if getattr(text_config, "is_heterogeneous", False) else text_config
    _require_decoder(folder, config, layer)
    num_heads = layer.num_attention_heads
    intermediate_size = getattr(layer, "intermediate_size", None)
    return Architecture(
        **{name: getattr(layer, name) for name in _SIZES},
        model_type=text_config.model_type,
        num_key_value_heads=getattr(layer, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(layer, "head_dim", None) or layer.hidden_size // num_heads,
        intermediate_size=intermediate_size if isinstance(intermediate_size, int) else _MLP_RATIO * layer.hidden_size,
        hidden_act=getattr(layer, "hidden_act", None) or getattr(layer, "hidden_activation", None) or "unknown",
        initializer_range=getattr(layer, "initializer_range", 0.02),
        rope_parameters=_single_rope(getattr(text_config, "rope_parameters", None) or {}),
        norm_offset=_norm_offset(folder, config),
        logit_softcap=getattr(text_config, "final_logit_softcapping", None),
        ties_embeddings=bool(
            getattr(config, "tie_word_embeddings", False) or getattr(text_config, "tie_word_embeddings", False)
        ),
        dtype=text_config.dtype,
    )


def auto_class_of(config: Any) -> Any:
    """Return the transformers class that loads a target, text-only or multimodal; None if it is not supported."""
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return None


def _require_decoder(folder: Path, config: Any, layer: Any) -> None:
    model_type = config.model_type
    if config.is_encoder_decoder:
        raise ConfigError(f"{folder}: {model_type!r} has an encoder", hint=SUPPORTED)
    if missing := [name for name in _SIZES if getattr(layer, name, None) is None]:
        raise ConfigError(f"{folder}/config.json: {model_type!r} has no {', '.join(missing)}", hint=SUPPORTED)
    if scaled := [name for name in ("logits_scaling", "logit_scale") if getattr(layer, name, None) not in (None, 1)]:
        raise ConfigError(
            f"{folder}/config.json: {model_type!r} scales its logits ({scaled[0]}), which heads do not support",
            hint=SUPPORTED,
        )
    num_heads = layer.num_attention_heads
    if layer.hidden_size % num_heads or num_heads % (getattr(layer, "num_key_value_heads", None) or num_heads):
        raise ConfigError(
            f"{folder}/config.json: hidden size {layer.hidden_size}, {num_heads} heads and {layer.num_key_value_heads} "
            "KV heads do not fit a Llama layer: each must divide the previous one",
            hint=SUPPORTED,
        )


def _single_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of one rotary embedding that Llama supports."""
    if "rope_theta" not in parameters:
        by_type = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
        parameters = by_type.get("full_attention") or next(iter(by_type.values()), parameters)
    theta = parameters.get("rope_theta", 10_000.0)
    is_partial = parameters.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in parameters
    if is_partial or parameters.get("rope_type", "default") not in _ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "default", "rope_theta": theta, **parameters}


def _norm_offset(folder: Path, config: Any) -> int:
    """Return the constant that the final norm adds to its weight, by building the model without weights."""
    auto_class = auto_class_of(config)
    if auto_class is None:
        raise ConfigError(
            f"{folder}: transformers does not support the language model {config.model_type!r}", hint=SUPPORTED
        )
    with torch.device("meta"):
        model = auto_class.from_config(config)
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None)
    if norm is None or not hasattr(decoder, "layers"):
        raise ConfigError(
            f"{folder}: {type(decoder).__name__} has no 'layers' followed by a 'norm', which heads require",
            hint=SUPPORTED,
        )
    if [name for name, _ in norm.named_parameters()] != ["weight"]:
        raise ConfigError(f"{folder}: its final norm, {type(norm).__name__}, is not an RMSNorm", hint=SUPPORTED)
    norm = norm.to_empty(device="cpu").float()
    with torch.no_grad():
        norm.weight.zero_()
        return round(float(norm(torch.ones(1, len(norm.weight))).mean()))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


_EMBEDDINGS = "embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


class TargetWeights:
    """A target's safetensors weights under Llama's names, such as `norm.weight` and `layers.3.mlp.up_proj.weight`.

    In the files, these names have a prefix that depends on the model: `model.`, or `model.language_model.` if it is
    multimodal. The prefix of the embeddings is used for all names.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        from safetensors import safe_open

        self._folder, self._architecture = folder, architecture
        self._file_of: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                self._file_of |= dict.fromkeys(weights.keys(), file)
        self._prefix = self._full_name(_EMBEDDINGS).removesuffix(_EMBEDDINGS)
        if not architecture.ties_embeddings:
            self._full_name(_LM_HEAD)  # raises if it is missing

    def names_in_layer(self, index: int) -> set[str]:
        """Return the names of a layer's weights, relative to the layer."""
        prefix = f"{self._prefix}layers.{index}."
        return {name.removeprefix(prefix) for name in self._file_of if name.startswith(prefix)}

    def shape(self, name: str) -> list[int]:
        return self._shape(self._prefix + name)

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        file = self._file_of.get(self._prefix + name)
        if file is None:
            raise ConfigError(f"{self._folder}: its safetensors files have no {self._prefix}{name}")
        with safe_open(file, "pt") as weights:
            tensor: torch.Tensor = weights.get_tensor(self._prefix + name)
        return tensor

    def final_norm(self) -> torch.Tensor:
        return self["norm.weight"].float() + self._architecture.norm_offset

    def _full_name(self, ending: str) -> str:
        shape = [self._architecture.vocab_size, self._architecture.hidden_size]
        names = [name for name in self._file_of if name.endswith(ending) and self._shape(name) == shape]
        if not names:
            raise ConfigError(
                f"{self._folder}: its safetensors files have no {ending} of {shape[0]} x {shape[1]}",
                hint="use the folder of a complete target, as saved by transformers",
            )
        return min(names, key=len)

    def _shape(self, name: str) -> list[int]:
        from safetensors import safe_open

        with safe_open(self._file_of[name], "pt") as weights:
            shape: list[int] = weights.get_slice(name).get_shape()
        return shape


@torch.no_grad()
def set_verifier_output(head: Any, weights: TargetWeights, architecture: Architecture) -> None:
    """Set a head's copy of the target's final norm, and the soft cap of the target's logits.

    `speculators` does not do this for targets with soft-capped logits, or whose norm is not named like Llama's.
    """
    head.verifier_norm.weight.copy_(weights.final_norm())
    head.verifier_softcap = architecture.logit_softcap


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    model: ResolvedModel
    tokenizer: Any
    aux_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int

    @property
    def folder(self) -> Path:
        return Path(self.model.path)

    def require_known_tokens(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if (largest := max(sample.token_ids)) >= self.vocab_size:
                raise ConfigError(
                    f"{self.folder}: the tokenizer produces token {largest} for row {sample.id}, but the target only"
                    f" has tokens 0 to {self.vocab_size - 1}",
                    hint="use the target's own tokenizer",
                )


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return layers 2, L/2 and L-1 of a target with L layers (arXiv 2602.01469)."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, num_layers - 1}))


def require_layers(aux_layers: Sequence[int], num_layers: int) -> None:
    if repeated := sorted({layer for layer in aux_layers if list(aux_layers).count(layer) > 1}):
        raise ConfigError(f"aux layers {repeated} are repeated; an engine reads each layer once")
    if invalid_layers := [layer for layer in aux_layers if not 0 <= layer < num_layers]:
        raise ConfigError(f"aux layers {invalid_layers}: the target has layers 0 to {num_layers - 1}")


def end_tokens(*configs: Mapping[str, Any]) -> list[int]:
    values = [config.get("eos_token_id") for config in configs]
    return sorted({token for ids in values if ids is not None for token in (ids if isinstance(ids, list) else [ids])})


def load_target(name: str, aux_layers: Sequence[int] | None, announce: Callable[[str], None]) -> Target:
    model = fetched_model(resolve_model(name, announce=announce), announce)
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(f"{model.path}: training requires a local folder", hint="download the target first")
    architecture = read_architecture(folder)
    layers = tuple(sorted(aux_layers or default_aux_layers(architecture.num_hidden_layers)))
    require_layers(layers, architecture.num_hidden_layers)
    return Target(
        model=model,
        tokenizer=_tokenizer(folder, model.config),
        aux_layers=layers,
        hidden_size=architecture.hidden_size,
        vocab_size=architecture.vocab_size,
    )


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> Any:
    try:
        tokenizer = load_tokenizer(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: has no tokenizer ({_first_line(error)})", hint="add the target's own tokenizer"
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{folder}: the tokenizer has no chat template, which is needed to prompt the target",
            hint="add chat_template to tokenizer_config.json; a template that joins the messages also works",
        )
    # Responses end with the tokenizer's end-of-text token, so it must be the target's. A tokenizer of another model
    # usually has a different one.
    configs = [config, config.get("text_config") or {}]
    if (folder / "generation_config.json").is_file():
        configs.append(read_config(folder, ConfigError, "generation_config.json"))
    target_ends = end_tokens(*configs)
    end = tokenizer.eos_token_id
    if end is None or (target_ends and end not in target_ends):
        raise ConfigError(
            f"{folder}: the tokenizer's end-of-text token is {end}, but the target has {target_ends or 'none'}",
            hint="use the target's own tokenizer, including its eos_token",
        )
    return tokenizer
