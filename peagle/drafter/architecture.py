"""A target's architecture, as far as a head needs it, from config.json alone.

A head's layers are Llama's whatever the target's are, since those are what vLLM builds of a head: sizes, rotary
embedding and vocabulary are the target's; its biases, norms of queries and keys, sliding windows, experts and
activation are not taken over. It reads no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError

SUPPORTED = "heads are made for decoders with RMSNorms, such as Llama, Mistral, Qwen2, Qwen3, gpt-oss and Gemma"
# Text models of which vLLM 0.29 hands a head the states (`SupportsEagle3` in model_executor/models).
SERVED = (
    "afmoe", "apertus", "arcee", "deepseek_v2", "deepseek_v3", "gemma4_text", "gpt_oss", "llama", "minimax_m2",
    "mistral", "nemotron_h", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip

_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_LOGIT_FACTORS = ("logits_scaling", "logit_scale")
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")  # that Llama's rotary embedding has
_DEFAULT_THETA = 10_000.0
# A gated MLP's usual width, where a target has only experts (as in speculators 0.9).
_MLP_RATIO = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A target's sizes, under the names of its config.json.

    Attributes:
        model_type: of its text model.
        hidden_act: activation of its MLPs.
        rope_parameters: of one rotary embedding that turns whole heads: the target's, or with its base alone where
            the target's differs by layer or turns a part of each head.
        norm_offset: what its final norm adds to its weight: 1 for Gemma 2 and 3 and Qwen3-Next, else 0.
        logit_softcap: its logits are softcap * tanh(logits / softcap); None where they stay as they are.
        ties_embeddings: whether its lm_head is its embeddings.
        dtype: of its weights, as named there.
    """

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
    rope_parameters: Mapping[str, Any]
    norm_offset: int
    logit_softcap: float | None
    ties_embeddings: bool
    dtype: Any

    def layer_config(self, *, num_layers: int, num_key_value_heads: int | None) -> Any:
        """`LlamaConfig` of a head's layers.

        It has as many KV heads as the target where no number is given.
        """
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
    """Read the architecture of the target in a folder.

    The text model's where the target takes images.

    Raises:
        ConfigError: transformers cannot read it, or there can be no head for it; says why.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise ConfigError(f"{folder}: transformers cannot read its config.json: {_first_line(reason)}") from error
    text = config.get_text_config(decoder=True)
    shape = text.per_layer_config[0] if getattr(text, "is_heterogeneous", False) else text
    _require_decoder(folder, config, shape)
    num_heads = shape.num_attention_heads
    intermediate_size = getattr(shape, "intermediate_size", None)
    return Architecture(
        **{name: getattr(shape, name) for name in _SIZES},
        model_type=text.model_type,
        num_key_value_heads=getattr(shape, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // num_heads,
        intermediate_size=intermediate_size if isinstance(intermediate_size, int) else _MLP_RATIO * shape.hidden_size,
        hidden_act=getattr(shape, "hidden_act", None) or getattr(shape, "hidden_activation", None) or "unknown",
        initializer_range=getattr(shape, "initializer_range", 0.02),
        rope_parameters=_one_rope(getattr(text, "rope_parameters", None) or {}),
        norm_offset=_norm_offset(folder, config),
        logit_softcap=getattr(text, "final_logit_softcapping", None),
        ties_embeddings=bool(
            getattr(config, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False)
        ),
        dtype=text.dtype,
    )


def auto_class_of(config: Any) -> Any:
    """The class of transformers that loads such a target; None without one.

    With images or without.
    """
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return None


def _require_decoder(folder: Path, config: Any, shape: Any) -> None:
    """Require sizes that a head can be made of and measured against."""
    model_type = config.model_type
    if config.is_encoder_decoder:
        raise ConfigError(f"{folder}: {model_type!r} has an encoder", hint=SUPPORTED)
    if missing := [name for name in _SIZES if getattr(shape, name, None) is None]:
        raise ConfigError(f"{folder}/config.json: {model_type!r} names no {', '.join(missing)}", hint=SUPPORTED)
    if scaled := [name for name in _LOGIT_FACTORS if getattr(shape, name, None) not in (None, 1)]:
        raise ConfigError(
            f"{folder}/config.json: {model_type!r} scales its logits ({scaled[0]}), which a head is not trained for",
            hint=SUPPORTED,
        )
    num_heads = shape.num_attention_heads
    if shape.hidden_size % num_heads or num_heads % (getattr(shape, "num_key_value_heads", None) or num_heads):
        raise ConfigError(
            f"{folder}/config.json: a hidden size of {shape.hidden_size}, {num_heads} heads and "
            f"{shape.num_key_value_heads} KV heads make no layer of Llama's: each has to divide the one before",
            hint=SUPPORTED,
        )


def _one_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """One rotary embedding for a head's layers, which attend to everything."""
    if "rope_theta" not in parameters:
        by_type = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
        parameters = by_type.get("full_attention") or next(iter(by_type.values()), parameters)
    theta = parameters.get("rope_theta", _DEFAULT_THETA)
    is_partial = parameters.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in parameters
    if is_partial or parameters.get("rope_type", "default") not in _ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "default", "rope_theta": theta, **parameters}


def _norm_offset(folder: Path, config: Any) -> int:
    """The final norm's output for ones when its weight is zero.

    Asked of the model itself, without its weights.

    Raises:
        ConfigError: no such model, or its states cannot be read or do not end in an RMSNorm.
    """
    import torch

    auto_class = auto_class_of(config)
    if auto_class is None:
        raise ConfigError(f"{folder}: transformers has no language model {config.model_type!r}", hint=SUPPORTED)
    with torch.device("meta"):
        model = auto_class.from_config(config)
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None)
    if norm is None or not hasattr(decoder, "layers"):
        raise ConfigError(
            f"{folder}: {type(decoder).__name__} has no 'layers' with a 'norm' behind them to read states from",
            hint=SUPPORTED,
        )
    if [name for name, _ in norm.named_parameters()] != ["weight"]:
        raise ConfigError(f"{folder}: its final norm, {type(norm).__name__}, is no RMSNorm", hint=SUPPORTED)
    norm = norm.to_empty(device="cpu").float()
    with torch.no_grad():
        norm.weight.zero_()
        return round(float(norm(torch.ones(1, len(norm.weight))).mean()))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]
