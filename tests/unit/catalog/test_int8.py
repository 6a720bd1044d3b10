import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.catalog.int8 import ensure_int8, require_convertible
from peagle.errors import CatalogError, PeagleError, PrecisionError
from peagle.hardware import Hardware


def cpu(*flags):
    return Hardware(platform="cpu", memory_gib=24, free_memory_gib=20, num_cpus=2, cpu_flags=frozenset(flags))


VNNI, AMX = cpu("avx512_vnni"), cpu("avx512_vnni", "amx_tile")


def make_model(folder, *names, shape=(2, 2)):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if names:
        save_file({name: torch.ones(shape) for name in names}, folder / "model.safetensors")
    return str(folder)


def test_a_target_is_converted_once_and_says_so(target, peagle_home):
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


def test_other_weights_have_another_folder(tmp_path, peagle_home):
    name = "model.layers.0.mlp.up_proj.weight"
    first = ensure_int8(make_model(tmp_path / "m", name))
    save_file({name: torch.zeros(2, 2)}, tmp_path / "m" / "model.safetensors")
    assert ensure_int8(str(tmp_path / "m")) != first


def test_a_conversion_that_fails_names_the_weight_and_leaves_nothing(tmp_path, peagle_home):
    name = "model.layers.0.mlp.up_proj.weight"
    folder = make_model(tmp_path / "m", name)
    save_file({name: torch.full((2, 2), float("nan"))}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(PeagleError, match=rf"{name} has values that are not finite"):
        ensure_int8(folder)
    assert [path.name for path in (peagle_home / "targets").iterdir()] == [".m-int8.lock"]


def test_a_hub_model_is_taken_from_the_client_s_cache(target, peagle_home, monkeypatch):
    asked = []

    def download(model_id, **options):
        asked.append((model_id, options["revision"]))
        return str(target)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = ensure_int8("org/model", "v1")
    assert asked == [("org/model", "v1")]
    assert folder.name.startswith("model-int8-")


def test_a_hub_that_cannot_be_reached_is_named(peagle_home, monkeypatch):
    def fail(model_id, **options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CatalogError, match="the weights of org/model cannot be downloaded"):
        ensure_int8("org/model")


def test_a_target_with_linear_layers_passes(target):
    require_convertible(str(target), {}, VNNI)
    require_convertible("org/not-on-this-disk", {}, VNNI)


@pytest.mark.parametrize(
    ("names", "shape", "reason"),
    [
        ((), (2, 2), r"no \*\.safetensors to convert to int8"),
        (("transformer.h.0.attn.c_attn.weight",), (2, 2), "no linear layers to convert to int8"),
        (("model.layers.0.mlp.experts.gate_up_proj",), (2, 2, 2), r"in one tensor \(model\.layers\.0\.mlp\.experts"),
    ],
)
def test_a_target_without_any_is_refused(tmp_path, names, shape, reason):
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
def test_weights_that_cannot_be_read_are_named(tmp_path, content):
    folder = make_model(tmp_path / "m", "x")
    (tmp_path / "m" / "model.safetensors").write_bytes(content)
    with pytest.raises(CatalogError, match="its weights cannot be read"):
        require_convertible(folder, {}, VNNI)
