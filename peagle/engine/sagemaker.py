"""The variables of a container on SageMaker, as keys of peagle's.

The rules are those of AWS's own vLLM container (scripts/docker/vllm/sagemaker_args.py of aws/deep-learning-containers,
2026):

    SM_VLLM_X_Y=value   --x-y value
    true, or empty      --x-y
    false               left out
    a JSON array        --x-y with a token for each element; an empty one is left out
    a JSON object       --x-y with the object; several objects in a row are as an array of them

An argument that peagle manages becomes its key; any other is one of vLLM's engine (`engine_args`). The drafter is JSON
in SM_VLLM_SPECULATIVE_CONFIG, read and written here, so that one setting moves between JumpStart and peagle unchanged.

It reads no file but whether the folder of a model is there, and knows no HTTP.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.engine.arguments import DRAFT_CACHE, speculative_config
from peagle.engine.spec import DrafterSpec
from peagle.errors import ConfigError, did_you_mean

PREFIX = "SM_VLLM_"
VARIABLE = "SM_VLLM_SPECULATIVE_CONFIG"
MODEL_FOLDER = Path("/opt/ml/model")
"""Where SageMaker puts a model's own data, before it starts the container."""
# It changes no draft. Ours always have it; a container of AWS's may hold a vLLM that does not know it.
_LOCAL_ARGMAX = "use_local_argmax_reduction"
_KEYS = (
    "method",
    "model",
    "revision",
    "num_speculative_tokens",
    "parallel_drafting",
    _LOCAL_ARGMAX,
    "kv_cache_dtype",
    "attention_backend",
)
_CACHE_PRECISIONS = {dtype: name for name, dtype in DRAFT_CACHE.items()}
# Arguments that are a key of the same name, with the same values.
_SAME = (
    "host",
    "port",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "gpu_memory_utilization",
    "tool_call_parser",
    "reasoning_parser",
    "limit_mm_per_prompt",
    "allowed_media_domains",
)
_PRECISIONS = {"auto": "auto", "bfloat16": "bf16", "half": "float16", "float16": "float16", "float32": "float32"}
_KV_CACHE_PRECISIONS = {"auto": "auto", "bfloat16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8"}
_BYTES_PER_GIB = 2**30


def serve_keys(env: Mapping[str, str], *, model_folder: Path = MODEL_FOLDER) -> dict[str, Any]:
    """The keys of `peagle serve` that a container's variables stand for.

    The model is SM_VLLM_MODEL, else `model_folder` where anything is in it, else HF_MODEL_ID.

    Raises:
        ConfigError: a variable has a value that peagle does not carry; it names the variable.
    """
    given = vllm_arguments(env)
    drafter = from_sagemaker_env(env)
    given.pop("speculative_config", None)
    keys = _drafter_keys(drafter) if drafter else {}
    if model := given.pop("model", None) or _model_without_variable(env, model_folder):
        keys["model"] = model
    for name in _SAME:
        if name in given:
            keys[name] = _valued(name, given.pop(name))
    if "served_model_name" in given:
        keys["name"] = _only_name(given.pop("served_model_name"))
    if given.pop("enforce_eager", False):
        keys["enforce_eager"] = True
    given.pop("enable_auto_tool_choice", None)  # the parser implies it here
    keys |= _precisions(given)
    if "kv_cache_memory_bytes" in given:
        keys["kv_cache_gib"] = _number("kv_cache_memory_bytes", given.pop("kv_cache_memory_bytes")) / _BYTES_PER_GIB
    if given:
        keys["engine_args"] = dict(_engine_argument(name, value) for name, value in given.items())
    return keys


def vllm_arguments(env: Mapping[str, str]) -> dict[str, Any]:
    """vLLM's arguments that the variables stand for, by the rules above.

    A bare flag is True, an array a list, any other value its text.

    >>> vllm_arguments({"SM_VLLM_ENFORCE_EAGER": "true", "SM_VLLM_SEED": "1", "SM_VLLM_ENABLE_LORA": "false"})
    {'enforce_eager': True, 'seed': '1'}
    """
    found = {}
    for variable in sorted(env):
        if variable.startswith(PREFIX):
            value = _value(env[variable])
            if value is not None:
                found[variable.removeprefix(PREFIX).lower()] = value
    return found


def from_sagemaker_env(env: Mapping[str, str]) -> DrafterSpec | None:
    """The drafter named in `env`, None where the variable is unset or empty.

    Raises:
        ConfigError: not a JSON object, a key or method that peagle does not carry, or a key missing.
    """
    text = env.get(VARIABLE, "").strip()
    if not text:
        return None
    config = _parse(text)
    if config.get("method", "eagle3") != "eagle3":
        raise ConfigError(
            f"{VARIABLE}: method {config['method']!r} is not one that peagle carries",
            hint='P-EAGLE is "method": "eagle3" with "parallel_drafting": true; EAGLE-3 the same without it',
        )
    is_parallel = config.get("parallel_drafting", False)
    if not isinstance(is_parallel, bool):
        raise ConfigError(f"{VARIABLE}: parallel_drafting must be true or false, not {is_parallel!r}")
    k = config["num_speculative_tokens"]
    if not isinstance(k, int) or isinstance(k, bool):
        raise ConfigError(f"{VARIABLE}: num_speculative_tokens must be a whole number, not {k!r}")
    if not isinstance(config["model"], str):
        raise ConfigError(f"{VARIABLE}: model must be text, not {config['model']!r}")
    if not isinstance(revision := config.get("revision"), str | None):
        raise ConfigError(f"{VARIABLE}: revision must be text, not {revision!r}")
    if (cache := config.get("kv_cache_dtype")) not in _CACHE_PRECISIONS:
        raise ConfigError(f"{VARIABLE}: kv_cache_dtype {cache!r} is not one that peagle carries")
    if not isinstance(backend := config.get("attention_backend"), str | None):
        raise ConfigError(f"{VARIABLE}: attention_backend must be text, not {backend!r}")
    return DrafterSpec(
        method="peagle" if is_parallel else "eagle3",
        model=config["model"],
        num_speculative_tokens=k,
        revision=revision,
        kv_cache_precision=_CACHE_PRECISIONS[cache],
        attention_backend=backend,
    )


