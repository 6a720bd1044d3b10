import ast
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from devices import cpu, gpu

from peagle.engine.arguments import command_line, engine_args, speculative_config
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.engine.steps import max_num_batched_tokens
from peagle.errors import ConfigError

CPU, GPU = cpu("avx512f"), gpu(num_accelerators=8)


def head(method="peagle", k=7):
    return DrafterSpec(method=method, model="head", num_speculative_tokens=k)


EAGLE3 = {"method": "eagle3", "model": "head", "num_speculative_tokens": 2, "use_local_argmax_reduction": True}
PEAGLE = EAGLE3 | {"parallel_drafting": True}
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.5]}


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (None, None),
        (head("eagle3", 2), EAGLE3),
        (head("peagle", 2), PEAGLE),
        (head("dflash", 2), {"method": "dflash", "model": "head", "num_speculative_tokens": 2}),
        (head("dspark", 2), {"method": "dspark", "model": "head", "num_speculative_tokens": 2}),
        (
            replace(head("dspark", 2), verify="auto"),
            {"method": "dspark", "model": "head", "num_speculative_tokens": 2, "enable_adaptive_verification": True},
        ),
        (replace(head("peagle", 2), revision="abc"), PEAGLE | {"revision": "abc"}),
        (replace(head("peagle", 2), synthetic_rates=(0.8, 0.5)), PEAGLE | SYNTHETIC),
        (
            DrafterSpec(method="ngram", model="", num_speculative_tokens=4),
            {"method": "ngram", "num_speculative_tokens": 4},
        ),
        (
            DrafterSpec(method="suffix", model="", num_speculative_tokens=4),
            {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 0},
        ),
    ],
)
def test_speculative_config(drafter, expected):
    assert speculative_config(drafter) == expected


def test_head_classes_support_local_argmax():
    from vllm.model_executor.models.deepseek_eagle3 import Eagle3DeepseekV2ForCausalLM
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
    from vllm.model_executor.models.qwen3_eagle3 import Eagle3Qwen3ForCausalLM

    for head_class in (Eagle3DeepseekV2ForCausalLM, Eagle3LlamaForCausalLM, Eagle3Qwen3ForCausalLM):
        assert callable(getattr(head_class, "get_top_tokens", None)), "vLLM refuses heads without it"


def test_dummy_target_loads_the_heads_weights_if_they_exist(tmp_path):
    drafter = DrafterSpec(method="peagle", model=str(tmp_path), num_speculative_tokens=2)
    spec = EngineSpec(model="org/m", drafter=drafter, load_format="dummy")
    assert "draft_load_config" not in engine_args(spec, CPU)["speculative_config"]  # the head is a dummy, too
    (tmp_path / "model.safetensors").touch()
    assert engine_args(spec, CPU)["speculative_config"]["draft_load_config"] == {"load_format": "auto"}
    assert "draft_load_config" not in engine_args(replace(spec, load_format="auto"), CPU)["speculative_config"]


def test_no_speculative_config_without_a_drafter():
    arguments = engine_args(EngineSpec(model="org/m"), CPU)
    assert "speculative_config" not in arguments
    assert "per_request_spec_decode_metrics" not in arguments  # vLLM refuses it without speculation
    assert "max_model_len" not in arguments


@pytest.mark.parametrize(("method", "expected"), [("peagle", True), ("dflash", False), ("dspark", False)])
def test_block_heads_disable_the_prefix_cache(method, expected):
    spec = EngineSpec(model="org/m", drafter=head(method))
    assert engine_args(spec, GPU)["enable_prefix_caching"] is expected
    assert engine_args(replace(spec, enable_prefix_caching=False), GPU)["enable_prefix_caching"] is False


def test_request_metrics_can_be_omitted():
    spec = EngineSpec(model="org/m", drafter=head())
    assert engine_args(spec, CPU)["per_request_spec_decode_metrics"] == "summary"
    assert "per_request_spec_decode_metrics" not in engine_args(spec, CPU, request_metrics=False)


@pytest.mark.parametrize(
    ("drafter", "hardware", "max_num_seqs", "expected"),
    [  # the prefill budget is 2048 tokens on CPUs, and 8192 on GPUs
        (None, CPU, 256, 2048 + 256),
        (DrafterSpec(method="ngram", model="", num_speculative_tokens=4), CPU, 2, 2048 + 2 * 5),
        (head("eagle3", 7), CPU, 256, 2048 + 256 * 8),
        (head("peagle", 7), CPU, 256, 2048 + 256 * 14),
        (head("peagle", 1), CPU, 1, 2048 + 2),
        (head("dflash", 7), CPU, 256, 2048 + 256 * 15),
        (head("dspark", 7), GPU, 256, 8192 + 256 * 14),
        (head("peagle", 7), GPU, 64, 8192 + 64 * 14),
    ],
)
def test_max_num_batched_tokens_is_slots_plus_prefill_budget(drafter, hardware, max_num_seqs, expected):
    spec = EngineSpec(model="org/m", drafter=drafter, max_num_seqs=max_num_seqs)
    assert max_num_batched_tokens(spec, hardware) == expected
    assert engine_args(spec, hardware)["max_num_batched_tokens"] == expected


