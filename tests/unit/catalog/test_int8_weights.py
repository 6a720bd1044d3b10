import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.catalog.int8 import convert, is_quantisable, quantize, weight_files

LINEAR = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "name",
    [
        LINEAR,
        "model.layers.11.mlp.gate_up_proj.weight",
        "model.layers.3.mlp.experts.17.down_proj.weight",
        "model.layers.3.block_sparse_moe.experts.1.w2.weight",
        "model.language_model.layers.5.self_attn.o_proj.weight",
        "layers.0.mlp.up_proj.weight",
    ],
)
def test_linear_layers_are_converted(name: str) -> None:
    assert is_quantisable(name, 2)
    assert not is_quantisable(name, 1)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.gate.weight",  # a router
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.kv_b_proj.weight",  # multi-head latent attention takes it apart
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight",
        "visual.layers.0.mlp.up_proj.weight",
        "model.audio_tower.layers.0.self_attn.k_proj.weight",
    ],
)
def test_everything_else_stays(name: str) -> None:
    assert not is_quantisable(name, 2)


def test_the_largest_of_a_row_stands_at_127() -> None:
    stored, scale = quantize("w", torch.tensor([[0.5, -2.0], [0.0, 0.0], [1e-30, 0.0]]))
    assert stored.tolist() == [[32, -127], [0, 0], [127, 0]]
    assert scale.squeeze(1).tolist() == pytest.approx([2 / 127, 1.0, 1e-30 / 127], rel=1e-5, abs=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_weight_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    stored, scale = quantize("w", weight)
    assert (stored.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (64, 1))
    assert ((stored * scale - weight.float()).abs() <= scale * 0.5001).all()


def test_the_library_of_the_format_reads_the_same_values() -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.lifecycle.forward import quantize as reference

    weight = torch.randn(16, 24, generator=torch.Generator().manual_seed(1))
    stored, scale = quantize("w", weight)
    args = QuantizationArgs(num_bits=8, symmetric=True, strategy=QuantizationStrategy.CHANNEL)
    assert torch.equal(reference(weight, scale, None, args, dtype=torch.int8), stored)
    assert torch.allclose(dequantize(stored, scale, None, args), stored * scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match=r"model\.x has values that are not finite"):
        quantize("model.x", torch.tensor([[value, 1.0]]))


def test_weights_of_8_bits_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model\.x is torch\.float8_e4m3fn"):
        quantize("model.x", torch.ones(2, 2).to(torch.float8_e4m3fn))


def test_a_folder_keeps_what_is_no_linear_layer_and_says_so(target: Path, tmp_path: Path) -> None:
    convert(target, tmp_path)
    before, after = load_file(target / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    converted = {name for name, tensor in after.items() if tensor.dtype == torch.int8}
    assert converted == {name for name in before if name.endswith("_proj.weight")}
    assert len(converted) == 4 * 7
    assert after.keys() == before.keys() | {f"{name}_scale" for name in converted}
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - converted)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((target / "config.json").read_text())
    assert quantization["quant_method"] == "compressed-tensors"
    assert {"model.embed_tokens", "re:(.*\\.)?lm_head$"} <= set(quantization["ignore"])
    others = {path.name for path in target.iterdir()} - {"model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == others | {"model.safetensors"}


def test_a_model_in_several_files_is_converted_file_by_file(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (source / "config.json").write_text("{}")
    (source / "peagle-manifest.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"the same weights")
    save_file({LINEAR: torch.ones(2, 2)}, source / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(2)}, source / "b.safetensors")
    save_file({LINEAR: torch.ones(2, 2)}, source / "consolidated.safetensors")
    index = {"weight_map": {LINEAR: "a.safetensors", "model.norm.weight": "b.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(source)] == ["a.safetensors", "b.safetensors"]
    convert(source, out)
    assert {path.name for path in out.iterdir()} == {"a.safetensors", "b.safetensors", "config.json"}
    assert load_file(out / "a.safetensors")[LINEAR].tolist() == [[127, 127], [127, 127]]
