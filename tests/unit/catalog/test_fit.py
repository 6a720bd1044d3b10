from typing import Any

import pytest

from peagle.catalog.fit import check_fit, read_head
from peagle.errors import DrafterError

TARGET = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


def library_head(**changes: Any) -> dict[str, Any]:
    """As the speculators library saves a P-EAGLE head."""
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


def hub_head(**changes: Any) -> dict[str, Any]:
    """As P-EAGLE heads are published on the hub: a plain Llama configuration."""
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


def test_the_library_s_layout_is_read() -> None:
    head = check_fit(library_head(), TARGET)
    assert (head.method, head.aux_layer_ids, head.num_speculative_tokens) == ("peagle", (2, 15, 29), 5)
    assert (head.num_layers, head.draft_vocab_size, head.default_k) == (1, 8192, 5)


def test_the_hub_s_layout_is_read() -> None:
    head = check_fit(hub_head(), TARGET)
    assert (head.method, head.aux_layer_ids, head.num_speculative_tokens) == ("peagle", (1, 14, 28), None)
    assert (head.num_layers, head.draft_vocab_size, head.mask_token_id) == (4, 32000, 49151)


def test_a_published_head_drafts_the_whole_vocabulary_where_it_names_none() -> None:
    head = check_fit(hub_head(draft_vocab_size=None, eagle_config=None), TARGET)
    assert (head.draft_vocab_size, head.aux_layer_ids) == (49152, ())


def test_without_a_saved_k_the_usual_one_of_the_method_holds() -> None:
    assert read_head(hub_head()).default_k == 5
    assert read_head(hub_head(ptd_token_id=None)).default_k == 3


def test_a_head_without_a_mask_token_is_eagle3() -> None:
    assert read_head(hub_head(ptd_token_id=None)).method == "eagle3"
    assert read_head(library_head(speculators_model_type="eagle3", mask_token_id=None)).method == "eagle3"


def test_a_head_may_be_narrower_than_its_target() -> None:
    narrow = library_head(transformer_layer_config={"hidden_size": 256, "vocab_size": 49152}, target_hidden_size=576)
    assert check_fit(narrow, TARGET).target_hidden_size == 576


def test_a_multimodal_target_is_judged_by_its_text_part() -> None:
    assert check_fit(library_head(), {"text_config": TARGET}).method == "peagle"


def test_the_state_after_the_last_layer_may_be_read() -> None:
    assert check_fit(library_head(eagle_aux_hidden_state_layer_ids=[0, 30]), TARGET).aux_layer_ids == (0, 30)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"hidden_size": 2048}, "hidden size is 576, the target's is 2,048"),
        ({"vocab_size": 32000}, "vocabulary is 49,152, the target's is 32,000"),
        ({"num_hidden_layers": 16}, r"layers \[29\], the target has 16 layers"),
    ],
)
@pytest.mark.parametrize("make_head", [library_head, hub_head])
def test_a_head_of_another_model_is_refused(make_head: Any, target: dict[str, int], reason: str) -> None:
    reason = reason.replace("29", str(28 if make_head is hub_head else 29))
    with pytest.raises(DrafterError, match=reason) as caught:
        check_fit(make_head(), TARGET | target)
    assert "peagle models" in caught.value.hint


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (library_head(mask_token_id=None), "no mask token"),
        (library_head(mask_token_id=50000), "mask token 50000 lies outside"),
        (library_head(fc_norm=True, norm_output=True), "fc_norm and norm_output"),
        (library_head(speculators_model_type="dflash"), "dflash"),
        (library_head(transformer_layer_config={"hidden_size": 576}), "no vocab_size"),
        ({"architectures": ["LlamaForCausalLM"], **TARGET}, "no drafter head"),
    ],
)
def test_what_cannot_draft_here_is_refused_with_the_reason(head: dict[str, Any], reason: str) -> None:
    with pytest.raises(DrafterError, match=reason):
        check_fit(head, TARGET)


def test_normalised_eagle3_heads_are_fine() -> None:
    head = library_head(speculators_model_type="eagle3", mask_token_id=None, norm_output=True)
    assert check_fit(head, TARGET).method == "eagle3"
