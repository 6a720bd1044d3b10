import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_heads import load_head

from peagle.drafter.features import FeatureSpec
from peagle.drafter.fp8_folder import dequantize_head, quantize_head
from peagle.drafter.head import HeadSpec, build_head, save_head
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.errors import CapacityError, ConfigError, DrafterError
from peagle.fp8 import FP8


@pytest.fixture
def head(tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary) -> Path:
    """A P-EAGLE head as `peagle train` leaves it."""
    folder = tmp_path / "head"
    shape = HeadSpec(aux_layers=spec.aux_layers, num_depths=3, num_layers=2)
    save_head(build_head(target, shape, vocabulary), folder, verifier="org/target", num_speculative_tokens=5)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A head\n\nFigures.\n")
    return folder


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    """An EAGLE-3 head in the layout of the hub, with an embedding of its own and its weights in two files."""
    folder = tmp_path / "eagle3"
    folder.mkdir()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 16,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "draft_vocab_size": 32,
        "num_hidden_layers": 1,
    }
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


def test_there_and_back_keeps_each_weight_within_the_formats_bound(tmp_path: Path, head: Path, target: Path) -> None:
    quantize_head(head, tmp_path / "fp8")
    dequantize_head(tmp_path / "fp8", tmp_path / "back")
    before, fp8 = load_file(head / "model.safetensors"), load_file(tmp_path / "fp8" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name, tensor in fp8.items() if tensor.dtype == FP8}
    assert {"fc.weight", "lm_head.weight", "layers.1.mlp.down_proj.weight"} <= changed
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        if name not in changed:
            assert torch.equal(after[name], tensor)
            continue
        error = (after[name].float() - tensor.float()).abs()
        is_normal = tensor.float().abs() >= 2**-6 * fp8[f"{name}_scale"]
        bound = 2**-4 + 2**-8  # rounding to E4M3, and to bf16 on the way back
        assert (error <= bound * tensor.float().abs())[is_normal].all()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((head / "config.json").read_text())
    load_head(tmp_path / "back", target)


def test_the_report_says_what_it_cost(tmp_path: Path, head: Path) -> None:
    done = quantize_head(head, tmp_path / "fp8")
    assert done.num_bytes_before == (head / "model.safetensors").stat().st_size
    assert done.num_bytes_after == (tmp_path / "fp8" / "model.safetensors").stat().st_size
    assert len(done.errors) == 2 * 7 + 2
    assert all(0 <= error.mean_relative <= error.max_relative <= 2**-4 for error in done.errors)
    assert "not a matrix" in done.kept["mask_hidden"]


def test_a_matrix_takes_half_the_bytes_and_a_scale_for_each_row(tmp_path: Path, head: Path) -> None:
    def size(folder: Path, *ends: str) -> int:
        return sum(t.nbytes for n, t in load_file(folder / "model.safetensors").items() if n.endswith(ends))

    quantize_head(head, tmp_path / "fp8")
    matrices = ("proj.weight", "fc.weight", "lm_head.weight")
    assert size(tmp_path / "fp8", *matrices) * 2 == size(head, *matrices)
    num_rows = sum(len(t) for n, t in load_file(head / "model.safetensors").items() if n.endswith(matrices))
    assert size(tmp_path / "fp8", "_scale") == 4 * num_rows


def test_what_is_kept_stays_as_it_is(tmp_path: Path, head: Path) -> None:
    done = quantize_head(head, tmp_path / "fp8", keep=["lm_head"])
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], load_file(head / "model.safetensors")["lm_head.weight"])
    assert "lm_head.weight_scale" not in tensors
    assert done.kept["lm_head.weight"] == "asked for"
    with pytest.raises(ConfigError, match="--keep q_proj: unknown module"):
        quantize_head(head, tmp_path / "other", keep=["q_proj"])


def test_the_card_says_what_was_done_under_its_title(tmp_path: Path, head: Path) -> None:
    quantize_head(head, tmp_path / "fp8", keep=["fc"])
    dequantize_head(tmp_path / "fp8", tmp_path / "back")
    lines = (tmp_path / "fp8" / "README.md").read_text().splitlines()
    assert lines[:5] == ["---", "license: mit", "---", "# A head", ""]
    assert "**FP8**: 15 matrices" in lines[5]
    assert "fc not converted" in lines[5]
    assert lines[-1] == "Figures."
    assert "**Converted back to bf16**" in (tmp_path / "back" / "README.md").read_text()


def test_an_eagle3_head_of_the_hub(tmp_path: Path, eagle3: Path) -> None:
    done = quantize_head(eagle3, tmp_path / "fp8")
    assert [e.name for e in done.errors] == [
        "fc.weight", "midlayer.mlp.up_proj.weight", "midlayer.self_attn.q_proj.weight",
    ]  # fmt: skip
    assert "embedding" in done.kept["embed_tokens.weight"]
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == [r"re:(.*\.)?embed_tokens$", r"re:(.*\.)?lm_head$"]
    assert sorted(f.name for f in (tmp_path / "fp8").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert set(load_file(tmp_path / "fp8" / "model.safetensors")) >= {"d2t", "t2d", "embed_tokens.weight"}


@pytest.mark.parametrize("layout", ["head", "eagle3"])
def test_vllm_finds_the_quantisation_of_the_drafter(
    tmp_path: Path, layout: str, request: pytest.FixtureRequest
) -> None:
    from vllm.transformers_utils.config import get_config

    quantize_head(request.getfixturevalue(layout), tmp_path / "fp8")
    config = get_config(tmp_path / "fp8", trust_remote_code=False)
    written = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert config.quantization_config == written


def test_a_quantised_head_is_not_quantised_again(tmp_path: Path, head: Path) -> None:
    quantize_head(head, tmp_path / "fp8")
    with pytest.raises(DrafterError, match=r"already quantised \(compressed-tensors\)") as caught:
        quantize_head(tmp_path / "fp8", tmp_path / "again")
    assert "--dequantize" in caught.value.hint


def test_only_an_fp8_head_is_dequantised(tmp_path: Path, head: Path) -> None:
    with pytest.raises(DrafterError, match="not an FP8 head"):
        dequantize_head(head, tmp_path / "back")
    quantize_head(head, tmp_path / "fp8")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    del tensors["fc.weight_scale"]
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(DrafterError, match=r"fc\.weight has no scale"):
        dequantize_head(tmp_path / "fp8", tmp_path / "back")


def test_an_output_that_exists_is_left_alone(tmp_path: Path, head: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        quantize_head(head, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, head: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    with full_disk(), pytest.raises(CapacityError, match=r"fp8: cannot be written: .*\n  free some space"):
        quantize_head(head, tmp_path / "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_what_is_no_head_is_refused_and_leaves_nothing(tmp_path: Path, head: Path, target: Path) -> None:
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


def test_a_head_that_vllm_has_no_fp8_class_for_is_refused(tmp_path: Path, eagle3: Path) -> None:
    config = json.loads((eagle3 / "config.json").read_text())
    (eagle3 / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    with pytest.raises(DrafterError, match="type 'deepseek_v3'"):
        quantize_head(eagle3, tmp_path / "fp8")