def to_sagemaker_env(drafter: DrafterSpec | None) -> dict[str, str]:
    """The variable that makes a JumpStart endpoint draft the same way.

    Empty without a drafter.
    """
    config = speculative_config(drafter)
    if config is None:
        return {}
    return {VARIABLE: json.dumps({key: config[key] for key in _KEYS if key in config and key != _LOCAL_ARGMAX})}


def _parse(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{VARIABLE} must be a JSON object, not {type(config).__name__}")
    for key in config:
        if key not in _KEYS:
            raise ConfigError(f"{VARIABLE}: unknown key {key!r}", hint=did_you_mean(key, _KEYS))
    if missing := [key for key in ("model", "num_speculative_tokens") if key not in config]:
        raise ConfigError(f"{VARIABLE} lacks {', '.join(missing)}")
    return config


def _drafter_keys(drafter: DrafterSpec) -> dict[str, Any]:
    """The keys of a drafter.

    Whether it drafts in parallel is no key: its own configuration says so.
    """
    if drafter.revision is not None:
        raise ConfigError(
            f"{VARIABLE}: peagle serves a head at the commit where its main branch is, not at a revision",
            hint="leave revision out, or give the head's folder as its model",
        )
    return {
        "drafter": drafter.model,
        "num_speculative_tokens": drafter.num_speculative_tokens,
        "draft_kv_cache_precision": drafter.kv_cache_precision,
        "draft_attention_backend": drafter.attention_backend,
    }


def _model_without_variable(env: Mapping[str, str], folder: Path) -> str | None:
    if folder.is_dir() and any(folder.iterdir()):
        return str(folder)
    return env.get("HF_MODEL_ID") or None


def _value(text: str) -> Any:
    """The value of a variable; None where the argument is left out."""
    plain = text.strip()
    if plain.lower() in ("true", ""):
        return True
    if plain.lower() == "false":
        return None
    if plain.startswith("["):
        try:
            return json.loads(plain) or None
        except ValueError:
            return text
    objects = _objects(plain)
    return text if len(objects) < 2 else objects


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a text that holds nothing else; none of any other text."""
    decoder, found = json.JSONDecoder(), []
    while text.startswith("{"):
        try:
            value, end = decoder.raw_decode(text)
        except ValueError:
            return []
        found.append(value)
        text = text[end:].lstrip()
    return [] if text else found


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _valued(name: str, value: Any) -> Any:
    """The value of an argument that is more than a bare flag."""
    if value is True:
        raise ConfigError(f"{_variable(name)} needs a value")
    return value


def _only_name(value: Any) -> str:
    names = value if isinstance(value, list) else [_valued("served_model_name", value)]
    if len(names) > 1:
        raise ConfigError(
            f"{_variable('served_model_name')}: a model of peagle's endpoint has one name, and these are {len(names)}",
            hint="give one; a request may also leave `model` out where the endpoint has one model",
        )
    return str(names[0])


def _precisions(given: dict[str, Any]) -> dict[str, str]:
    """The keys of an engine's number formats, taken out of `given`.

    Raises:
        ConfigError: peagle has no such format, or they contradict each other.
    """
    found = {}
    if "dtype" in given:
        found["precision"] = _translated("dtype", given.pop("dtype"), _PRECISIONS)
    if "quantization" in given:
        quantization = _translated("quantization", given.pop("quantization"), {"fp8": "fp8"})
        if found.get("precision", "auto") not in ("auto", "bf16"):
            raise ConfigError(f"{_variable('quantization')}=fp8 computes in bfloat16, and {_variable('dtype')} differs")
        found["precision"] = quantization
    if "kv_cache_dtype" in given:
        found["kv_cache_precision"] = _translated("kv_cache_dtype", given.pop("kv_cache_dtype"), _KV_CACHE_PRECISIONS)
    return found


def _translated(name: str, value: Any, words: Mapping[str, str]) -> str:
    if value not in words:
        raise ConfigError(
            f"{_variable(name)}: {value} is not one of {', '.join(words)}",
            hint="a checkpoint that is published in another format is served in it without this variable",
        )
    return words[value]


def _number(name: str, value: Any) -> float:
    try:
        return float(_valued(name, value))
    except (TypeError, ValueError):
        raise ConfigError(f"{_variable(name)} must be a number, not {value}") from None


def _engine_argument(name: str, value: Any) -> tuple[str, Any]:
    """An argument of vLLM's engine, with its name and value in Python."""
    if value is True and name.startswith("no_"):
        return name.removeprefix("no_"), False
    if isinstance(value, str):
        try:
            return name, json.loads(value)
        except ValueError:
            return name, value
    return name, value
