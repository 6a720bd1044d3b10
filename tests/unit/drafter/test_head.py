import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from foreign_targets import AUX_LAYERS
from safetensors.torch import load_file
from saved_heads import load_head

from peagle.catalog.shipped_heads import HEADS_FOLDER
from peagle.drafter.batch import make_batch, sample_blocks, sample_rows
from peagle.drafter.forward import head_states, is_block_head
from peagle.drafter.head import HeadSpec, build_head, possible_init, save_head
from peagle.drafter.target import read_architecture
from peagle.drafter.vocabulary import DraftVocabulary, vocabulary_of_head
from peagle.errors import ConfigError

NUM_DEPTHS = 3


def _head(target, spec, vocabulary, **changes):
    shape: dict[str, Any] = {"aux_layers": spec.aux_layers, "num_depths": NUM_DEPTHS, "num_layers": 2, **changes}
    return build_head(target, HeadSpec(**shape), vocabulary)


def _batch(head, store):
    mask = store[1].loss_mask_T[1:]
    if is_block_head(head):
        return make_batch([store[1]], [sample_blocks(mask, num_depths=NUM_DEPTHS, share=1.0)])
    return make_batch([store[1]], [sample_rows(mask, num_depths=NUM_DEPTHS, ratio=1.0)])


def _logits(head, store):
    batch = _batch(head, store)
    with torch.no_grad():
        logits: torch.Tensor = head.lm_head(head_states(head, batch)[: batch.num_loss_rows])
    return logits


def test_a_warm_start_copies_the_last_aux_state_and_the_targets_last_layers(target, spec, vocabulary):
    head = _head(target, spec, vocabulary)
    weights = load_file(target / "model.safetensors")
    states = torch.randn(5, 3 * spec.hidden_size)
    torch.testing.assert_close(head.fc(states), states[:, -spec.hidden_size :])
    for head_layer, target_layer in enumerate((2, 3)):
        torch.testing.assert_close(
            head.layers[head_layer].mlp.up_proj.weight, weights[f"model.layers.{target_layer}.mlp.up_proj.weight"]
        )
    hidden_half = head.layers[0].self_attn.q_proj.weight[:, spec.hidden_size :]
    torch.testing.assert_close(hidden_half, weights["model.layers.2.self_attn.q_proj.weight"])
    torch.testing.assert_close(head.norm.weight, weights["model.norm.weight"])


def test_additional_kv_heads_start_as_copies_of_the_targets(target, spec, vocabulary, store):
    default_head, doubled_head = _head(target, spec, vocabulary), _head(target, spec, vocabulary, num_key_value_heads=4)
    for head in (default_head, doubled_head):
        with torch.no_grad():  # only the half for states is copied; the half for embeddings is random
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(head.layers[0].self_attn, name).weight[:, : spec.hidden_size] = 0
            head.mask_hidden.fill_(1)
    assert (
        doubled_head.layers[1].self_attn.k_proj.weight.shape[0]
        == 2 * default_head.layers[1].self_attn.k_proj.weight.shape[0]
    )
    torch.testing.assert_close(_logits(doubled_head, store), _logits(default_head, store))


def test_incompatible_kv_heads_require_a_random_start(target, spec, vocabulary):
    with pytest.raises(ConfigError, match="1 KV heads cannot start as copies of the target's 2"):
        _head(target, spec, vocabulary, num_key_value_heads=1)
    head = _head(target, spec, vocabulary, num_key_value_heads=1, init="random")
    assert head.layers[0].self_attn.k_proj.weight.shape[0] == 32  # the size of one head


def _names_of_trained_weights(head):
    return {name for name, parameter in head.named_parameters() if parameter.requires_grad}


def test_embeddings_and_lm_head_are_trained_only_on_request(target, spec, vocabulary):
    trained = _names_of_trained_weights(_head(target, spec, vocabulary))
    assert {"fc.weight", "mask_hidden", "norm.weight"} <= trained
    assert not {name for name in trained if "embed" in name or "verifier" in name or "lm_head" in name}
    on_request = _head(target, spec, vocabulary, train_lm_head=True, train_embeddings=True)
    assert _names_of_trained_weights(on_request) - trained == {"lm_head.weight", "embed_tokens.weight"}


