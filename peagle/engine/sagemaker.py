"""Translate the variables of a SageMaker container into options of peagle. Errors name the variable.

An argument that peagle manages becomes peagle's option; any other engine argument goes to `engine_args`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.engine.arguments import DRAFT_KV_CACHE_DTYPES, check_extra, speculative_config
from peagle.engine.keys import SPEC_FIELDS
from peagle.engine.spec import DrafterSpec
from peagle.errors import ConfigError, did_you_mean, shown

if TYPE_CHECKING:
    from peagle.engine.vllm_internals import ServeArguments

PREFIX = "SM_VLLM_"
SPECULATIVE_CONFIG_VARIABLE = "SM_VLLM_SPECULATIVE_CONFIG"
MODEL_FOLDER = Path("/opt/ml/model")  # SageMaker puts the model data here before it starts the container
# A key that does not change drafts. peagle always sets it; the vLLM in AWS's container may not support it.
_LOCAL_ARGMAX = "use_local_argmax_reduction"
_SPECULATIVE_KEYS = (
    "method",
    "model",
    "revision",
    "num_speculative_tokens",
    "parallel_drafting",
    _LOCAL_ARGMAX,
    "kv_cache_dtype",
    "attention_backend",
)
_DRAFT_KV_CACHE_PRECISIONS = {dtype: name for name, dtype in DRAFT_KV_CACHE_DTYPES.items()}
# Arguments with an option of the same name and the same values.
_SAME_OPTIONS = (
    "host",
    "port",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
    "tool_call_parser",
    "reasoning_parser",
)
_PRECISIONS = {
    "auto": "auto",
    "bfloat16": "bf16",
    "half": "float16",
    "float16": "float16",
    "float": "float32",
    "float32": "float32",
}
_KV_CACHE_PRECISIONS = {"auto": "auto", "bfloat16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8"}
# Options whose variables have other names. Messages name the first variable that is set, or else the last.
_VARIABLES_OF = {
    "model": ("SM_VLLM_MODEL", "HF_MODEL_ID", str(MODEL_FOLDER)),
    "name": ("SM_VLLM_SERVED_MODEL_NAME",),
    "precision": ("SM_VLLM_QUANTIZATION", "SM_VLLM_DTYPE"),
    "kv_cache_precision": ("SM_VLLM_KV_CACHE_DTYPE",),
    "kv_cache_gib": ("SM_VLLM_KV_CACHE_MEMORY_BYTES",),
    "engine_args": ("SM_VLLM_*",),
}
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
# Arguments that become options with another name or form.
_TRANSLATED = ("max_model_len", "kv_cache_memory_bytes", "limit_mm_per_prompt", "allowed_media_domains")
_HANDLED_SEPARATELY = ("model", "speculative_config", "served_model_name", "dtype", "quantization", "kv_cache_dtype")
_CORS_HINT = "web pages of other sites cannot call the endpoint: add CORS headers with a reverse proxy"
# Hints for the arguments of vLLM's API server, such as what to set instead.
_HINTS = {
    "api_key": "set PEAGLE_API_KEYS=NAME=KEY, or PEAGLE_KEYS to a file of keys",
    "ssl_certfile": "set PEAGLE_TLS_CERT and PEAGLE_TLS_KEY",
    "ssl_keyfile": "set PEAGLE_TLS_CERT and PEAGLE_TLS_KEY",
    **dict.fromkeys(("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"), _CORS_HINT),
    **dict.fromkeys(("enable_log_requests", "enable_log_outputs", "max_log_len"), "set PEAGLE_LOG_PROMPTS=true"),
    **dict.fromkeys(("chat_template", "chat_template_content_format"), "the model's own template is used"),
    **dict.fromkeys(
        ("enable_prompt_tokens_details", "enable_per_request_metrics"), "answers always include this information"
    ),
}


def serve_options(env: Mapping[str, str], *, model_folder: Path = MODEL_FOLDER) -> dict[str, Any]:
    """Return the options of `peagle serve` for a container's variables.

    The model is SM_VLLM_MODEL, else `model_folder` if it is not empty, else HF_MODEL_ID.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    unset = {name for name in _HANDLED_SEPARATELY if not env.get(_variable(name), "").strip()}
    raw = {name: value for name, value in vllm_arguments(env).items() if name not in unset}
    options = drafter_options(env)
    has_model_data = model_folder.is_dir() and any(model_folder.iterdir())
    default_model = str(model_folder) if has_model_data else env.get("HF_MODEL_ID", "").strip()
    if model := _single_value(raw, "model") or default_model:
        options["model"] = model
    names = raw.get("served_model_name")
    if isinstance(names, list) and len(names) > 1:
        raise ConfigError(
            f"{_variable('served_model_name')}: a model of peagle's endpoint has only one name, not {len(names)}",
            hint="set one name; if the endpoint has only one model, requests may also omit `model`",
        )
    if names is not None:
        options["name"] = str(names[0]).strip() if isinstance(names, list) else _single_value(raw, "served_model_name")
    options |= _precisions(raw)
    parsed_arguments = dict(
        _parse_with_vllm({name: value for name, value in raw.items() if name not in _HANDLED_SEPARATELY}, env)
    )
    options |= {name: parsed_arguments.pop(name) for name in _SAME_OPTIONS if name in parsed_arguments}
    parsed_arguments.pop("enable_auto_tool_choice", None)  # implied by tool_call_parser
    if parsed_arguments.get("max_model_len") == -1:  # automatic
        del parsed_arguments["max_model_len"]
    for name, value in parsed_arguments.items():
        if name == "max_model_len":
            options[name] = value
        elif name == "kv_cache_memory_bytes":
            options["kv_cache_gib"] = value / 2**30
        elif name == "limit_mm_per_prompt":
            options[name] = {modality: _plain_limit(limit) for modality, limit in value.items()}
        elif name == "allowed_media_domains":
            options[name] = ",".join(value)
        else:
            options.setdefault("engine_args", {})[name] = value
    return options


