import pytest
from devices import cpu, gpu

from peagle.engine.precision import PRECISIONS, Precision, resolve_precision
from peagle.errors import PrecisionError

HOPPER, AMPERE, TURING = gpu(9, 0), gpu(8, 6), gpu(7, 5)
AVX512, AVX2 = cpu("avx512f", "avx2"), cpu("avx2")
VNNI, AVX_VNNI = cpu("avx512f", "avx2", "avx512_vnni"), cpu("avx2", "avx_vnni")
BF16 = Precision(dtype="bfloat16")
FP8 = Precision(dtype="bfloat16", quantization="fp8", kv_cache_dtype="fp8")
FP8_CACHE = Precision(dtype="bfloat16", kv_cache_dtype="fp8")
FP8_WEIGHTS = Precision(dtype="bfloat16", quantization="fp8")
INT8 = Precision(dtype="bfloat16", quantization="int8")
FLOAT16, FLOAT32 = Precision(dtype="float16"), Precision(dtype="float32")


@pytest.mark.parametrize(
    ("requested", "hardware", "expected"),
    [
        ("auto", HOPPER, FP8_WEIGHTS),
        ("auto", gpu(8, 9), FP8_WEIGHTS),
        ("auto", AMPERE, BF16),
        ("auto", TURING, FLOAT16),
        ("auto", AVX512, BF16),
        ("auto", AVX2, FLOAT32),
        ("auto", cpu(), BF16),
        ("fp8", HOPPER, FP8),
        ("fp8", AVX512, FP8_CACHE),
        ("bf16", HOPPER, BF16),
        ("bf16", AMPERE, BF16),
        ("bf16", AVX2, BF16),
        ("auto", VNNI, BF16),
        ("int8", HOPPER, INT8),
        ("int8", AMPERE, INT8),
        ("int8", TURING, Precision(dtype="float16", quantization="int8")),
        ("int8", VNNI, INT8),
        ("int8", AVX_VNNI, Precision(dtype="float32", quantization="int8")),
        ("float32", HOPPER, FLOAT32),
        ("float32", TURING, FLOAT32),
        ("float32", AVX2, FLOAT32),
        ("float16", TURING, FLOAT16),
        ("float16", AVX2, FLOAT16),
    ],
)
def test_precision_is_resolved_for_the_hardware(requested, hardware, expected):
    precision = resolve_precision(requested, hardware)
    assert precision == expected
    assert resolve_precision(precision.name, hardware, kv_cache=precision.kv_cache_name) == expected


@pytest.mark.parametrize(
    ("capability", "context_tokens", "kv_cache"),
    [
        ((9, 0), 6_999, "bf16"),
        ((9, 0), 7_000, "fp8"),
        ((10, 0), 3_999, "bf16"),
        ((10, 3), 4_000, "fp8"),
        ((8, 9), 1_000_000, "bf16"),
        ((12, 0), 1_000_000, "bf16"),
        ((9, 0), None, "bf16"),
    ],
)
def test_auto_uses_an_fp8_cache_for_long_contexts(capability, context_tokens, kv_cache):
    precision = resolve_precision("auto", gpu(*capability), context_tokens=context_tokens)
    assert (precision.weights, precision.kv_cache) == ("fp8", kv_cache)
    assert resolve_precision("fp8", gpu(*capability), context_tokens=context_tokens).kv_cache == "fp8"
    assert resolve_precision("bf16", gpu(*capability), context_tokens=context_tokens).kv_cache == "bf16"


@pytest.mark.parametrize(
    ("requested", "kv_cache", "hardware", "expected"),
    [
        ("fp8", "auto", HOPPER, "fp8 weights, fp8 KV cache"),
        ("fp8", "bf16", HOPPER, "fp8 weights, bf16 KV cache"),
        ("bf16", "fp8", HOPPER, "bf16 weights, fp8 KV cache"),
        ("bf16", "fp8", AVX512, "bf16 weights, fp8 KV cache"),
        ("auto", "bf16", AVX2, "bf16 weights, bf16 KV cache"),
        ("int8", "auto", AVX_VNNI, "int8 weights, float32 KV cache"),
        ("int8", "fp8", HOPPER, "int8 weights, fp8 KV cache"),
    ],
)
def test_kv_cache_can_be_set_separately(requested, kv_cache, hardware, expected):
    assert resolve_precision(requested, hardware, kv_cache=kv_cache).describe() == expected


