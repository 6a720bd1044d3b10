from typing import Any

import pytest

from peagle.catalog.head_files import HeadFacts, check_fit, check_weights, read_head, read_shapes
from peagle.errors import DrafterError

TARGET = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


def library_head(**changes):
    """A P-EAGLE head as the speculators library saves it."""
    head: dict[str, Any] = {
        "speculators_model_type": "peagle",
        "transformer_layer_config": {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 1},
        "draft_vocab_size": 8192,
        "eagle_aux_hidden_state_layer_ids": [2, 15, 29],
        "mask_token_id": 0,
        "target_hidden_size": None,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]},
    }
    return head | changes


def hub_head(**changes):
    """A P-EAGLE head in the hub's layout: a plain Llama configuration."""
    head: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 576,
        "vocab_size": 49152,
        "num_hidden_layers": 4,
        "draft_vocab_size": 32000,
        "ptd_token_id": 49151,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 28]},
    }
    return head | changes


def test_heads_in_both_layouts_are_read():
    head = check_fit(library_head(), TARGET)
    assert (head.method, head.aux_layer_ids, head.num_speculative_tokens) == ("peagle", (2, 15, 29), 5)
    assert (head.num_layers, head.draft_vocab_size, head.default_k) == (1, 8192, 5)
    assert check_fit(library_head(), {"text_config": TARGET}) == head
    head = check_fit(hub_head(), TARGET)
    assert (head.method, head.aux_layer_ids, head.num_speculative_tokens) == ("peagle", (1, 14, 28), None)
    assert (head.num_layers, head.draft_vocab_size, head.mask_token_id) == (4, 32000, 49151)


def block_head(kind="dflash", **changes):
    """A DFlash or DSpark head as the speculators library saves it."""
    kinds = {"dflash": {"sample_from_anchor": False}, "dspark": {"sample_from_anchor": True, "markov_rank": 256}}
    aux_layers = {"eagle_aux_hidden_state_layer_ids": None, "aux_hidden_state_layer_ids": [2, 15, 29]}
    shape = {"speculators_model_type": kind, "block_size": 8, "speculators_config": None}
    return library_head() | aux_layers | shape | kinds[kind] | changes


def hub_block_head(**changes):
    """A DFlash head as z-lab publishes it."""
    head: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 576,
        "vocab_size": 49152,
        "num_hidden_layers": 5,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 49151, "target_layer_ids": [1, 14, 28]},
    }
    return head | changes


def test_block_heads_are_read():
    head = check_fit(block_head(), TARGET)
    assert (head.method, head.aux_layer_ids, head.mask_token_id) == ("dflash", (2, 15, 29), 0)
    assert (head.max_k, head.default_k) == (7, 7)
    head = check_fit(hub_block_head(), TARGET)
    # The file names the layers whose outputs are read; `aux_layer_ids` names those whose inputs are read.
    assert (head.method, head.aux_layer_ids, head.mask_token_id) == ("dflash", (2, 15, 29), 49151)
    assert (head.num_layers, head.max_k, head.default_k) == (5, 15, 15)
    head = check_fit(block_head("dspark"), TARGET)
    assert (head.method, head.max_k) == ("dspark", 8)
    assert read_head(hub_block_head(architectures=["Qwen3DSparkModel"])).method == "dspark"
    assert not head.mixes_attention
    layer_types = ["sliding_attention", "full_attention"]
    assert read_head(hub_block_head(layer_types=layer_types)).mixes_attention
    assert not read_head(hub_block_head(layer_types=["full_attention"] * 5)).mixes_attention


