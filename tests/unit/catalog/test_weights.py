from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from peagle.catalog.fit import HeadFacts
from peagle.catalog.weights import check_weights, read_shapes
from peagle.errors import DrafterError

SHAPES: dict[str, tuple[int, ...]] = {
    "layers.0.self_attn.q_proj.weight": (8, 16),
    "layers.1.mlp.up_proj.weight": (16, 8),
    "fc.weight": (8, 24),
    "mask_hidden": (1, 1, 24),
    "lm_head.weight": (32, 8),
    "d2t": (32,),
    "norm.weight": (8,),
}


def facts(**changes: Any) -> HeadFacts:
    values: dict[str, Any] = {
        "method": "peagle",
        "target_hidden_size": 8,
        "vocab_size": 64,
        "draft_vocab_size": 32,
        "num_layers": 2,
        "aux_layer_ids": (1, 2, 3),
        "mask_token_id": 0,
        "num_speculative_tokens": None,
        "unmapped": (),
    }
    return HeadFacts(**(values | changes))


def without(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in SHAPES.items() if name not in names}


def test_shapes_are_read_over_all_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(4, dtype=torch.float8_e4m3fn)}, tmp_path / "model-2.safetensors")
    assert read_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize(
    "content", [b"", b"\x02\x00\x00\x00\x00\x00\x00\x00[]", b"PK\x03\x04 a zip archive of pickles"]
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DrafterError, match=r"holds no \*\.safetensors"):
        read_shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DrafterError, match="not a readable safetensors file"):
        read_shapes(tmp_path)


def test_whole_heads_pass() -> None:
    check_weights(SHAPES, facts())
    check_weights(without("mask_hidden"), facts(method="eagle3", mask_token_id=None))
    check_weights(without("lm_head.weight", "d2t"), facts(draft_vocab_size=64))  # shares the target's lm_head
    midlayer = without("layers.1.mlp.up_proj.weight") | {"midlayer.mlp.up_proj.weight": (16, 8)}
    check_weights(midlayer, facts(num_layers=1))


@pytest.mark.parametrize(
    ("shapes", "changes", "reason"),
    [
        (SHAPES, {"num_layers": 4}, r"says 4 layers, the weights hold \[0, 1\]"),
        (without("mask_hidden"), {}, "no mask_hidden"),
        (SHAPES | {"mask_hidden": (8,)}, {}, "mask_hidden has 8 values, fc reads 24"),
        (without("fc.weight"), {}, "fc reads nothing"),
        (SHAPES, {"draft_vocab_size": 48}, "32 rows for a draft vocabulary of 48"),
        (without("d2t"), {}, "needs lm_head.weight and d2t"),
        (without("lm_head.weight"), {}, "needs lm_head.weight and d2t"),
    ],
)
def test_weights_that_break_the_promise_are_refused(
    shapes: dict[str, tuple[int, ...]], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DrafterError, match=reason):
        check_weights(shapes, facts(**changes))