@pytest.mark.parametrize("algorithm", ["peagle", "eagle3", "dflash", "dspark"])
def test_save_and_load_round_trip(tmp_path, target, spec, vocabulary, store, algorithm):
    head = _head(target, spec, vocabulary, algorithm=algorithm)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if not name.startswith("embed_tokens"):  # not saved: the target's embeddings are unchanged
                parameter.copy_(parameter.to(torch.bfloat16))
    save_head(head, tmp_path, verifier="org/target", num_speculative_tokens=5)
    torch.testing.assert_close(_logits(load_head(tmp_path, target), store), _logits(head, store))


def test_trained_embeddings_are_saved(tmp_path, target, spec, vocabulary):
    head = _head(target, spec, vocabulary, train_embeddings=True)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(head.embed_tokens.weight.to(torch.bfloat16) * 2)
    save_head(head, tmp_path, verifier="org/target")
    torch.testing.assert_close(load_head(tmp_path, target).embed_tokens.weight, head.embed_tokens.weight)


def test_saved_heads_have_no_target_weights_or_paths(tmp_path, target, spec, vocabulary):
    save_head(_head(target, spec, vocabulary), tmp_path, verifier="org/target", num_speculative_tokens=5)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"d2t", "lm_head.weight", "mask_hidden", "fc.weight"} <= set(names)
    assert not {name for name in names if "embed_tokens" in name or "verifier" in name}
    assert {file.stat().st_mode & 0o044 for file in tmp_path.iterdir()} == {0o044}, "other users can read the files"
    text = (tmp_path / "config.json").read_text()
    assert str(target) not in text
    config = json.loads(text)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("algorithm", ["peagle", "eagle3", "dflash", "dspark"])
def test_training_can_start_from_a_saved_head(tmp_path, target, spec, vocabulary, algorithm):
    saved = _head(target, spec, vocabulary, algorithm=algorithm, init="random")
    save_head(saved, tmp_path, verifier="org/target")
    continued = _head(target, spec, vocabulary, algorithm=algorithm, init=str(tmp_path))
    trained = {name: parameter for name, parameter in continued.named_parameters() if parameter.requires_grad}
    assert "fc.weight" in trained
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter, saved.get_parameter(name).bfloat16().float(), msg=name)
    # Without tokens to count, the coverage is 1.
    assert vocabulary_of_head(tmp_path, [], target_size=96) == replace(vocabulary, coverage=1.0)


def test_training_can_start_from_a_shipped_head(embedded_target, shipped_eagle3):
    shipped_folder = HEADS_FOLDER / "smollm2-135m-eagle3"
    assert "lm_head.weight" not in load_file(shipped_folder / "model.safetensors")
    vocabulary = vocabulary_of_head(shipped_folder, [], target_size=49152)
    shape = HeadSpec(aux_layers=(2, 15, 29), algorithm="eagle3", num_layers=1, num_depths=1, init=str(shipped_folder))
    head = build_head(embedded_target, shape, vocabulary)
    expected = load_file(shipped_eagle3 / "model.safetensors")
    for name in ("lm_head.weight", "fc.weight"):
        torch.testing.assert_close(head.get_parameter(name), expected[name].float(), rtol=0, atol=0)


def test_a_saved_head_of_another_shape_is_refused(tmp_path, target, spec, vocabulary):
    save_head(_head(target, spec, vocabulary, num_layers=2), tmp_path, verifier="org/target")
    with pytest.raises(ConfigError, match="has 2 layers, but the head to train has 1"):
        _head(target, spec, vocabulary, num_layers=1, init=str(tmp_path))
    for algorithm in ("eagle3", "dflash"):
        with pytest.raises(ConfigError, match=f"has method peagle, but the head to train has {algorithm}"):
            _head(target, spec, vocabulary, num_layers=2, algorithm=algorithm, init=str(tmp_path))
    small_vocabulary = DraftVocabulary(token_ids=tuple(range(40)), target_size=96)
    with pytest.raises(ConfigError, match=r"lm_head\.weight has shape \(48, 32\), but .* needs \(40, 32\)"):
        _head(target, spec, small_vocabulary, num_layers=2, init=str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 7}, "has mask token 0, but the head to train has 7"),
        ({"aux_layers": (0, 1)}, r"reads layers \[2, 3\], but the head to train reads \[0, 1\]"),
    ],
)
def test_a_saved_head_with_other_inputs_is_refused(tmp_path, target, spec, vocabulary, changes, message):
    save_head(_head(target, replace(spec, aux_layers=(2, 3)), vocabulary), tmp_path, verifier="org/target")
    with pytest.raises(ConfigError, match=message):
        build_head(target, HeadSpec(**{"aux_layers": (2, 3), "init": str(tmp_path), **changes}), vocabulary)


