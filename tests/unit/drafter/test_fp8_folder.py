import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_heads import load_head

from peagle.drafter.fp8_folder import dequantize_head, quantize_head
from peagle.drafter.head import HeadSpec, build_head, save_head
from peagle.errors import CapacityError, ConfigError, DrafterError
from peagle.fp8 import FP8


@pytest.fixture
def head(tmp_path, target, spec, vocabulary):
    """A P-EAGLE head as `peagle train` writes it."""
    folder = tmp_path / "head"
    shape = HeadSpec(aux_layers=spec.aux_layers, num_depths=3, num_layers=2)
    save_head(build_head(target, shape, vocabulary), folder, verifier="org/target", num_speculative_tokens=5)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A head\n\nFigures.\n")
    return folder


@pytest.fixture
def eagle3(tmp_path):
    """An EAGLE-3 head in the hub's layout, with its own embedding and weights in two files."""
    folder = tmp_path / "eagle3"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 16,
        "num_attention_heads": 4, "vocab_size": 64, "draft_vocab_size": 32, "num_hidden_layers": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = {
        "midlayer.self_attn.q_proj.weight": (16, 32),
        "midlayer.mlp.up_proj.weight": (32, 16),
        "fc.weight": (16, 48),
    }
    save_file({n: torch.randn(s, dtype=torch.float16) for n, s in shapes.items()}, folder / "model-1.safetensors")
    others = {"embed_tokens.weight": torch.randn(64, 16), "d2t": torch.arange(32), "t2d": torch.zeros(64).bool()}
    save_file(others, folder / "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def test_fp8_round_trip_error_is_bounded(tmp_path, head, target):
    quantize_head(head, tmp_path / "fp8")
    dequantize_head(tmp_path / "fp8", tmp_path / "back")
    before, fp8 = load_file(head / "model.safetensors"), load_file(tmp_path / "fp8" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == before.keys()
    quantised = {name for name, tensor in fp8.items() if tensor.dtype == FP8}
    assert {"fc.weight", "lm_head.weight", "layers.1.mlp.down_proj.weight"} <= quantised
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        if name not in quantised:
            assert torch.equal(after[name], tensor)
            continue
        error = (after[name].float() - tensor.float()).abs()
        is_normal = tensor.float().abs() >= 2**-6 * fp8[f"{name}_scale"]  # 2**-6 is E4M3's smallest normal number
        bound = 2**-4 + 2**-8  # rounding to E4M3, and to bf16 on the way back
        assert (error <= bound * tensor.float().abs())[is_normal].all()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((head / "config.json").read_text())
    load_head(tmp_path / "back", target)


def test_kept_modules_are_unchanged(tmp_path, head):
    result = quantize_head(head, tmp_path / "fp8", keep=["lm_head"])
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], load_file(head / "model.safetensors")["lm_head.weight"])
    assert "lm_head.weight_scale" not in tensors
    assert result.kept["lm_head.weight"] == "--keep"
    with pytest.raises(ConfigError, match="--keep q_proj: unknown module"):
        quantize_head(head, tmp_path / "other", keep=["q_proj"])


def test_eagle3_head_in_hub_layout_is_quantised(tmp_path, eagle3):
    result = quantize_head(eagle3, tmp_path / "fp8")
    assert [e.name for e in result.errors] == [
        "fc.weight", "midlayer.mlp.up_proj.weight", "midlayer.self_attn.q_proj.weight",
    ]  # fmt: skip
    assert "embedding" in result.kept["embed_tokens.weight"]
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == [r"re:(.*\.)?embed_tokens$", r"re:(.*\.)?lm_head$"]
    assert sorted(f.name for f in (tmp_path / "fp8").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert set(load_file(tmp_path / "fp8" / "model.safetensors")) >= {"d2t", "t2d", "embed_tokens.weight"}


@pytest.mark.parametrize("layout", ["head", "eagle3"])
def test_vllm_reads_the_quantisation_config(tmp_path, layout, request):
    from vllm.transformers_utils.config import get_config

    quantize_head(request.getfixturevalue(layout), tmp_path / "fp8")
    config = get_config(tmp_path / "fp8", trust_remote_code=False)
    written = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert config.quantization_config == written


def test_a_quantised_head_is_not_quantised_again(tmp_path, head):
    quantize_head(head, tmp_path / "fp8")
    with pytest.raises(DrafterError, match=r"already quantised \(compressed-tensors\)") as caught:
        quantize_head(tmp_path / "fp8", tmp_path / "again")
    assert "--dequantize" in caught.value.hint


def test_only_an_fp8_head_is_dequantised(tmp_path, head):
    with pytest.raises(DrafterError, match="not an FP8 head"):
        dequantize_head(head, tmp_path / "back")
    quantize_head(head, tmp_path / "fp8")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    del tensors["fc.weight_scale"]
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(DrafterError, match=r"fc\.weight has no scale"):
        dequantize_head(tmp_path / "fp8", tmp_path / "back")


def test_an_existing_output_is_refused(tmp_path, head):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        quantize_head(head, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_full_disk_leaves_no_output(tmp_path, head, full_disk):
    with full_disk(), pytest.raises(CapacityError, match=r"fp8: cannot be written: .*\n  free some space"):
        quantize_head(head, tmp_path / "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_invalid_heads_are_refused(tmp_path, head, target):
    (head / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00broken!!")
    with pytest.raises(DrafterError, match="weights cannot be read"):
        quantize_head(head, tmp_path / "out")
    (head / "model.safetensors").unlink()
    with pytest.raises(DrafterError, match=r"no \*\.safetensors"):
        quantize_head(head, tmp_path / "out")
    with pytest.raises(DrafterError, match="not a drafter head"):
        quantize_head(target, tmp_path / "out")
    with pytest.raises(DrafterError, match="cannot be read"):
        quantize_head(tmp_path / "nothing", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]


def test_head_types_that_vllm_cannot_load_in_fp8_are_refused(tmp_path, eagle3):
    config = json.loads((eagle3 / "config.json").read_text())
    (eagle3 / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    with pytest.raises(DrafterError, match="type 'deepseek_v3'"):
        quantize_head(eagle3, tmp_path / "fp8")


def test_block_heads_are_not_quantised(tmp_path, eagle3):
    config = json.loads((eagle3 / "config.json").read_text())
    block = {"architectures": ["DFlashDraftModel"], "block_size": 8}
    (eagle3 / "config.json").write_text(json.dumps(config | block))
    with pytest.raises(DrafterError, match="is a dflash head; only P-EAGLE and EAGLE-3 heads are quantised"):
        quantize_head(eagle3, tmp_path / "fp8")