@pytest.mark.parametrize("method", ["peagle", "eagle3", "dflash", "dspark"])
def test_slots_suffice_for_vllms_scheduler(method):
    """Repeat the loop of vllm/v1/core/sched/scheduler.py over `input_budget`, with all requests decoding."""
    k, max_num_seqs = 7, 300
    spec = EngineSpec(model="org/m", drafter=head(method, k), max_num_seqs=max_num_seqs)
    budget = max_num_batched_tokens(spec, CPU)
    draft_slots = {"peagle": k - 1, "eagle3": 0, "dflash": k, "dspark": k - 1}[method]
    admitted = 0
    while admitted < max_num_seqs and budget - draft_slots >= 1 + k:
        budget -= 1 + k + draft_slots
        admitted += 1
    assert (admitted, budget) == (max_num_seqs, 2048)


QUANTISED = {"native_quantization": "compressed-tensors"}


@pytest.mark.parametrize(
    ("precision", "changes", "hardware", "dtype", "quantization", "kv_cache_dtype"),
    [
        ("fp8", {}, GPU, "bfloat16", "fp8", "fp8"),
        ("fp8", {}, CPU, "bfloat16", None, "fp8"),
        ("bf16", {"kv_cache_precision": "fp8"}, GPU, "bfloat16", None, "fp8"),
        ("int8", {}, cpu("avx512f", "avx512_vnni"), "bfloat16", "compressed-tensors", "auto"),
        ("float32", {}, CPU, "float32", None, "auto"),
        ("bf16", {"native_quantization": "mxfp4"}, GPU, "bfloat16", None, "bfloat16"),
        # With "auto", vLLM would use the format in a quantised checkpoint. On CPUs, bf16 has no other name.
        ("bf16", QUANTISED, GPU, "bfloat16", None, "bfloat16"),
        ("float16", QUANTISED, GPU, "float16", None, "float16"),
        ("bf16", QUANTISED | {"kv_cache_precision": "fp8"}, GPU, "bfloat16", None, "fp8"),
        ("bf16", QUANTISED, CPU, "bfloat16", None, "auto"),
    ],
)
def test_number_formats(precision, changes, hardware, dtype, quantization, kv_cache_dtype):
    arguments = engine_args(EngineSpec(model="org/m", precision=precision, **changes), hardware)
    assert (arguments["dtype"], arguments.get("quantization")) == (dtype, quantization)
    assert arguments["kv_cache_dtype"] == kv_cache_dtype


def test_kv_cache_is_sized_on_cpus_only():
    spec = EngineSpec(model="org/m")
    assert engine_args(spec, CPU)["kv_cache_memory_bytes"] == 5 * 1024**3  # a quarter of 20 GiB
    assert engine_args(spec, CPU, num_engines_on_node=2)["kv_cache_memory_bytes"] == int(2.5 * 1024**3)
    assert "kv_cache_memory_bytes" not in engine_args(spec, GPU)


@pytest.mark.parametrize("hardware", [CPU, GPU])
def test_explicit_kv_cache_size_replaces_the_default(hardware):
    spec = EngineSpec(model="org/m", kv_cache_gib=0.5)
    assert engine_args(spec, hardware)["kv_cache_memory_bytes"] == 512 * 1024**2


def test_sizes_and_flags_pass_through():
    values = {
        "model": "org/m", "max_num_seqs": 3, "max_num_batched_tokens": 999, "max_model_len": 512,
        "tensor_parallel_size": 4, "pipeline_parallel_size": 2, "enforce_eager": True, "gpu_memory_utilization": 0.7,
        "seed": 11, "load_format": "dummy", "enable_prefix_caching": False,
    }  # fmt: skip
    arguments = engine_args(EngineSpec(**values, extra={"block_size": 32}), GPU)
    assert (values | {"block_size": 32}).items() <= arguments.items()


@pytest.mark.parametrize(
    ("name", "field"),
    [("dtype", "precision"), ("speculative_config", "drafter"), ("max_num_seqs", "max_num_seqs")],
)
def test_extra_argument_cannot_override_the_spec(name, field):
    with pytest.raises(ConfigError, match=name) as caught:
        engine_args(EngineSpec(model="org/m", extra={name: "x"}), CPU)
    assert repr(field) in caught.value.hint