@pytest.mark.parametrize("algorithm", ["peagle", "eagle3", "dflash", "dspark"])
def test_added_layers_start_as_the_identity(tmp_path, target, spec, vocabulary, store, algorithm):
    saved = _head(target, spec, vocabulary, num_layers=1, algorithm=algorithm)
    save_head(saved, tmp_path, verifier="org/target")
    deeper_head = _head(target, spec, vocabulary, num_layers=3, algorithm=algorithm, init=str(tmp_path))
    torch.testing.assert_close(_logits(deeper_head, store), _logits(load_head(tmp_path, target), store))
    head_states(deeper_head, _batch(deeper_head, store)).square().sum().backward()
    assert all(layer.mlp.down_proj.weight.grad.any() for layer in deeper_head.layers)


def test_training_of_a_peagle_head_can_start_from_an_eagle3_head(tmp_path, target, spec, vocabulary):
    saved = _head(target, spec, vocabulary, algorithm="eagle3", init="random")
    save_head(saved, tmp_path, verifier="org/target")
    continued = _head(target, spec, vocabulary, algorithm="peagle", init=str(tmp_path))
    torch.testing.assert_close(continued.fc.weight, saved.fc.weight.bfloat16().float())
    assert not continued.mask_hidden.any()


def test_inputs_and_frozen_layers_are_not_trained(tmp_path, target, spec, vocabulary):
    save_head(_head(target, spec, vocabulary, num_layers=3), tmp_path, verifier="org/target")
    shape: dict[str, Any] = {"num_layers": 3, "init": str(tmp_path)}
    trained = _names_of_trained_weights(_head(target, spec, vocabulary, **shape))
    trained_above_frozen = _names_of_trained_weights(_head(target, spec, vocabulary, **shape, num_frozen_layers=2))
    assert trained_above_frozen == {name for name in trained if name.startswith(("layers.2.", "norm."))}
    assert {"fc.weight", "mask_hidden"} <= trained - trained_above_frozen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2, "num_frozen_layers": 2}, "num_frozen_layers must be from 0 to 1, got 2"),
        ({"num_layers": 2, "num_frozen_layers": 1, "train_embeddings": True}, "train_embeddings cannot be combined"),
        ({"num_layers": 3, "num_frozen_layers": 2}, "has 1 layers, fewer than num_frozen_layers=2"),
        ({"num_layers": 2, "num_frozen_layers": 1, "init": "warm"}, "num_frozen_layers requires a saved head"),
    ],
)
def test_invalid_frozen_layers_are_refused(tmp_path, target, spec, vocabulary, changes, message):
    save_head(_head(target, spec, vocabulary, num_layers=1), tmp_path, verifier="org/target")
    with pytest.raises(ConfigError, match=message):
        _head(target, spec, vocabulary, **{"init": str(tmp_path), **changes})


def test_saved_kv_heads_are_repeated_if_the_new_head_has_more(tmp_path, target, spec, vocabulary, store):
    save_head(_head(target, spec, vocabulary, algorithm="eagle3"), tmp_path, verifier="org/target")
    default_head = _head(target, spec, vocabulary, init=str(tmp_path))
    doubled_head = _head(target, spec, vocabulary, init=str(tmp_path), num_key_value_heads=4)
    assert (
        doubled_head.layers[0].self_attn.v_proj.weight.shape[0]
        == 2 * default_head.layers[0].self_attn.v_proj.weight.shape[0]
    )
    torch.testing.assert_close(_logits(doubled_head, store), _logits(default_head, store))


