"""Which targets' last layers a head can start from, and what it takes of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from foreign_targets import AUX_LAYERS
from safetensors.torch import load_file

from peagle.drafter.architecture import read_architecture
from peagle.drafter.head import build_head
from peagle.drafter.head_folder import load_head, save_head
from peagle.drafter.head_spec import HeadSpec
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.drafter.warm_start import init_for
from peagle.errors import ConfigError

_SHAPE = HeadSpec(aux_layers=AUX_LAYERS, num_layers=2)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_projections_and_norms_of_like_layers_are_taken(
    foreign_target: Callable[[str], Path], model_type: str, vocabulary: DraftVocabulary
) -> None:
    folder = foreign_target(model_type)
    head, weights = build_head(folder, _SHAPE, vocabulary), load_file(folder / "model.safetensors")
    for name in (
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ):
        own = head.layers[1].get_parameter(f"{name}.weight")
        torch.testing.assert_close(own, weights[f"model.layers.3.{name}.weight"].float())
    assert not [name for name, _ in head.named_parameters() if name.endswith("bias") or "q_norm" in name]


@pytest.mark.parametrize(
    ("model_type", "init", "said"),
    [
        ("mistral", "warm", []),
        ("qwen2", "warm", ["without their bias of q_proj, bias of k_proj, bias of v_proj"]),
        ("qwen3", "warm", ["without their q_norm, k_norm"]),
        (
            "qwen3_moe",
            "random",
            ["at random, not from the target's last layers: its layer 2 has no mlp.down_proj.weight"],
        ),
        ("gpt_oss", "random", ["its layer 2 has no mlp.down_proj.weight"]),
        ("gemma3_text", "random", ["its MLPs have gelu_pytorch_tanh, a head's silu"]),
        ("gemma4_text", "random", ["its MLPs have gelu_pytorch_tanh, a head's silu"]),
    ],
)
def test_a_warm_start_becomes_a_random_one_where_layers_differ_and_says_so(
    foreign_target: Callable[[str], Path], model_type: str, init: str, said: list[str]
) -> None:
    folder, heard = foreign_target(model_type), []
    assert init_for(folder, read_architecture(folder), _SHAPE, heard.append) == init
    assert len(heard) == len(said)
    assert all(part in sentence for part, sentence in zip(said, heard, strict=True))


def test_a_start_that_is_not_warm_stays_as_it_is(foreign_target: Callable[[str], Path]) -> None:
    folder, heard = foreign_target("qwen3_moe"), []
    shape = HeadSpec(aux_layers=AUX_LAYERS, init="random")
    assert init_for(folder, read_architecture(folder), shape, heard.append) == "random"
    assert not heard


def test_a_head_itself_is_not_started_from_layers_that_differ(
    foreign_target: Callable[[str], Path], vocabulary: DraftVocabulary
) -> None:
    with pytest.raises(ConfigError, match=r"a head cannot start from its last layers: .*mlp\.down_proj") as refused:
        build_head(foreign_target("qwen3_moe"), _SHAPE, vocabulary)
    assert refused.value.hint == "give --init random"


def test_layers_are_added_to_a_head_of_a_target_whose_layers_differ(
    tmp_path: Path, foreign_target: Callable[[str], Path], vocabulary: DraftVocabulary
) -> None:
    folder = foreign_target("qwen3_moe")
    saved = build_head(folder, HeadSpec(aux_layers=AUX_LAYERS, init="random"), vocabulary)
    save_head(saved, tmp_path, verifier="org/target")
    grown = build_head(folder, HeadSpec(aux_layers=AUX_LAYERS, num_layers=2, init=str(tmp_path)), vocabulary)
    torch.testing.assert_close(grown.fc.weight, load_head(tmp_path, folder).fc.weight)
    assert not grown.layers[1].mlp.down_proj.weight.any()