def variable_of(env: Mapping[str, str], option: str) -> str:
    """Return the variable that sets an option, for messages.

    >>> variable_of({}, "max_model_len"), variable_of({"HF_MODEL_ID": "a/b"}, "model")
    ('SM_VLLM_MAX_MODEL_LEN', 'HF_MODEL_ID')
    """
    if option in ("drafter", "num_speculative_tokens") or option.startswith("draft_"):
        return SPECULATIVE_CONFIG_VARIABLE
    names = _VARIABLES_OF.get(option, (_variable(option),))
    return next((name for name in names if env.get(name, "").strip()), names[-1])


def vllm_arguments(env: Mapping[str, str]) -> dict[str, Any]:
    """Return vLLM's arguments before vLLM parses them: True for a flag, a list for an array, otherwise text.

    The rules are those of AWS's vLLM container (scripts/docker/vllm/sagemaker_args.py of aws/deep-learning-containers,
    2026):

        SM_VLLM_X_Y=value   --x-y value
        true, or empty      --x-y
        false               omitted
        a JSON array        --x-y with a word for each element; an empty array is omitted
        a JSON object       --x-y with the object; several consecutive objects are like an array of them

    Where AWS's container would fail to start, peagle assumes the obvious meaning: a switch may also be 1, yes, on, 0,
    no or off, and an argument that requires a value is omitted if its variable is empty.

    >>> vllm_arguments({"SM_VLLM_ENFORCE_EAGER": "true", "SM_VLLM_SEED": "1", "SM_VLLM_ENABLE_LORA": "false"})
    {'enforce_eager': True, 'seed': '1'}
    """
    variables = [variable for variable in sorted(env) if variable.startswith(PREFIX)]
    values = {variable.removeprefix(PREFIX).lower(): _argument_value(env[variable]) for variable in variables}
    return {name: value for name, value in values.items() if value is not None}


def parse_switch(variable: str, text: str) -> bool:
    """Return whether a variable is on; empty is off. Raises ConfigError for other values."""
    plain = text.strip().lower()
    if plain not in ("", *_YES, *_NO):
        raise ConfigError(f"{variable} must be true or false, not {shown(text)}")
    return plain in _YES


