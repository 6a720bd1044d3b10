import pytest
from devices import cpu, gpu

from peagle.engine.arguments import engine_args
from peagle.engine.attention import AVOIDED, check_backends
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import ConfigError


def engine_spec(kv_cache="fp8", k=0, *, extra=None, method="peagle", **draft):
    drafter = DrafterSpec(method=method, model="head", num_speculative_tokens=k, **draft) if k else None
    return EngineSpec(model="org/m", precision="bf16", kv_cache_precision=kv_cache, drafter=drafter, extra=extra or {})


@pytest.mark.parametrize(
    ("hardware", "spec", "target", "draft"),
    [
        (gpu(12, 0), engine_spec(), "TRITON_ATTN", None),
        (gpu(12, 0), engine_spec(k=7), "TRITON_ATTN", "TRITON_ATTN"),
        (gpu(12, 0), engine_spec("bf16", k=7), None, None),
        (gpu(8, 9), engine_spec(), None, None),  # the bug is reported only for speculation
        (gpu(8, 9), engine_spec(k=1), "TRITON_ATTN", "TRITON_ATTN"),
        (gpu(9, 0), engine_spec(k=7), None, None),  # vLLM uses FlashAttention 3
        (gpu(10, 0), engine_spec(k=7), None, None),
        (gpu(12, 0), engine_spec(k=7, kv_cache_precision="bf16"), "TRITON_ATTN", None),
        (gpu(12, 0), engine_spec("bf16", k=7, kv_cache_precision="fp8"), None, "TRITON_ATTN"),
        (gpu(12, 0), engine_spec(k=7, attention_backend="FLEX_ATTENTION"), "TRITON_ATTN", "FLEX_ATTENTION"),
        (gpu(12, 0), engine_spec(extra={"attention_backend": "FLEX_ATTENTION"}), "FLEX_ATTENTION", None),
        (gpu(12, 0), engine_spec(extra={"attention_config": {"backend": "FLEX_ATTENTION"}}), None, None),
        (gpu(12, 0), engine_spec(extra={"attention_config": {"use_trtllm_attention": False}}), "TRITON_ATTN", None),
    ],
)
def test_broken_back_end_is_avoided(hardware, spec, target, draft):
    arguments = engine_args(spec, hardware)
    assert arguments.get("attention_backend") == target
    assert arguments.get("speculative_config", {}).get("attention_backend") == draft


@pytest.mark.parametrize(
    ("hardware", "spec", "issue"),
    [
        (gpu(12, 0), engine_spec(extra={"attention_backend": "FLASHINFER"}), "41651"),
        (gpu(12, 0), engine_spec(extra={"attention_config": {"backend": "FLASHINFER"}}), "49010"),
        (gpu(9, 0), engine_spec(k=3, extra={"attention_backend": "flashinfer"}), "33364"),
        (gpu(9, 0), engine_spec(k=3, attention_backend="FLASHINFER"), "33364"),
        (gpu(8, 9), engine_spec(k=1, attention_backend="FLASHINFER"), "44879"),
    ],
)
def test_explicit_broken_back_end_is_refused(hardware, spec, issue):
    with pytest.raises(ConfigError, match=issue) as caught:
        engine_args(spec, hardware)
    assert "--kv-cache-precision bf16" in caught.value.hint


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_block_heads_avoid_flash_attention_on_newer_consumer_gpus(method):
    for hardware, expected in [(gpu(12, 1), "TRITON_ATTN"), (gpu(9, 0), None), (gpu(10, 0), None)]:
        speculation = engine_args(engine_spec("bf16", 7, method=method), hardware)["speculative_config"]
        assert speculation.get("attention_backend") == expected
    spec = engine_spec("bf16", 7, method=method, attention_backend="FLEX_ATTENTION")
    assert engine_args(spec, gpu(12, 1))["speculative_config"]["attention_backend"] == "FLEX_ATTENTION"


def test_drafters_that_vllm_cannot_run_are_refused():
    check_backends(engine_spec("bf16", 7, method="dflash"), cpu(), head_dim=64)
    check_backends(engine_spec("bf16", 7, method="dspark"), gpu(9, 0), head_dim=64)
    with pytest.raises(ConfigError, match="model runner V2, which runs on GPUs only"):
        check_backends(engine_spec("bf16", 7, method="dspark"), cpu(), head_dim=64)
    with pytest.raises(ConfigError, match="KV cache of a dflash head cannot be fp8"):
        check_backends(engine_spec("bf16", 7, method="dflash", kv_cache_precision="fp8"), gpu(9, 0), head_dim=64)


def test_back_end_without_bug_reports_is_accepted():
    cases = [(gpu(9, 0), engine_spec(k=2)), (gpu(12, 0), engine_spec("bf16")), (gpu(10, 0), engine_spec(k=7))]
    for hardware, spec in cases:
        with_backend = EngineSpec.from_dict(spec.to_dict() | {"extra": {"attention_backend": "FLASHINFER"}})
        assert engine_args(with_backend, hardware)["attention_backend"] == "FLASHINFER"


def test_every_broken_combination_has_a_source():
    assert all(row.source.startswith("vllm-project/vllm issue") and row.symptom for row in AVOIDED)


def test_decode_context_parallelism_is_refused_with_a_drafter():
    parallel = {"decode_context_parallel_size": 2}
    with pytest.raises(ConfigError, match="45425"):
        check_backends(engine_spec("bf16", k=3, extra=parallel), gpu(9, 0), head_dim=128)
    check_backends(engine_spec("bf16", extra=parallel), gpu(9, 0), head_dim=128)
    check_backends(engine_spec("bf16", k=3, extra={"decode_context_parallel_size": 1}), gpu(9, 0), head_dim=128)


def test_wide_heads_without_alternative_are_refused():
    with pytest.raises(ConfigError, match="33364") as caught:
        check_backends(engine_spec(k=3), gpu(9, 0), head_dim=256)
    assert "--draft-attention-backend TRITON_ATTN" in caught.value.hint
    check_backends(engine_spec(k=3), gpu(9, 0), head_dim=128)
    check_backends(engine_spec(k=3, attention_backend="TRITON_ATTN"), gpu(9, 0), head_dim=256)
    check_backends(engine_spec("bf16", k=3), gpu(9, 0), head_dim=256)
    check_backends(engine_spec(), gpu(9, 0), head_dim=256)
