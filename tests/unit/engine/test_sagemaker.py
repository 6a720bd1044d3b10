import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peagle.engine.sagemaker import VARIABLE, from_sagemaker_env, serve_keys, to_sagemaker_env, vllm_arguments
from peagle.engine.spec import DrafterSpec, DraftMethod
from peagle.errors import ConfigError


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_a_drafter_survives_the_variable(method: DraftMethod) -> None:
    drafter = DrafterSpec(method=method, model="amazon/head", num_speculative_tokens=7)
    assert from_sagemaker_env(to_sagemaker_env(drafter)) == drafter
    pinned = replace(drafter, revision="abc")
    assert from_sagemaker_env(to_sagemaker_env(pinned)) == pinned


def test_what_jumpstart_writes_is_understood() -> None:
    text = '{"model": "amazon/h", "num_speculative_tokens": 5, "method": "eagle3", "parallel_drafting": true}'
    assert from_sagemaker_env({VARIABLE: text}) == DrafterSpec(
        method="peagle", model="amazon/h", num_speculative_tokens=5
    )


@pytest.mark.parametrize("env", [{}, {VARIABLE: ""}, {VARIABLE: "  "}])
def test_no_variable_means_no_drafter(env: dict[str, str]) -> None:
    assert from_sagemaker_env(env) is None
    assert to_sagemaker_env(None) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        (json.dumps({"model": "h"}), "lacks num_speculative_tokens"),
        (json.dumps({"num_speculative_tokens": 3}), "lacks model"),
        (json.dumps({"model": "h", "num_speculative_tokens": 3, "method": "medusa"}), "medusa"),
        (
            json.dumps({"model": "h", "num_speculative_tokens": 3, "paralel_drafting": True}),
            "paralel_drafting",
        ),
        (json.dumps({"model": "h", "num_speculative_tokens": "3"}), "whole number"),
        (json.dumps({"model": "h", "num_speculative_tokens": 0}), "above zero"),
        (json.dumps({"model": 5, "num_speculative_tokens": 3}), "must be text"),
        (json.dumps({"model": "h", "num_speculative_tokens": 3, "revision": 5}), "revision must be text"),
        (
            json.dumps({"model": "h", "num_speculative_tokens": 3, "parallel_drafting": "yes"}),
            "true or false",
        ),
        (
            json.dumps(
                {
                    "model": "h",
                    "num_speculative_tokens": 3,
                    "num_speculative_tokens_per_batch_size": [[1, 2, 3]],
                }
            ),
            "num_speculative_tokens_per_batch_size",
        ),
    ],
)
def test_what_is_wrong_with_the_variable_is_said(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        from_sagemaker_env({VARIABLE: text})


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
def test_a_value_is_read_as_awss_container_reads_it(text: str, value: object) -> None:
    found = vllm_arguments({"SM_VLLM_SOME_ARGUMENT": text, "OTHER": "x"})
    assert found == ({} if value is None else {"some_argument": value})


def test_what_jumpstart_sets_is_an_endpoint_with_its_drafter() -> None:
    folder = "/opt/ml/additional-model-data-sources/eagle"
    config = {"model": folder, "method": "eagle3", "num_speculative_tokens": 3, "parallel_drafting": True}
    env = {
        VARIABLE: json.dumps(config),
        "SM_VLLM_MODEL": "/opt/ml/model",
        "SM_VLLM_SERVED_MODEL_NAME": "qwen3-coder",
        "SM_VLLM_MAX_MODEL_LEN": "32768",
        "SM_VLLM_TENSOR_PARALLEL_SIZE": "1",
        "SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true",
        "SM_VLLM_TOOL_CALL_PARSER": "qwen3_coder",
        "SM_VLLM_ENABLE_LORA": "false",
        "PATH": "/usr/bin",
    }
    assert serve_keys(env) == {
        "model": "/opt/ml/model",
        "drafter": folder,
        "num_speculative_tokens": 3,
        "draft_kv_cache_precision": "auto",
        "draft_attention_backend": None,
        "name": "qwen3-coder",
        "max_model_len": "32768",
        "tensor_parallel_size": "1",
        "tool_call_parser": "qwen3_coder",
    }


def keys_of(tmp_path: Path, **variables: str) -> dict[str, Any]:
    return serve_keys({f"SM_VLLM_{name}": value for name, value in variables.items()}, model_folder=tmp_path / "none")


@pytest.mark.parametrize(
    ("variables", "keys"),
    [
        ({"DTYPE": "auto"}, {"precision": "auto"}),
        ({"DTYPE": "bfloat16", "QUANTIZATION": "fp8"}, {"precision": "fp8"}),
        ({"DTYPE": "half"}, {"precision": "float16"}),
        ({"KV_CACHE_DTYPE": "fp8_e4m3"}, {"kv_cache_precision": "fp8"}),
        ({"KV_CACHE_MEMORY_BYTES": "1073741824"}, {"kv_cache_gib": 1.0}),
        ({"ENFORCE_EAGER": "true"}, {"enforce_eager": True}),
        ({"ENFORCE_EAGER": "false"}, {}),
        ({"SERVED_MODEL_NAME": '["one"]'}, {"name": "one"}),
        ({"LIMIT_MM_PER_PROMPT": '{"image": 4}'}, {"limit_mm_per_prompt": '{"image": 4}'}),
        (
            {"BLOCK_SIZE": "32", "ENABLE_PREFIX_CACHING": "", "MOE_BACKEND": "triton", "CUSTOM_OPS": '["all"]'},
            {
                "engine_args": {
                    "block_size": 32,
                    "custom_ops": ["all"],
                    "enable_prefix_caching": True,
                    "moe_backend": "triton",
                }
            },
        ),
        ({"NO_ENABLE_PREFIX_CACHING": "true"}, {"engine_args": {"enable_prefix_caching": False}}),
        ({"COMPILATION_CONFIG": '{"level": 3}'}, {"engine_args": {"compilation_config": {"level": 3}}}),
    ],
)
def test_an_argument_is_our_key_where_we_manage_it_and_else_the_engines(
    tmp_path: Path, variables: dict[str, str], keys: dict[str, Any]
) -> None:
    assert keys_of(tmp_path, **variables) == keys


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"TENSOR_PARALLEL_SIZE": "true"}, "SM_VLLM_TENSOR_PARALLEL_SIZE needs a value"),
        ({"SERVED_MODEL_NAME": '["one", "two"]'}, "has one name, and these are 2"),
        ({"DTYPE": "int8"}, "SM_VLLM_DTYPE: int8 is not one of auto, bfloat16"),
        ({"QUANTIZATION": "awq"}, "SM_VLLM_QUANTIZATION: awq is not one of fp8"),
        ({"DTYPE": "float16", "QUANTIZATION": "fp8"}, "SM_VLLM_DTYPE differs"),
        ({"KV_CACHE_DTYPE": "int8"}, "SM_VLLM_KV_CACHE_DTYPE"),
        ({"KV_CACHE_MEMORY_BYTES": "4G"}, "SM_VLLM_KV_CACHE_MEMORY_BYTES must be a number, not 4G"),
        ({"SPECULATIVE_CONFIG": '{"model": "h", "num_speculative_tokens": 3, "revision": "abc"}'}, "not at a revision"),
    ],
)
def test_what_peagle_cannot_carry_is_refused_by_the_variables_name(
    tmp_path: Path, variables: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        keys_of(tmp_path, **variables)


def test_the_model_is_the_variables_else_the_mounted_one_else_the_hubs(tmp_path: Path) -> None:
    env = {"SM_VLLM_MODEL": "one", "HF_MODEL_ID": "org/three"}
    hub = {"HF_MODEL_ID": "org/three"}
    assert serve_keys(env, model_folder=tmp_path)["model"] == "one"
    assert serve_keys(hub, model_folder=tmp_path)["model"] == "org/three"
    assert serve_keys(hub, model_folder=tmp_path / "none")["model"] == "org/three"
    (tmp_path / "config.json").touch()
    assert serve_keys(env, model_folder=tmp_path)["model"] == "one"
    assert serve_keys(hub, model_folder=tmp_path)["model"] == str(tmp_path)
    assert "model" not in serve_keys({}, model_folder=tmp_path / "none")