@pytest.mark.parametrize(
    ("requested", "kv_cache", "hardware", "reason"),
    [
        ("bf16", "fp8", AMPERE, "does not support a KV cache in fp8"),
        ("float32", "fp8", HOPPER, "int8, not float32"),
        ("bf16", "fp4", HOPPER, "unknown precision 'fp4' of the KV cache"),
    ],
)
def test_unsupported_kv_cache_is_refused(requested, kv_cache, hardware, reason):
    with pytest.raises(PrecisionError, match=reason):
        resolve_precision(requested, hardware, kv_cache=kv_cache)


@pytest.mark.parametrize(
    ("requested", "hardware", "reason", "hint"),
    [
        ("fp8", AMPERE, "compute capability 8.9", "--precision int8, bf16, or auto"),
        ("fp8", TURING, "compute capability 8.9", "--precision int8, float16, or auto"),
        ("fp8", AVX2, "AVX-512", "--precision bf16, or auto"),
        ("int8", gpu(10, 0), "compute capability 7.5 to 9.0", "--precision fp8, bf16, or auto"),
        ("int8", gpu(12, 0), "compute capability 7.5 to 9.0", "--precision fp8, bf16, or auto"),
        ("int8", gpu(7, 0), "compute capability 7.5 to 9.0", "--precision float16, or auto"),
        ("int8", AVX512, "VNNI", "--precision bf16, or auto"),
        ("int8", AVX2, "VNNI", "--precision bf16, or auto"),
        ("int8", cpu(), "VNNI", "--precision bf16, or auto"),
        ("bf16", TURING, "compute capability 8.0", "--precision float16"),
    ],
)
def test_unsupported_precision_has_a_hint(requested, hardware, reason, hint):
    with pytest.raises(PrecisionError) as caught:
        resolve_precision(requested, hardware)
    assert reason in caught.value.message
    assert hardware.describe() in caught.value.message
    assert hint in caught.value.hint


def test_native_checkpoint_has_no_int8_hint():
    with pytest.raises(PrecisionError) as caught:
        resolve_precision("fp8", AMPERE, native_quantization="mxfp4")
    assert caught.value.hint.startswith("use --precision bf16, or auto")


def test_auto_has_no_fp8_cache_for_wide_heads():
    assert resolve_precision("auto", HOPPER, context_tokens=8192, head_dim=256).kv_cache == "bf16"
    assert resolve_precision("auto", HOPPER, context_tokens=8192, head_dim=128).kv_cache == "fp8"


def test_unknown_precision_suggests_the_closest():
    with pytest.raises(PrecisionError, match="bf61") as caught:
        resolve_precision("bf61", HOPPER)
    assert "bf16" in caught.value.hint


@pytest.mark.parametrize("requested", PRECISIONS)
def test_native_weights_are_not_quantised_again(requested):
    if requested in ("float32", "int8"):
        with pytest.raises(PrecisionError, match="mxfp4"):
            resolve_precision(requested, HOPPER, native_quantization="mxfp4")
        return
    precision = resolve_precision(requested, HOPPER, native_quantization="mxfp4")
    assert precision.quantization is None
    assert precision.weights == "mxfp4"


def test_native_checkpoint_has_an_fp8_cache_only_if_requested():
    assert resolve_precision("auto", HOPPER, native_quantization="mxfp4").kv_cache == "bf16"
    assert resolve_precision("fp8", HOPPER, native_quantization="mxfp4").kv_cache == "fp8"
    assert resolve_precision("auto", AVX2, native_quantization="mxfp4").kv_cache == "bf16"


def test_auto_keeps_a_published_fp8_cache():
    def cache(requested, hardware, kv_cache="auto"):
        return resolve_precision(
            requested, hardware, native_quantization="compressed-tensors", native_kv_cache="fp8", kv_cache=kv_cache
        ).kv_cache

    assert cache("auto", HOPPER) == "fp8"
    assert [cache("auto", AMPERE), cache("bf16", HOPPER), cache("auto", HOPPER, "bf16")] == ["bf16"] * 3
