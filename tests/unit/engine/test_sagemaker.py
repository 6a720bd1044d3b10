import json
import re

import pytest

from peagle.engine.sagemaker import (
    SPECULATIVE_CONFIG_VARIABLE,
    drafter_options,
    parse_switch,
    serve_options,
    to_sagemaker_env,
    vllm_arguments,
)
from peagle.engine.spec import DrafterSpec
from peagle.errors import ConfigError


def test_drafter_variable_round_trip():
    drafter = DrafterSpec(method="peagle", model="amazon/head", num_speculative_tokens=7, kv_cache_precision="fp8")
    assert drafter_options(to_sagemaker_env(drafter)) == {
        "drafter": "amazon/head",
        "num_speculative_tokens": 7,
        "draft_kv_cache_precision": "fp8",
        "draft_attention_backend": None,
    }
    assert to_sagemaker_env(None) == {}


@pytest.mark.parametrize(
    ("text", "drafter"),
    [
        (
            '{"model": "amazon/h", "num_speculative_tokens": 5, "method": "eagle3", "parallel_drafting": true}',
            "amazon/h",
        ),
        # As in AWS's blog posts: without a model, the target's head of the catalog is used.
        ('{"method":"eagle3","num_speculative_tokens":5,"parallel_drafting":true}', "peagle"),
        ('{"method":"eagle3","num_speculative_tokens":5}', "eagle3"),
        ('{"model": "", "num_speculative_tokens": 5, "parallel_drafting": true}', "peagle"),
        ('{"method": "dflash", "num_speculative_tokens": 5}', "dflash"),
        ('{"method": "dspark", "model": "org/h", "num_speculative_tokens": 5}', "org/h"),
    ],
)
def test_jumpstart_configurations_are_read(text, drafter):
    options = drafter_options({SPECULATIVE_CONFIG_VARIABLE: text})
    assert (options["drafter"], options["num_speculative_tokens"]) == (drafter, 5)


@pytest.mark.parametrize("text", ["false", "False", "[]", "off", "no", "0", "null", "None"])
def test_drafter_can_be_turned_off(text):
    assert drafter_options({SPECULATIVE_CONFIG_VARIABLE: text}) == {"drafter": "none"}


@pytest.mark.parametrize("env", [{}, {SPECULATIVE_CONFIG_VARIABLE: ""}, {SPECULATIVE_CONFIG_VARIABLE: "  "}])
def test_catalog_drafter_is_the_default(env):
    assert drafter_options(env) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("true", "must be a JSON object, or false for no drafter, not a JSON bool"),
        ("[1]", "must be a JSON object"),
        (json.dumps({"model": "h"}), "num_speculative_tokens is missing"),
        (json.dumps({"model": "h", "num_speculative_tokens": 3, "method": "medusa"}), "medusa"),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}',
            "does not serve the method 'ngram'",
        ),
        ('{"method": 5}', "does not serve the method 5"),
        (json.dumps({"model": "h", "num_speculative_tokens": 3, "paralel_drafting": True}), "paralel_drafting"),
        (json.dumps({"model": "h", "num_speculative_tokens": "3"}), "whole number"),
        (json.dumps({"model": "h", "num_speculative_tokens": 0}), "above zero"),
        (json.dumps({"model": 5, "num_speculative_tokens": 3}), "model must be text"),
        (json.dumps({"model": "h", "num_speculative_tokens": 3, "revision": "abc"}), "revision is not supported"),
        (json.dumps({"model": "h", "num_speculative_tokens": 3, "parallel_drafting": "yes"}), "true or false"),
        (
            json.dumps(
                {"model": "h", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 2, 3]]}
            ),
            "num_speculative_tokens_per_batch_size",
        ),
    ],
)
def test_invalid_drafter_variable_is_explained(text, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        drafter_options({SPECULATIVE_CONFIG_VARIABLE: text})
    assert SPECULATIVE_CONFIG_VARIABLE in error.value.message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", "8"),
        ("a path with spaces", "a path with spaces"),
        ("true", True),
        (" True ", True),
        ("", True),
        ("false", None),
        ("FALSE", None),
        ("[1, 2, 4]", [1, 2, 4]),
        ('["a", {"b": 1}]', ["a", {"b": 1}]),
        ("[]", None),
        ('{"image": {"count": 2}}', '{"image": {"count": 2}}'),
        ('{"a": 1} {"b": 2}', [{"a": 1}, {"b": 2}]),
        ('{"method": "x",\n "k": 1}', '{"method": "x",\n "k": 1}'),
        ("{% for m in messages %}{{ m }}{% endfor %}", "{% for m in messages %}{{ m }}{% endfor %}"),
        ('[{"name":"a","path":}]', '[{"name":"a","path":}]'),
        ('{"a": 1} and more', '{"a": 1} and more'),
    ],
)
def test_values_follow_the_rules_of_aws(text, value):
    arguments = vllm_arguments({"SM_VLLM_SOME_ARGUMENT": text, "OTHER": "x"})
    assert arguments == ({} if value is None else {"some_argument": value})


