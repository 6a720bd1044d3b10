import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_targets import AUX_LAYERS
from safetensors.torch import load_file
from saved_heads import load_head

from peagle.catalog.shipped_heads import HEADS_FOLDER
from peagle.drafter.batch import make_batch, sample_rows
from peagle.drafter.features import FeatureSpec, FeatureStore
from peagle.drafter.forward import head_states
from peagle.drafter.head import HeadSpec, build_head, init_for, save_head
from peagle.drafter.target import read_architecture
from peagle.drafter.vocabulary import DraftVocabulary, frequent_vocabulary, vocabulary_of_head
from peagle.errors import ConfigError

NUM_DEPTHS = 3


def _head(target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, **changes: Any) -> Any:
    shape: dict[str, Any] = {"aux_layers": spec.aux_layers, "num_depths": NUM_DEPTHS, "num_layers": 2, **changes}
    return build_head(target, HeadSpec(**shape), vocabulary)


def _logits(head: Any, store: FeatureStore) -> torch.Tensor:
    batch = make_batch([store[1]], [sample_rows(store[1].loss_mask_T[1:], num_depths=NUM_DEPTHS, ratio=1.0)])
    with torch.no_grad():
        logits: torch.Tensor = head.lm_head(head_states(head, batch)[: batch.num_loss_rows])
    return logits


def test_a_warm_start_passes_the_last_aux_state_through_the_targets_layers(
    target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary
) -> None:
    head = _head(target, spec, vocabulary)
    weights = load_file(target / "model.safetensors")
    states = torch.randn(5, 3 * spec.hidden_size)
    torch.testing.assert_close(head.fc(states), states[:, -spec.hidden_size :])
    for own, index in enumerate((2, 3)):
        torch.testing.assert_close(
            head.layers[own].mlp.up_proj.weight, weights[f"model.layers.{index}.mlp.up_proj.weight"]
        )
    hidden_half = head.layers[0].self_attn.q_proj.weight[:, spec.hidden_size :]
    torch.testing.assert_close(hidden_half, weights["model.layers.2.self_attn.q_proj.weight"])
    torch.testing.assert_close(head.norm.weight, weights["model.norm.weight"])


def test_more_kv_heads_start_as_copies_of_the_targets(
    target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, store: FeatureStore
) -> None:
    few, many = _head(target, spec, vocabulary), _head(target, spec, vocabulary, num_key_value_heads=4)
    for head in (few, many):
        with torch.no_grad():  # without the embeddings' half, which is noise of another draw
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(head.layers[0].self_attn, name).weight[:, : spec.hidden_size] = 0
            head.mask_hidden.fill_(1)
    assert many.layers[1].self_attn.k_proj.weight.shape[0] == 2 * few.layers[1].self_attn.k_proj.weight.shape[0]
    torch.testing.assert_close(_logits(many, store), _logits(few, store))


def test_kv_heads_that_do_not_divide_the_heads_are_refused(
    target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary
) -> None:
    with pytest.raises(ConfigError, match="3 KV heads do not divide 4 attention heads"):
        _head(target, spec, vocabulary, num_key_value_heads=3)


def test_kv_heads_that_cannot_be_copies_start_at_random_alone(
    target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary
) -> None:
    with pytest.raises(ConfigError, match="1 KV heads cannot start as copies of the target's 2"):
        _head(target, spec, vocabulary, num_key_value_heads=1)
    head = _head(target, spec, vocabulary, num_key_value_heads=1, init="random")
    assert head.layers[0].self_attn.k_proj.weight.shape[0] == 32


def test_only_the_heads_own_weights_are_trained(target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary) -> None:
    trained = {name for name, p in _head(target, spec, vocabulary).named_parameters() if p.requires_grad}
    assert {"fc.weight", "mask_hidden", "norm.weight"} <= trained
    assert not {name for name in trained if "embed" in name or "verifier" in name or "lm_head" in name}
    opened = _head(target, spec, vocabulary, train_lm_head=True, train_embeddings=True)
    assert {n for n, p in opened.named_parameters() if p.requires_grad} - trained == {
        "lm_head.weight",
        "embed_tokens.weight",
    }


def test_the_mask_state_starts_at_zero(target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary) -> None:
    assert not _head(target, spec, vocabulary).mask_hidden.any()


@pytest.mark.parametrize("algorithm", ["peagle", "eagle3"])
def test_a_saved_head_comes_back_the_same(
    tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, store: FeatureStore, algorithm: str
) -> None:
    head = _head(target, spec, vocabulary, algorithm=algorithm)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if not name.startswith("embed_tokens"):  # never saved: the target's stay as they are
                parameter.copy_(parameter.to(torch.bfloat16))
    save_head(head, tmp_path, verifier="org/target", num_speculative_tokens=5)
    torch.testing.assert_close(_logits(load_head(tmp_path, target), store), _logits(head, store))