def drafter_options(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that set the drafter; empty if the variable is unset or empty.

    Without a model in the configuration, the catalog's head for the target is used.

    Raises:
        ConfigError: the value is not valid.
    """
    text = env.get(SPECULATIVE_CONFIG_VARIABLE, "").strip()
    if not text:
        return {}
    if text.lower() in (*_NO, "[]", "null", "none"):
        return {"drafter": "none"}
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{SPECULATIVE_CONFIG_VARIABLE} must be a JSON object, or false for no drafter;"
            f" it is not valid JSON: {error}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{SPECULATIVE_CONFIG_VARIABLE} must be a JSON object, or false for no drafter,"
            f" not a JSON {type(config).__name__}"
        )
    method = config.get("method") or "eagle3"
    if method not in ("eagle3", "dflash", "dspark"):
        raise ConfigError(
            f"{SPECULATIVE_CONFIG_VARIABLE}: peagle does not serve the method {shown(method)}",
            hint='P-EAGLE is "method": "eagle3" with "parallel_drafting": true; EAGLE-3 is the same without it',
        )
    if unknown := [key for key in config if key not in _SPECULATIVE_KEYS]:
        raise ConfigError(
            f"{SPECULATIVE_CONFIG_VARIABLE}: peagle does not support the key {shown(unknown[0])}",
            hint=did_you_mean(unknown[0], _SPECULATIVE_KEYS),
        )
    if "num_speculative_tokens" not in config:
        raise ConfigError(f"{SPECULATIVE_CONFIG_VARIABLE}: num_speculative_tokens is missing")
    is_parallel = config.get("parallel_drafting", False)
    if not isinstance(is_parallel, bool):
        raise ConfigError(
            f"{SPECULATIVE_CONFIG_VARIABLE}: parallel_drafting must be true or false, not {is_parallel!r}"
        )
    k = config["num_speculative_tokens"]
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ConfigError(
            f"{SPECULATIVE_CONFIG_VARIABLE}: num_speculative_tokens must be a whole number above zero, not {k!r}"
        )
    for name in ("model", "attention_backend"):
        if not isinstance(config.get(name), str | None):
            raise ConfigError(f"{SPECULATIVE_CONFIG_VARIABLE}: {name} must be text, not {config[name]!r}")
    if config.get("revision") is not None:
        raise ConfigError(
            f"{SPECULATIVE_CONFIG_VARIABLE}: revision is not supported, because peagle always uses the latest commit of"
            " a head's main branch",
            hint="remove revision, or set model to a folder with the head",
        )
    if (cache := config.get("kv_cache_dtype")) not in _DRAFT_KV_CACHE_PRECISIONS:
        raise ConfigError(f"{SPECULATIVE_CONFIG_VARIABLE}: kv_cache_dtype {cache!r} is not supported")
    return {
        "drafter": config.get("model") or ("peagle" if is_parallel and method == "eagle3" else method),
        "num_speculative_tokens": k,
        "draft_kv_cache_precision": _DRAFT_KV_CACHE_PRECISIONS[cache],
        "draft_attention_backend": config.get("attention_backend"),
    }


def to_sagemaker_env(drafter: DrafterSpec | None) -> dict[str, str]:
    """Return the variable that configures a JumpStart endpoint with the same drafter; empty without a drafter."""
    config = speculative_config(drafter)
    if config is None:
        return {}
    return {
        SPECULATIVE_CONFIG_VARIABLE: json.dumps(
            {key: config[key] for key in _SPECULATIVE_KEYS if key in config and key != _LOCAL_ARGMAX}
        )
    }


def _argument_value(text: str) -> Any:
    """Return the value of a variable; None if the argument is omitted."""
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
    objects = _json_objects(plain)
    return text if len(objects) < 2 else objects


def _json_objects(text: str) -> list[dict[str, Any]]:
    """Return the objects of a text that consists of JSON objects only; empty for other texts."""
    decoder, objects = json.JSONDecoder(), []
    while text.startswith("{"):
        try:
            value, end = decoder.raw_decode(text)
        except ValueError:
            return []
        objects.append(value)
        text = text[end:].lstrip()
    return [] if text else objects


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _single_value(raw: Mapping[str, Any], name: str) -> str | None:
    """Return the single value of an argument; None if it is unset."""
    value = raw.get(name)
    if value is True:
        raise ConfigError(f"{_variable(name)} needs a value")
    if isinstance(value, list):
        raise ConfigError(f"{_variable(name)} must have one value, not {len(value)}")
    return None if value is None else str(value).strip()


def _precisions(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the options for number formats."""
    options = {}
    if (dtype := _single_value(raw, "dtype")) is not None:
        options["precision"] = _translate("dtype", dtype, _PRECISIONS)
    if (quantization := _single_value(raw, "quantization")) is not None:
        quantization = _translate("quantization", quantization, {"fp8": "fp8"})
        if options.get("precision", "auto") not in ("auto", "bf16"):
            raise ConfigError(f"{_variable('quantization')}=fp8 computes in bfloat16, but {_variable('dtype')} differs")
        options["precision"] = quantization
    if (cache := _single_value(raw, "kv_cache_dtype")) is not None:
        options["kv_cache_precision"] = _translate("kv_cache_dtype", cache, _KV_CACHE_PRECISIONS)
    return options


def _translate(name: str, value: str, translations: Mapping[str, str]) -> str:
    if value not in translations:
        raise ConfigError(
            f"{_variable(name)}: {value} is not one of {', '.join(translations)}",
            hint="without this variable, a checkpoint is served in the format in which it is published",
        )
    return translations[value]


def _parse_with_vllm(raw: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that the arguments set, with the values from vLLM's own parser."""
    if not raw:
        return
    from peagle.engine.vllm_internals import ServeArguments

    arguments = ServeArguments()
    for name, value in raw.items():
        variable = _variable(name)
        if name not in arguments.names:
            known_variables = [_variable(known_name) for known_name in arguments.names]
            raise ConfigError(f"{variable}: vLLM has no such argument", hint=did_you_mean(variable, known_variables))
        if value is True and not env[variable].strip() and not arguments.is_switch(name):
            continue  # an empty variable sets nothing
        field = arguments.destination(name)
        if arguments.is_switch(name):
            if not isinstance(value, str | bool):
                raise ConfigError(f"{variable} must be true or false, not {shown(value)}")
            is_on = parse_switch(variable, value) if isinstance(value, str) else value
            # `arguments.parse` returns the field's value with the switch on: False for `no_x`.
            parsed: Any = arguments.parse(name, []) is is_on
            if parsed == arguments.default(name) and field not in _SAME_OPTIONS:
                continue
        if field not in (*_SAME_OPTIONS, "enable_auto_tool_choice") and field not in arguments.engine_fields:
            raise ConfigError(
                f"{variable}: this option of vLLM's API server has no effect, because peagle serves the API itself",
                hint=_HINTS.get(field, "remove the variable"),
            )
        if field not in (*_SAME_OPTIONS, *SPEC_FIELDS, *_TRANSLATED, "enable_auto_tool_choice"):
            try:
                check_extra({field: value})
            except ConfigError as error:
                raise ConfigError(f"{variable}: {error.message}", hint=error.hint) from None
        yield field, parsed if arguments.is_switch(name) else _parse_value(arguments, name, value)


def _parse_value(arguments: "ServeArguments", name: str, value: Any) -> Any:
    variable = _variable(name)
    if value is True:
        values = []
    else:
        items = value if isinstance(value, list) else [value]
        values = [item if isinstance(item, str) else json.dumps(item) for item in items]
    try:
        return arguments.parse(name, values)
    except ValueError as error:
        if not values:
            raise ConfigError(f"{variable} needs a value") from None
        raise ConfigError(
            f"{variable}: vLLM does not accept {shown(' '.join(values))}", hint=_parser_reason(str(error))
        ) from None


def _parser_reason(message: str) -> str:
    """Return the part of an argparse message that helps a user; empty if there is none."""
    reason = message.partition(": ")[2]
    lines = [line.strip() for line in reason.splitlines() if "For further information" not in line]
    if lines and lines[0].startswith("invalid choice"):
        return lines[0].partition("(")[2].removesuffix(")")
    return "" if reason.startswith(("invalid ", "Value ")) else "; ".join(lines)


def _plain_limit(limit: Any) -> Any:
    """Return n for `{"count": n}`, vLLM's longer form of a limit."""
    return limit["count"] if isinstance(limit, dict) and limit.keys() == {"count"} else limit
