"""What is read of a target's architecture, for targets of several, against the models of transformers themselves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_targets import AUX_LAYERS, FOREIGN, HIDDEN
from transformers import AutoModelForCausalLM

from peagle.drafter.data import Sample
from peagle.drafter.features import HiddenStateReader, load_reader
from peagle.drafter.head import HeadSpec, build_head
from peagle.drafter.loss import Targets, linear_loss
from peagle.drafter.target import SUPPORTED, read_architecture
from peagle.drafter.vocabulary import frequent_vocabulary
from peagle.errors import ConfigError


@pytest.mark.parametrize("model_type", FOREIGN)
def test_a_heads_layers_have_the_targets_sizes_and_nothing_else_of_it(
    foreign_target: Callable[[str], Path], model_type: str
) -> None:
    layers = read_architecture(foreign_target(model_type)).layer_config(num_layers=2, num_key_value_heads=None)
    assert layers.model_type == "llama"
    assert (layers.num_hidden_layers, layers.hidden_size, layers.intermediate_size) == (2, HIDDEN, 64)
    assert (layers.num_attention_heads, layers.num_key_value_heads, layers.head_dim) == (4, 2, 32)
    assert (layers.vocab_size, layers.max_position_embeddings) == (96, 512)
    assert (layers.hidden_act, layers.attention_bias, layers.mlp_bias) == ("silu", False, False)
    assert not hasattr(layers, "sliding_window")
    assert "rope_theta" in layers.rope_parameters


@pytest.mark.parametrize("model_type", FOREIGN)
def test_the_targets_own_distribution_follows_from_its_last_states(
    foreign_target: Callable[[str], Path], model_type: str, samples: list[Sample]
) -> None:
    folder = foreign_target(model_type)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = torch.tensor([samples[1].token_ids])
    with torch.inference_mode():
        states = model(token_ids, output_hidden_states=True)
    aux, last = HiddenStateReader(model, AUX_LAYERS).read(token_ids)
    torch.testing.assert_close(aux, torch.cat([states.hidden_states[layer] for layer in AUX_LAYERS], dim=-1))

    everything = frequent_vocabulary([], size=96, target_size=96)
    head = build_head(folder, HeadSpec(aux_layers=AUX_LAYERS, init="random"), everything)
    with torch.no_grad():
        after_norm = head.verifier_norm(last[0])
    targets = Targets(after_norm, head.verifier_lm_head.weight, head.verifier_softcap)
    # Against a head whose logits are zero, the divergence is log V less the target's entropy.
    rows = torch.arange(len(after_norm))
    measured = linear_loss(torch.zeros_like(after_norm), targets.weight_VH, targets, rows, torch.ones(len(rows)))
    log_p = states.logits[0].log_softmax(-1)
    torch.testing.assert_close(
        measured.divergence_R, (log_p.exp() * log_p).sum(-1) + torch.tensor(96.0).log(), rtol=1e-4, atol=1e-4
    )


def _changed(folder: Path, target: Path, **changes: Any) -> Path:
    config = json.loads((target / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            {"rope_type": "default", "rope_theta": 5e5},
        ),
    ],
)
def test_a_heads_rotary_embedding_turns_whole_heads(
    tmp_path: Path, target: Path, given: dict[str, Any], kept: dict[str, Any]
) -> None:
    folder = _changed(tmp_path, target, rope_parameters=given)
    assert read_architecture(folder).rope_parameters == kept


def test_of_a_target_with_several_rotary_embeddings_that_of_full_attention_is_taken(
    foreign_target: Callable[[str], Path],
) -> None:
    assert read_architecture(foreign_target("gemma4_text")).rope_parameters == {
        "rope_type": "default",
        "rope_theta": 1e6,
    }


def test_a_target_inside_one_that_takes_images_is_read(tmp_path: Path) -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision = {"model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    text = {"model_type": "mistral", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config=text | {"num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 96},
        vision_config=vision | {"num_hidden_layers": 1},
    )
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    assert read_architecture(tmp_path).model_type == "mistral"
    head = build_head(tmp_path, HeadSpec(aux_layers=AUX_LAYERS), frequent_vocabulary([], size=96, target_size=96))
    aux, last = load_reader(tmp_path, AUX_LAYERS, "cpu").read(torch.tensor([[5, 6, 7]]))
    assert (aux.shape, last.shape) == ((1, 3, 96), (1, 3, 32))
    assert head.fc(aux.float()).shape == last.shape


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, "'t5' has an encoder"),
        ({"model_type": "gpt2"}, "'gpt2' has no rms_norm_eps"),
        ({"model_type": "granite", "logits_scaling": 8.0}, r"'granite' scales its logits \(logits_scaling\)"),
        ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}, "cannot read .*not a multiple"),
        (
            {"model_type": "qwen3", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 3},
            "do not fit a Llama layer",
        ),
        ({"model_type": "clip_vision_model"}, "has no"),
    ],
)
def test_a_target_that_no_head_can_be_made_for_is_refused_by_its_configuration(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as refused:
        read_architecture(tmp_path)
    assert str(tmp_path) in refused.value.message
    assert refused.value.hint == SUPPORTED or "cannot read" in message


def test_a_final_norm_that_is_no_rmsnorm_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = {"model_type": "olmo", **sizes, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="its final norm, OlmoLayerNorm, is not an RMSNorm"):
        read_architecture(tmp_path)