def test_trained_embeddings_are_saved_and_come_back(
    tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary
) -> None:
    head = _head(target, spec, vocabulary, train_embeddings=True)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(head.embed_tokens.weight.to(torch.bfloat16) * 2)
    save_head(head, tmp_path, verifier="org/target")
    torch.testing.assert_close(load_head(tmp_path, target).embed_tokens.weight, head.embed_tokens.weight)


def test_a_head_without_embeddings_shares_the_targets_whatever_its_config_says(
    tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary
) -> None:
    save_head(_head(target, spec, vocabulary), tmp_path, verifier="org/target")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "embed_requires_grad": True}))
    embeddings = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(load_head(tmp_path, target).embed_tokens.weight, embeddings.float())


def test_the_folder_holds_nothing_of_the_targets_and_no_path(
    tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary
) -> None:
    save_head(_head(target, spec, vocabulary), tmp_path, verifier="org/target", num_speculative_tokens=5)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"d2t", "lm_head.weight", "mask_hidden", "fc.weight"} <= set(names)
    assert not {name for name in names if "embed_tokens" in name or "verifier" in name}
    assert {file.stat().st_mode & 0o044 for file in tmp_path.iterdir()} == {0o044}, (
        "whoever serves it may be another user"
    )
    text = (tmp_path / "config.json").read_text()
    assert str(target) not in text
    config = json.loads(text)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_full_vocabulary_shares_the_targets_lm_head(
    tmp_path: Path, target: Path, spec: FeatureSpec, store: FeatureStore
) -> None:
    head = _head(target, spec, frequent_vocabulary([], size=96, target_size=96))
    save_head(head, tmp_path, verifier="org/target")
    assert not {"lm_head.weight", "d2t"} & load_file(tmp_path / "model.safetensors").keys()
    torch.testing.assert_close(_logits(load_head(tmp_path, target), store), _logits(head, store), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("algorithm", ["peagle", "eagle3"])
def test_a_head_goes_on_from_a_saved_one(
    tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, algorithm: str
) -> None:
    saved = _head(target, spec, vocabulary, algorithm=algorithm, init="random")
    save_head(saved, tmp_path, verifier="org/target")
    gone_on = _head(target, spec, vocabulary, algorithm=algorithm, init=str(tmp_path))
    trained = {name: parameter for name, parameter in gone_on.named_parameters() if parameter.requires_grad}
    assert "fc.weight" in trained
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter, saved.get_parameter(name).bfloat16().float(), msg=name)
    assert vocabulary_of_head(tmp_path, [], target_size=96) == replace(vocabulary, coverage=1.0)


def test_a_head_goes_on_from_one_that_ships_without_its_lm_head(embedded_target: Path, shipped_eagle3: Path) -> None:
    shipped = HEADS_FOLDER / "smollm2-135m-eagle3"
    assert "lm_head.weight" not in load_file(shipped / "model.safetensors")
    vocabulary = vocabulary_of_head(shipped, [], target_size=49152)
    shape = HeadSpec(aux_layers=(2, 15, 29), algorithm="eagle3", num_layers=1, num_depths=1, init=str(shipped))
    head = build_head(embedded_target, shape, vocabulary)
    whole = load_file(shipped_eagle3 / "model.safetensors")
    for name in ("lm_head.weight", "fc.weight"):
        torch.testing.assert_close(head.get_parameter(name), whole[name].float(), rtol=0, atol=0)


def test_going_on_from_a_head_of_another_shape_is_refused(
    tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary
) -> None:
    save_head(_head(target, spec, vocabulary, num_layers=2), tmp_path, verifier="org/target")
    with pytest.raises(ConfigError, match="has 2 layers, but the head to train has 1"):
        _head(target, spec, vocabulary, num_layers=1, init=str(tmp_path))
    with pytest.raises(ConfigError, match="is a P-EAGLE head, but the head to train is eagle3"):
        _head(target, spec, vocabulary, num_layers=2, algorithm="eagle3", init=str(tmp_path))
    words = DraftVocabulary(token_ids=tuple(range(40)), target_size=96)
    with pytest.raises(ConfigError, match=r"lm_head\.weight has shape \(48, 32\), but .* needs \(40, 32\)"):
        _head(target, spec, words, num_layers=2, init=str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 7}, "has mask token 0, but the head to train has 7"),
        ({"aux_layers": (0, 1)}, r"reads layers \[2, 3\], but the head to train reads \[0, 1\]"),
    ],
)
def test_going_on_from_a_head_that_reads_something_else_is_refused(
    tmp_path: Path,
    target: Path,
    spec: FeatureSpec,
    vocabulary: DraftVocabulary,
    changes: dict[str, Any],
    message: str,
) -> None:
    save_head(_head(target, replace(spec, aux_layers=(2, 3)), vocabulary), tmp_path, verifier="org/target")
    with pytest.raises(ConfigError, match=message):
        build_head(target, HeadSpec(**{"aux_layers": (2, 3), "init": str(tmp_path), **changes}), vocabulary)


