import json

import pytest
import torch
from devices import cpu
from safetensors.torch import load_file, save_file

from peagle.catalog.int8 import convert, ensure_int8, is_quantizable, quantize, require_convertible, weight_files
from peagle.errors import CatalogError, PeagleError, PrecisionError

VNNI, AMX = cpu("avx512_vnni"), cpu("avx512_vnni", "amx_tile")


def make_model(folder, *names, shape=(2, 2)):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if names:
        save_file({name: torch.ones(shape) for name in names}, folder / "model.safetensors")
    return str(folder)


def test_a_target_is_converted_once(target, peagle_home):
    messages: list[str] = []
    folders = [ensure_int8(str(target), announce=messages.append) for _ in range(2)]
    assert len(messages) == 1
    assert str(target) in messages[0]
    assert folders[0] == folders[1]
    assert folders[0].parent == peagle_home / "targets"
    assert folders[0].name.startswith(f"{target.name}-int8-")
    manifest = json.loads((folders[0] / "peagle-manifest.json").read_text())
    assert manifest["source"] == str(target)
    assert "model.safetensors" in manifest["files"]
    weights = load_file(folders[0] / "model.safetensors")
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8


def test_a_failed_conversion_names_the_weight(tmp_path, peagle_home):
    name = "model.layers.0.mlp.up_proj.weight"
    folder = make_model(tmp_path / "m", name)
    save_file({name: torch.full((2, 2), float("nan"))}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(PeagleError, match=rf"{name} has values that are not finite"):
        ensure_int8(folder)
    assert [path.name for path in (peagle_home / "targets").iterdir()] == [".m-int8.lock"]


def test_hub_model_is_fetched_at_its_revision(target, peagle_home, monkeypatch):
    downloads = []

    def download(model_id, **options):
        downloads.append((model_id, options["revision"]))
        return str(target)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = ensure_int8("org/model", "v1")
    assert downloads == [("org/model", "v1")]
    assert folder.name.startswith("model-int8-")


@pytest.mark.parametrize(
    ("names", "shape", "reason"),
    [
        ((), (2, 2), r"no \*\.safetensors to convert to int8"),
        (("transformer.h.0.attn.c_attn.weight",), (2, 2), "no linear layers to convert to int8"),
        (("model.layers.0.mlp.experts.gate_up_proj",), (2, 2, 2), r"in one tensor \(model\.layers\.0\.mlp\.experts"),
    ],
)
def test_a_target_without_convertible_weights_is_refused(tmp_path, names, shape, reason):
    folder = make_model(tmp_path / "m", *names, shape=shape)
    with pytest.raises(PrecisionError, match=reason) as caught:
        require_convertible(folder, {}, VNNI)
    assert folder in caught.value.message
    assert "--precision auto" in caught.value.hint


def test_experts_need_amx_on_a_cpu(target):
    for config in ({"num_experts": 128}, {"text_config": {"num_local_experts": 8}}):
        with pytest.raises(PrecisionError, match="int8 experts only on CPUs with AMX; this is CPU"):
            require_convertible(str(target), config, VNNI)
        require_convertible(str(target), config, AMX)
    require_convertible(str(target), {"num_experts": 0}, VNNI)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{]"])
def test_unreadable_weights_are_an_error(tmp_path, content):
    folder = make_model(tmp_path / "m", "x")
    (tmp_path / "m" / "model.safetensors").write_bytes(content)
    with pytest.raises(CatalogError, match=r"the weights in .* cannot be read"):
        require_convertible(folder, {}, VNNI)


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
def test_linear_layers_are_converted(name):
    assert is_quantizable(name, 2)
    assert not is_quantizable(name, 1)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.gate.weight",  # a router
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.kv_b_proj.weight",  # multi-head latent attention splits it
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight",
        "visual.layers.0.mlp.up_proj.weight",
        "model.audio_tower.layers.0.self_attn.k_proj.weight",
    ],
)
def test_other_tensors_are_not_converted(name):
    assert not is_quantizable(name, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantization_error_is_bounded(dtype):
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    stored, scale = quantize("w", weight)
    assert (stored.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (64, 1))
    assert ((stored * scale - weight.float()).abs() <= scale * 0.5001).all()


def test_compressed_tensors_reads_the_same_values():
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.lifecycle.forward import quantize as reference

    weight = torch.randn(16, 24, generator=torch.Generator().manual_seed(1))
    stored, scale = quantize("w", weight)
    args = QuantizationArgs(num_bits=8, symmetric=True, strategy=QuantizationStrategy.CHANNEL)
    assert torch.equal(reference(weight, scale, None, args, dtype=torch.int8), stored)
    assert torch.allclose(dequantize(stored, scale, None, args), stored * scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value):
    with pytest.raises(ValueError, match=r"model\.x has values that are not finite"):
        quantize("model.x", torch.tensor([[value, 1.0]]))


def test_other_weights_of_a_folder_are_unchanged(target, tmp_path):
    convert(target, tmp_path)
    before, after = load_file(target / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    converted = {name for name, tensor in after.items() if tensor.dtype == torch.int8}
    assert converted == {name for name in before if name.endswith("_proj.weight")}
    assert len(converted) == 4 * 7  # four layers, each with seven linear layers
    assert after.keys() == before.keys() | {f"{name}_scale" for name in converted}
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - converted)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((target / "config.json").read_text())
    assert quantization["quant_method"] == "compressed-tensors"
    assert {"model.embed_tokens", "re:(.*\\.)?lm_head$"} <= set(quantization["ignore"])
    other_files = {path.name for path in target.iterdir()} - {"model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == other_files | {"model.safetensors"}


def test_sharded_models_are_converted_file_by_file(tmp_path):
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