def test_jumpstart_variables_become_serve_options():
    folder = "/opt/ml/additional-model-data-sources/eagle"
    config = {"model": folder, "method": "eagle3", "num_speculative_tokens": 3, "parallel_drafting": True}
    env = {
        SPECULATIVE_CONFIG_VARIABLE: json.dumps(config),
        "SM_VLLM_MODEL": "/opt/ml/model",
        "SM_VLLM_SERVED_MODEL_NAME": "qwen3-coder",
        "SM_VLLM_MAX_MODEL_LEN": "32768",
        "SM_VLLM_TENSOR_PARALLEL_SIZE": "1",
        "SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true",
        "SM_VLLM_TOOL_CALL_PARSER": "qwen3_coder",
        "SM_VLLM_ENABLE_LORA": "false",
        "PATH": "/usr/bin",
    }
    assert serve_options(env) == {
        "model": "/opt/ml/model",
        "drafter": folder,
        "num_speculative_tokens": 3,
        "draft_kv_cache_precision": "auto",
        "draft_attention_backend": None,
        "name": "qwen3-coder",
        "max_model_len": 32768,
        "tensor_parallel_size": 1,
        "tool_call_parser": "qwen3_coder",
    }


def options_of(tmp_path, **variables):
    return serve_options(
        {f"SM_VLLM_{name}": value for name, value in variables.items()}, model_folder=tmp_path / "none"
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"DTYPE": "auto"}, {"precision": "auto"}),
        ({"DTYPE": "bfloat16", "QUANTIZATION": "fp8"}, {"precision": "fp8"}),
        ({"DTYPE": "half"}, {"precision": "float16"}),
        ({"KV_CACHE_DTYPE": "fp8_e4m3"}, {"kv_cache_precision": "fp8"}),
        ({"KV_CACHE_MEMORY_BYTES": "1073741824"}, {"kv_cache_gib": 1.0}),
        ({"DTYPE": "float"}, {"precision": "float32"}),
        ({"KV_CACHE_MEMORY_BYTES": "1G"}, {"kv_cache_gib": 1.0}),
        ({"MAX_MODEL_LEN": "4k"}, {"max_model_len": 4000}),
        ({"MAX_MODEL_LEN": "4K"}, {"max_model_len": 4096}),
        ({"MAX_MODEL_LEN": "auto"}, {}),
        ({"MAX_MODEL_LEN": "-1"}, {}),
        ({"MAX_NUM_BATCHED_TOKENS": "2k"}, {"max_num_batched_tokens": 2000}),
        ({"PORT": "8081", "GPU_MEMORY_UTILIZATION": "0.5"}, {"port": 8081, "gpu_memory_utilization": 0.5}),
        ({"ENFORCE_EAGER": "true"}, {"enforce_eager": True}),
        ({"ENFORCE_EAGER": ""}, {"enforce_eager": True}),
        ({"ENFORCE_EAGER": "YES"}, {"enforce_eager": True}),
        ({"ENFORCE_EAGER": "1"}, {"enforce_eager": True}),
        ({"ENFORCE_EAGER": "false"}, {}),
        ({"ENFORCE_EAGER": "0"}, {"enforce_eager": False}),
        ({"ENFORCE_EAGER": "no"}, {"enforce_eager": False}),
        ({"ENFORCE_EAGER": "off"}, {"enforce_eager": False}),
        ({"ENABLE_PREFIX_CACHING": "off"}, {"engine_args": {"enable_prefix_caching": False}}),
        ({"ENABLE_PREFIX_CACHING": "on"}, {"engine_args": {"enable_prefix_caching": True}}),
        ({"TRUST_REMOTE_CODE": "0", "ENABLE_LOG_REQUESTS": "no", "ENABLE_AUTO_TOOL_CHOICE": "on"}, {}),
        ({"MODEL": "", "MAX_MODEL_LEN": "", "TOOL_CALL_PARSER": " ", "DTYPE": "", "SERVED_MODEL_NAME": ""}, {}),
        ({"MAX_MODEL_LEN": "false"}, {}),
        ({"SERVED_MODEL_NAME": '["one"]'}, {"name": "one"}),
        ({"LIMIT_MM_PER_PROMPT": '{"image": 4}'}, {"limit_mm_per_prompt": {"image": 4}}),
        ({"LIMIT_MM_PER_PROMPT": '{"image": {"count": 2}}'}, {"limit_mm_per_prompt": {"image": 2}}),
        ({"ALLOWED_MEDIA_DOMAINS": '["a.org", "b.org"]'}, {"allowed_media_domains": "a.org,b.org"}),
        ({"ALLOWED_MEDIA_DOMAINS": "a.org,b.org"}, {"allowed_media_domains": "a.org,b.org"}),
        (
            {
                "BLOCK_SIZE": "32",
                "ENABLE_PREFIX_CACHING": "",
                "MOE_BACKEND": "triton",
                "CUDAGRAPH_CAPTURE_SIZES": "[1, 2]",
            },
            {
                "engine_args": {
                    "block_size": 32,
                    "cudagraph_capture_sizes": [1, 2],
                    "enable_prefix_caching": True,
                    "moe_backend": "triton",
                }
            },
        ),
        ({"NO_ENABLE_PREFIX_CACHING": "true"}, {"engine_args": {"enable_prefix_caching": False}}),
        ({"COMPILATION_CONFIG": '{"mode": 3}'}, {"engine_args": {"compilation_config": {"mode": 3}}}),
        (
            {"COMPILATION_CONFIG": '{"max_cudagraph_capture_size": 1k}'},
            {"engine_args": {"compilation_config": {"max_cudagraph_capture_size": 1000}}},
        ),
        ({"HF_OVERRIDES": '{"rope_theta": 1}'}, {"engine_args": {"hf_overrides": {"rope_theta": 1}}}),
    ],
)
def test_arguments_become_options_or_engine_arguments(tmp_path, variables, expected):
    assert options_of(tmp_path, **variables) == expected


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"TENSOR_PARALLEL_SIZE": "true"}, "SM_VLLM_TENSOR_PARALLEL_SIZE needs a value"),
        ({"SERVED_MODEL_NAME": '["one", "two"]'}, "has only one name, not 2"),
        ({"DTYPE": "int8"}, "SM_VLLM_DTYPE: int8 is not one of auto, bfloat16"),
        ({"QUANTIZATION": "awq"}, "SM_VLLM_QUANTIZATION: awq is not one of fp8"),
        ({"DTYPE": "float16", "QUANTIZATION": "fp8"}, "SM_VLLM_DTYPE differs"),
        ({"KV_CACHE_DTYPE": "int8"}, "SM_VLLM_KV_CACHE_DTYPE"),
        ({"KV_CACHE_MEMORY_BYTES": "4X"}, "SM_VLLM_KV_CACHE_MEMORY_BYTES: vLLM does not accept '4X'"),
        ({"KV_CACHE_MEMORY_BYTES": "1.5G"}, r"(?s)SM_VLLM_KV_CACHE_MEMORY_BYTES: .*Did you mean to use 1\.5g"),
        ({"MAX_MODEL_LEN": "long"}, "SM_VLLM_MAX_MODEL_LEN: vLLM does not accept 'long'"),
        ({"MAX_NUM_SEQS": "[1, 2]"}, "SM_VLLM_MAX_NUM_SEQS: vLLM does not accept '1 2'"),
        ({"MAX_MODEL_LENGTH": "4096"}, r"(?s)SM_VLLM_MAX_MODEL_LENGTH: vLLM has no .*SM_VLLM_MAX_MODEL_LEN"),
        ({"COMPILATION_CONFIG": '{"mode": "zz"}'}, r"(?s)SM_VLLM_COMPILATION_CONFIG: .*Invalid compilation mode: zz"),
        ({"MOE_BACKEND": "x"}, r"(?s)SM_VLLM_MOE_BACKEND: .*choose from .*'triton'"),
        ({"ENFORCE_EAGER": "maybe"}, "SM_VLLM_ENFORCE_EAGER must be true or false, not 'maybe'"),
        ({"ENFORCE_EAGER": "2"}, "SM_VLLM_ENFORCE_EAGER must be true or false, not '2'"),
        ({"ENABLE_CHUNKED_PREFILL": "[true]"}, "SM_VLLM_ENABLE_CHUNKED_PREFILL must be true or false"),
        ({"MODEL": "true"}, "SM_VLLM_MODEL needs a value"),
        ({"MODEL": '["a", "b"]'}, "SM_VLLM_MODEL must have one value"),
        ({"TRUST_REMOTE_CODE": "true"}, "SM_VLLM_TRUST_REMOTE_CODE: .* code in a model's folder never runs"),
        ({"REVISION": "main"}, "SM_VLLM_REVISION: .* managed by peagle"),
        ({"API_KEY": "secret"}, r"(?s)SM_VLLM_API_KEY: .*PEAGLE_API_KEYS"),
        ({"ALLOWED_ORIGINS": "*"}, r"(?s)SM_VLLM_ALLOWED_ORIGINS: .*reverse proxy"),
        ({"SSL_CERTFILE": "c.pem"}, r"(?s)SM_VLLM_SSL_CERTFILE: .*PEAGLE_TLS_CERT"),
        ({"UVICORN_LOG_LEVEL": "info"}, r"(?s)SM_VLLM_UVICORN_LOG_LEVEL: .*remove the variable"),
    ],
)
def test_unsupported_variable_is_named(tmp_path, variables, reason):
    with pytest.raises(ConfigError) as error:
        options_of(tmp_path, **variables)
    assert re.search(reason, str(error.value))
    assert "secret" not in str(error.value)


def test_invalid_switch_is_refused():
    with pytest.raises(ConfigError, match="PEAGLE_SAGEMAKER must be true or false, not 'maybe'"):
        parse_switch("PEAGLE_SAGEMAKER", "maybe")


def test_model_variable_precedes_model_folder_and_hub_id(tmp_path):
    env = {"SM_VLLM_MODEL": "one", "HF_MODEL_ID": "org/three"}
    hub = {"HF_MODEL_ID": "org/three"}
    assert serve_options(env, model_folder=tmp_path)["model"] == "one"
    assert serve_options(hub, model_folder=tmp_path)["model"] == "org/three"
    assert serve_options(hub, model_folder=tmp_path / "none")["model"] == "org/three"
    (tmp_path / "config.json").touch()
    assert serve_options(env, model_folder=tmp_path)["model"] == "one"
    assert serve_options(hub, model_folder=tmp_path)["model"] == str(tmp_path)
    assert serve_options({"SM_VLLM_MODEL": " ", **hub}, model_folder=tmp_path / "none")["model"] == "org/three"
    assert "model" not in serve_options({"HF_MODEL_ID": " "}, model_folder=tmp_path / "none")