@pytest.mark.parametrize("algorithm", ["peagle", "eagle3"])
def test_further_layers_begin_as_the_identity_and_learn(
    tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, store: FeatureStore, algorithm: str
) -> None:
    saved = _head(target, spec, vocabulary, num_layers=1, algorithm=algorithm)
    save_head(saved, tmp_path, verifier="org/target")
    grown = _head(target, spec, vocabulary, num_layers=3, algorithm=algorithm, init=str(tmp_path))
    torch.testing.assert_close(_logits(grown, store), _logits(load_head(tmp_path, target), store))
    batch = make_batch([store[1]], [sample_rows(store[1].loss_mask_T[1:], num_depths=NUM_DEPTHS, ratio=1.0)])
    head_states(grown, batch).square().sum().backward()
    assert all(layer.mlp.down_proj.weight.grad.any() for layer in grown.layers)


def test_a_peagle_head_goes_on_from_an_eagle3_one_with_a_new_mask_state(
    tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary
) -> None:
    saved = _head(target, spec, vocabulary, algorithm="eagle3", init="random")
    save_head(saved, tmp_path, verifier="org/target")
    gone_on = _head(target, spec, vocabulary, algorithm="peagle", init=str(tmp_path))
    torch.testing.assert_close(gone_on.fc.weight, saved.fc.weight.bfloat16().float())
    assert not gone_on.mask_hidden.any()


def test_frozen_layers_and_what_feeds_them_are_left_as_they_are(
    tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary
) -> None:
    save_head(_head(target, spec, vocabulary, num_layers=3), tmp_path, verifier="org/target")
    shape: dict[str, Any] = {"num_layers": 3, "init": str(tmp_path)}
    every = {n for n, p in _head(target, spec, vocabulary, **shape).named_parameters() if p.requires_grad}
    some = {
        n
        for n, p in _head(target, spec, vocabulary, **shape, num_frozen_layers=2).named_parameters()
        if p.requires_grad
    }
    assert some == {name for name in every if name.startswith(("layers.2.", "norm."))}
    assert {"fc.weight", "mask_hidden"} <= every - some


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2, "num_frozen_layers": 2}, "num_frozen_layers must be from 0 to 1, got 2"),
        ({"num_layers": 2, "num_frozen_layers": 1, "train_embeddings": True}, "train_embeddings cannot be combined"),
        ({"num_layers": 3, "num_frozen_layers": 2}, "has 1 layers, fewer than num_frozen_layers=2"),
        ({"num_layers": 2, "num_frozen_layers": 1, "init": "warm"}, "num_frozen_layers requires a saved head"),
    ],
)
def test_layers_that_cannot_stay_as_they_are_are_refused(
    tmp_path: Path,
    target: Path,
    spec: FeatureSpec,
    vocabulary: DraftVocabulary,
    changes: dict[str, Any],
    message: str,
) -> None:
    save_head(_head(target, spec, vocabulary, num_layers=1), tmp_path, verifier="org/target")
    with pytest.raises(ConfigError, match=message):
        _head(target, spec, vocabulary, **{"init": str(tmp_path), **changes})


def test_saved_kv_heads_are_repeated_if_the_head_has_more(
    tmp_path: Path, target: Path, spec: FeatureSpec, vocabulary: DraftVocabulary, store: FeatureStore
) -> None:
    save_head(_head(target, spec, vocabulary, algorithm="eagle3"), tmp_path, verifier="org/target")
    few = _head(target, spec, vocabulary, init=str(tmp_path))
    many = _head(target, spec, vocabulary, init=str(tmp_path), num_key_value_heads=4)
    assert many.layers[0].self_attn.v_proj.weight.shape[0] == 2 * few.layers[0].self_attn.v_proj.weight.shape[0]
    torch.testing.assert_close(_logits(many, store), _logits(few, store))


@pytest.mark.parametrize("changes", [{"num_layers": 0}, {"num_depths": 0}, {"init": "cold"}, {"algorithm": "medusa"}])
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        HeadSpec(aux_layers=(1,), **changes)


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
            ["at random instead of from the target's last layers: the target's layer 2 has no mlp.down_proj.weight"],
        ),
        ("gpt_oss", "random", ["the target's layer 2 has no mlp.down_proj.weight"]),
        ("gemma3_text", "random", ["the target's MLPs use gelu_pytorch_tanh, a head's silu"]),
        ("gemma4_text", "random", ["the target's MLPs use gelu_pytorch_tanh, a head's silu"]),
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
    assert refused.value.hint == "use --init random"


def test_layers_are_added_to_a_head_of_a_target_whose_layers_differ(
    tmp_path: Path, foreign_target: Callable[[str], Path], vocabulary: DraftVocabulary
) -> None:
    folder = foreign_target("qwen3_moe")
    saved = build_head(folder, HeadSpec(aux_layers=AUX_LAYERS, init="random"), vocabulary)
    save_head(saved, tmp_path, verifier="org/target")
    grown = build_head(folder, HeadSpec(aux_layers=AUX_LAYERS, num_layers=2, init=str(tmp_path)), vocabulary)
    torch.testing.assert_close(grown.fc.weight, load_head(tmp_path, folder).fc.weight)
    assert not grown.layers[1].mlp.down_proj.weight.any()