def test_a_head_without_a_mask_token_is_eagle3():
    assert read_head(hub_head(ptd_token_id=None)).method == "eagle3"
    assert read_head(library_head(speculators_model_type="eagle3", mask_token_id=None)).method == "eagle3"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"hidden_size": 2048}, "hidden size is 576, but the target's is 2,048"),
        ({"vocab_size": 32000}, "vocabulary is 49,152, but the target's is 32,000"),
        ({"num_hidden_layers": 16}, r"layers \[29\], but the target has 16 layers"),
    ],
)
@pytest.mark.parametrize("make_head", [library_head, hub_head])
def test_a_head_of_another_model_is_refused(make_head, target, reason):
    reason = reason.replace("29", str(28 if make_head is hub_head else 29))
    with pytest.raises(DrafterError, match=reason) as caught:
        check_fit(make_head(), TARGET | target)
    assert "peagle models" in caught.value.hint


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (library_head(mask_token_id=None), "no mask token"),
        (library_head(mask_token_id=50000), "mask token 50000 is outside"),
        (library_head(fc_norm=True, norm_output=True), "fc_norm and norm_output"),
        (library_head(speculators_model_type="dflash2"), "'dflash2' are not supported"),
        (hub_block_head(architectures=["DFlash2DraftModel"]), "DFlash2"),
        (block_head(block_size=None), "block_size of 2 or more"),
        (block_head(mask_token_id=None), "no mask token"),
        (block_head(aux_hidden_state_layer_ids=[2, 31]), r"layers \[31\], but the target has 30"),
        (block_head("dspark", markov_rank=0), "Markov head"),
        (library_head(transformer_layer_config={"hidden_size": 576}), "lacks hidden_size or vocab_size"),
        ({"architectures": ["LlamaForCausalLM"], **TARGET}, "not a drafter head"),
    ],
)
def test_unusable_heads_are_refused(head, reason):
    with pytest.raises(DrafterError, match=reason):
        check_fit(head, TARGET)


SHAPES: dict[str, tuple[int, ...]] = {
    "layers.0.self_attn.q_proj.weight": (8, 16),
    "layers.1.mlp.up_proj.weight": (16, 8),
    "fc.weight": (8, 24),
    "mask_hidden": (1, 1, 24),
    "lm_head.weight": (32, 8),
    "d2t": (32,),
    "norm.weight": (8,),
}


def facts(**changes):
    values: dict[str, Any] = {
        "method": "peagle",
        "target_hidden_size": 8,
        "vocab_size": 64,
        "draft_vocab_size": 32,
        "num_layers": 2,
        "aux_layer_ids": (1, 2, 3),
        "mask_token_id": 0,
        "num_speculative_tokens": None,
        "max_k": None,
        "mixes_attention": False,
        "not_loaded": (),
    }
    return HeadFacts(**(values | changes))


def shapes_without(*names):
    return {name: shape for name, shape in SHAPES.items() if name not in names}


@pytest.mark.parametrize(
    "content", [b"", b"\x02\x00\x00\x00\x00\x00\x00\x00[]", b"PK\x03\x04 a zip archive of pickles"]
)
def test_files_that_are_not_safetensors_are_refused(tmp_path, content):
    with pytest.raises(DrafterError, match=r"has no \*\.safetensors"):
        read_shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DrafterError, match="not a readable safetensors file"):
        read_shapes(tmp_path)


def test_complete_heads_are_accepted():
    check_weights(SHAPES, facts())
    check_weights(shapes_without("mask_hidden"), facts(method="eagle3", mask_token_id=None))
    check_weights(shapes_without("lm_head.weight", "d2t"), facts(draft_vocab_size=64))  # shares the target's lm_head
    check_weights(shapes_without("mask_hidden"), facts(method="dflash", max_k=7))
    midlayer = shapes_without("layers.1.mlp.up_proj.weight") | {"midlayer.mlp.up_proj.weight": (16, 8)}
    check_weights(midlayer, facts(num_layers=1))


@pytest.mark.parametrize(
    ("shapes", "changes", "reason"),
    [
        (SHAPES, {"num_layers": 4}, r"has 4 layers, but the weights have layers \[0, 1\]"),
        (shapes_without("mask_hidden"), {}, "no mask_hidden"),
        (SHAPES | {"mask_hidden": (8,)}, {}, "mask_hidden has 8 values, but fc reads 24"),
        (shapes_without("fc.weight"), {}, "fc reads nothing"),
        (SHAPES, {"draft_vocab_size": 48}, "32 rows for a draft vocabulary of 48"),
        (shapes_without("d2t"), {}, "requires lm_head.weight and d2t"),
        (shapes_without("lm_head.weight"), {}, "requires lm_head.weight and d2t"),
        (SHAPES, {"method": "dflash", "max_k": 7, "aux_layer_ids": (1, 2)}, "16 values of 2 layers, but fc reads 24"),
        (SHAPES, {"method": "dspark", "max_k": 8}, "Markov head are missing"),
    ],
)
def test_weights_must_match_the_config(shapes, changes, reason):
    with pytest.raises(DrafterError, match=reason):
        check_weights(shapes, facts(**changes))