_SHAPE = HeadSpec(aux_layers=AUX_LAYERS, num_layers=2)


@pytest.mark.parametrize("model_type", ["mistral", "qwen3"])
def test_layers_of_a_block_head_start_equivalent_to_those_of_the_target(foreign_target, model_type, vocabulary):
    folder = foreign_target(model_type)
    head = build_head(folder, replace(_SHAPE, algorithm="dflash"), vocabulary)
    weights = load_file(folder / "model.safetensors")
    last_norm = weights["model.layers.3.input_layernorm.weight"].float()
    torch.testing.assert_close(head.hidden_norm.weight, last_norm)
    for layer, index in zip(head.layers, (2, 3), strict=True):
        prefix = f"model.layers.{index}."
        torch.testing.assert_close(layer.mlp.up_proj.weight, weights[prefix + "mlp.up_proj.weight"].float())
        for name in ("q_proj", "k_proj", "v_proj"):  # the norms differ, but not their products with the projections
            product = layer.self_attn.get_parameter(f"{name}.weight") * layer.input_layernorm.weight
            expected = weights[f"{prefix}self_attn.{name}.weight"] * weights[prefix + "input_layernorm.weight"]
            torch.testing.assert_close(product, expected.float())
    query = head.layers[0].self_attn.q_proj.weight * last_norm
    expected_norm = query.square().sum(1).mean().sqrt().expand(32)  # keeps the mean size of queries
    if model_type == "qwen3":  # has a q_norm, which is copied
        expected_norm = weights["model.layers.2.self_attn.q_norm.weight"].float()
    torch.testing.assert_close(head.layers[0].self_attn.q_norm.weight, expected_norm)


def test_warm_start_of_a_block_head_keeps_norms_of_queries_and_keys(foreign_target):
    folder = foreign_target("qwen3")
    shape = replace(_SHAPE, algorithm="dflash")
    assert possible_init(folder, read_architecture(folder), shape, pytest.fail) == "warm"  # without a warning


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_warm_start_copies_projections_and_norms(foreign_target, model_type, vocabulary):
    folder = foreign_target(model_type)
    head, weights = build_head(folder, _SHAPE, vocabulary), load_file(folder / "model.safetensors")
    modules = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
    for name in modules:
        parameter = head.layers[1].get_parameter(f"{name}.weight")
        torch.testing.assert_close(parameter, weights[f"model.layers.3.{name}.weight"].float())
    assert not [name for name, _ in head.named_parameters() if name.endswith("bias") or "q_norm" in name]


@pytest.mark.parametrize(
    ("model_type", "init", "messages"),
    [
        ("mistral", "warm", []),
        ("qwen2", "warm", ["without their bias of q_proj, bias of k_proj, bias of v_proj"]),
        ("qwen3", "warm", ["without their q_norm, k_norm"]),
        (
            "qwen3_moe",
            "random",
            ["random weights, not with the target's last layers: the target's layer 2 has no mlp.down_proj.weight"],
        ),
        ("gpt_oss", "random", ["the target's layer 2 has no mlp.down_proj.weight"]),
        ("gemma3_text", "random", ["the target's MLPs use gelu_pytorch_tanh, but a head's use silu"]),
        ("gemma4_text", "random", ["the target's MLPs use gelu_pytorch_tanh, but a head's use silu"]),
    ],
)
def test_warm_start_warns_about_layers_that_differ(foreign_target, model_type, init, messages):
    folder, warnings = foreign_target(model_type), []
    assert possible_init(folder, read_architecture(folder), _SHAPE, warnings.append) == init
    assert len(warnings) == len(messages)
    assert all(part in sentence for part, sentence in zip(messages, warnings, strict=True))


def test_build_head_refuses_an_impossible_warm_start(foreign_target, vocabulary):
    with pytest.raises(ConfigError, match=r"a head cannot start from its last layers: .*mlp\.down_proj") as refused:
        build_head(foreign_target("qwen3_moe"), _SHAPE, vocabulary)
    assert refused.value.hint == "use --init random"