@pytest.mark.parametrize(
    "extra",
    [
        {"num_speculative_tokens_per_batch_size": [[1, 4, 7]]},
        {"speculative_config": {"num_speculative_tokens_per_batch_size": [[1, 4, 7]]}},
    ],
)
def test_dynamic_k_is_refused(extra):
    with pytest.raises(ConfigError, match="parallel drafting"):
        engine_args(EngineSpec(model="org/m", drafter=head(), extra=extra), CPU)


def test_all_arguments_exist_in_vllm():
    vllm_module = importlib.util.find_spec("vllm")
    if vllm_module is None or vllm_module.origin is None:
        pytest.skip("vLLM is not installed")
    source = ast.parse((Path(vllm_module.origin).parent / "engine/arg_utils.py").read_text())
    engine = next(n for n in source.body if isinstance(n, ast.ClassDef) and n.name == "EngineArgs")
    names = {n.target.id for n in engine.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    spec = EngineSpec(model="org/m", drafter=head(), precision="fp8", max_model_len=8, kv_cache_gib=1)
    assert engine_args(spec, GPU).keys() <= names


def test_command_line_has_flags_and_json_values():
    arguments = {"model": "m", "max_num_seqs": 8, "enforce_eager": True, "enable_prefix_caching": False}
    flags = command_line(arguments | {"speculative_config": {"method": "eagle3", "model": "a b"}})
    assert flags[:6] == ["--model", "m", "--max-num-seqs", "8", "--enforce-eager", "--no-enable-prefix-caching"]
    assert flags[6] == "--speculative-config"
    assert json.loads(flags[7]) == {"method": "eagle3", "model": "a b"}


def test_media_are_disabled_by_default():
    arguments = engine_args(EngineSpec(model="m"), CPU)
    assert arguments["language_model_only"] is True
    assert not {"limit_mm_per_prompt", "allowed_media_domains", "allowed_local_media_path"} & arguments.keys()


@pytest.mark.parametrize(("domains", "expected"), [((), ["none.invalid"]), (("a.example",), ["a.example"])])
def test_media_domains_must_be_allowed(domains, expected):
    """vLLM allows any domain if the list is empty, so the list has a domain that does not exist."""
    spec = EngineSpec(model="m", limit_mm_per_prompt={"image": 2}, allowed_media_domains=domains)
    arguments = engine_args(spec, CPU)
    assert arguments["limit_mm_per_prompt"] == {"image": 2, "audio": 0, "video": 0}
    assert arguments["allowed_media_domains"] == expected
    assert "language_model_only" not in arguments
    assert EngineSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(("media", "limits"), [({}, [0, 0, 0]), ({"image": 2}, [2, 0, 0])])
def test_vllm_accepts_media_limits(tmp_path, media, limits):
    """Build vLLM's configuration of a tiny vision model."""
    from vllm import AsyncEngineArgs

    write_vision_model(tmp_path)
    spec = EngineSpec(model=str(tmp_path), limit_mm_per_prompt=media, load_format="dummy", max_model_len=64)
    config = AsyncEngineArgs(**engine_args(spec, CPU), skip_tokenizer_init=True).create_model_config()
    assert config.multimodal_config is not None
    assert [config.multimodal_config.get_limit_per_prompt(name) for name in ("image", "audio", "video")] == limits
    assert config.allowed_media_domains == (["none.invalid"] if media else None)
    assert not config.allowed_local_media_path


@pytest.mark.parametrize("domains", [(), ("a.example",)])
@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "http://127.0.0.1:9/x", "file:///etc/passwd"])
def test_vllms_loader_fetches_only_from_allowed_domains(monkeypatch, domains, url):
    from vllm.connections import HTTPConnection
    from vllm.multimodal.media import MediaConnector

    def fail(*_, **__):
        raise AssertionError("the media was fetched")

    monkeypatch.setattr(HTTPConnection, "get_bytes", fail)
    spec = EngineSpec(model="m", limit_mm_per_prompt={"image": 1}, allowed_media_domains=domains)
    connector = MediaConnector(allowed_media_domains=engine_args(spec, CPU)["allowed_media_domains"])
    with pytest.raises((ValueError, RuntimeError), match=r"allowed|local"):
        connector.fetch_image(url)


def write_vision_model(folder):
    """Write the configuration of a minimal PaliGemma."""
    size = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "torch_dtype": "float32",
        "projection_dim": 16,
        "text_config": {**size, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64},
        "vision_config": {**size, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
    }
    (folder / "config.json").write_text(json.dumps(config))
