"""FP8 weights stay within the format's error bounds, and vLLM reads the configuration of FP8 heads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from peagle.errors import DrafterError
from peagle.fp8 import FP8, dequantize, quantization_config, quantize, reason_to_keep, weight_error

MAX_ROUNDING_ERROR = 2**-4  # relative: half of the distance between E4M3 values, 2^-3 with 3 mantissa bits


def test_rows_are_quantized_with_their_own_scales() -> None:
    stored, scale = quantize("w", torch.tensor([[0.5, -2.0], [0.0, 0.0]]))
    assert stored.float().tolist() == [[112.0, -448.0], [0.0, 0.0]]
    assert scale.flatten().tolist() == [pytest.approx(2 / 448), 1.0]
    torch.testing.assert_close(dequantize(stored, scale), torch.tensor([[0.5, -2.0], [0.0, 0.0]]))


@pytest.mark.parametrize("make", [torch.randn, torch.rand, lambda *size: torch.randn(*size) ** 5])
def test_rounding_error_is_bounded(make: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    weight = make(64, 256).to(torch.bfloat16)
    stored, scale = quantize("w", weight)
    assert (stored.dtype, scale.dtype, tuple(scale.shape)) == (FP8, torch.float32, (64, 1))
    original, difference = weight.float(), (dequantize(stored, scale) - weight.float()).abs()
    is_normal = original.abs() >= 2**-6 * scale
    assert (difference <= MAX_ROUNDING_ERROR * original.abs() * (1 + 1e-6))[is_normal].all()
    assert (difference <= 2**-10 * scale * (1 + 1e-6))[
        ~is_normal
    ].all()  # half the distance between subnormal values, which is 2^-9 of the scale


def test_error_is_independent_of_magnitude() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 64) * torch.tensor([[1e-10], [1.0], [1e10]])
    stored, scale = quantize("w", weight)
    rows = [weight_error("w", weight[i : i + 1], dequantize(stored, scale)[i : i + 1], scale[i]) for i in range(3)]
    assert all(0.01 < row.rms_relative < MAX_ROUNDING_ERROR for row in rows)


def test_weight_error_ignores_subnormal_values() -> None:
    original, stored = torch.tensor([[1.0, 2.0, 1e-9]]), torch.tensor([[1.1, 2.0, 0.0]])
    error = weight_error("w", original, stored, torch.tensor([[2 / 448]]))
    assert error.max_relative == pytest.approx(0.1)
    assert error.mean_relative == pytest.approx(0.05)  # the third value is subnormal in FP8
    assert error.rms_relative == pytest.approx(0.1 / 5**0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(bad: float) -> None:
    with pytest.raises(DrafterError, match=r"fc\.weight has values that are not finite"):
        quantize("fc.weight", torch.tensor([[1.0, bad]]))


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("layers.0.self_attn.q_proj.weight", (4, 4), None),
        ("layers.3.mlp.down_proj.weight", (4, 4), None),
        ("midlayer.mlp.gate_proj.weight", (4, 4), None),
        ("fc.weight", (4, 12), None),
        ("lm_head.weight", (8, 4), None),
        ("embed_tokens.weight", (8, 4), "embedding"),
        ("mask_hidden", (1, 1, 12), "not a matrix"),
        ("layers.0.self_attn.q_proj.bias", (4,), "not a matrix"),
        ("norm.weight", (4,), "not a matrix"),
        ("adapter.weight", (4, 4), "no quantised layer of that name"),
    ],
)
def test_reason_to_keep_depends_on_name_and_shape(name: str, shape: tuple[int, ...], reason: str | None) -> None:
    result = reason_to_keep(name, torch.zeros(shape), keep=())
    assert result is None if reason is None else reason in str(result)


HEAD = {
    "layers.0.self_attn.q_proj.weight": torch.zeros(4, 4),
    "fc.weight": torch.zeros(4, 12),
    "lm_head.weight": torch.zeros(8, 4),
    "norm.weight": torch.zeros(4),
    "mask_hidden": torch.zeros(1, 1, 12),
}


def kept_layers(tensors: dict[str, torch.Tensor], *keep: str) -> dict[str, str]:
    return {name: reason for name, tensor in tensors.items() if (reason := reason_to_keep(name, tensor, keep))}


def loads_in_fp8(config: dict[str, Any]) -> dict[str, bool]:
    """Return, for each layer of the drafter, whether vLLM loads it in FP8. Layer 30 follows the 30 target layers."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    reader = CompressedTensorsConfig.from_config(config)
    layers = {
        "model.layers.30.self_attn.qkv_proj": "QKVParallelLinear",
        "model.layers.30.self_attn.o_proj": "RowParallelLinear",
        "model.layers.30.mlp.gate_up_proj": "MergedColumnParallelLinear",
        "model.layers.30.mlp.down_proj": "RowParallelLinear",
        "model.fc": "ReplicatedLinear",
        "lm_head": "ParallelLMHead",
        "model.embed_tokens": "VocabParallelEmbedding",
    }
    is_fp8 = {}
    for name, kind in layers.items():
        scheme = reader.get_scheme_dict(type(kind, (torch.nn.Module,), {})(), name)
        if scheme is not None:
            assert reader._is_fp8_w8a8(scheme["weights"], scheme["input_activations"])
            assert (scheme["weights"].strategy, scheme["input_activations"].strategy) == ("channel", "token")
            assert scheme["format"] == "float-quantized"
        is_fp8[name.rpartition(".")[2]] = scheme is not None
    return is_fp8


PROJECTIONS = {"qkv_proj": True, "o_proj": True, "gate_up_proj": True, "down_proj": True, "embed_tokens": False}


def test_vllm_loads_the_fp8_layers() -> None:
    config = quantization_config(HEAD, kept_layers(HEAD))
    assert loads_in_fp8(config) == PROJECTIONS | {"fc": True, "lm_head": True}


def test_vllm_ignores_kept_layers() -> None:
    config = quantization_config(HEAD, kept_layers(HEAD, "fc", "lm_head"))
    assert loads_in_fp8(config) == PROJECTIONS | {"fc": False, "lm_head": False}


def test_vllm_ignores_shared_lm_head() -> None:
    without_lm_head = {name: tensor for name, tensor in HEAD.items() if name != "lm_head.weight"}
    assert loads_in_fp8(quantization_config(without_lm_head, kept_layers(without_lm_head))) == PROJECTIONS | {
        "fc": True,
        "lm_head": False,
    }
