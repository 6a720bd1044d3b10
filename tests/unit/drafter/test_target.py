import json
import shutil

import pytest
import torch
from foreign_targets import AUX_LAYERS, FOREIGN, HIDDEN
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from peagle.drafter.data import Sample
from peagle.drafter.features import HiddenStateReader, load_reader
from peagle.drafter.head import HeadSpec, build_head
from peagle.drafter.loss import Targets, linear_loss
from peagle.drafter.target import SUPPORTED, TargetWeights, load_target, read_architecture
from peagle.drafter.vocabulary import frequent_vocabulary
from peagle.errors import ConfigError

NO_MODEL_TYPE = '{"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9}'


def load(folder, aux_layers=None):
    return load_target(str(folder), aux_layers, lambda message: None)


def test_aux_layers_that_the_target_lacks_are_refused(chat_target):
    with pytest.raises(ConfigError, match=r"aux layers \[4, 9\]: the target has layers 0 to 3"):
        load(chat_target, [1, 4, 9])


def test_aux_layers_are_sorted_and_unique(chat_target):
    assert load(chat_target, [3, 0]).aux_layers == (0, 3)
    with pytest.raises(ConfigError, match=r"aux layers \[1\] are repeated"):
        load(chat_target, [1, 3, 1])


def test_samples_with_tokens_that_the_target_lacks_are_refused(chat_target):
    target = load(chat_target)
    valid = Sample(id="a", token_ids=(5, 95), num_prompt_tokens=1)
    invalid = Sample(id="b", token_ids=(5, 96), num_prompt_tokens=1)
    target.require_known_tokens([valid])
    with pytest.raises(ConfigError, match="token 96 for row b, but the target only has tokens 0 to 95"):
        target.require_known_tokens([valid, invalid])


def _without_tokenizer(folder):
    for file in folder.glob("*token*"):
        file.unlink()


def _set_eos(folder, **eos_by_file):
    for name, eos_token_id in eos_by_file.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": eos_token_id}))


def _without_eos(folder):
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["eos_token"]
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_tokenizer, "has no tokenizer"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
        (lambda folder: (folder / "config.json").write_text(NO_MODEL_TYPE), "transformers cannot read its config.json"),
        (
            lambda folder: _set_eos(folder, config=2, generation_config=[1, 2]),
            r"end-of-text token is 95, but the target has \[1, 2\]",
        ),
        (_without_eos, r"end-of-text token is None, but the target has \[95\]"),
    ],
)
def test_incomplete_or_inconsistent_targets_are_refused(chat_target, tmp_path, damage, message):
    folder = tmp_path / "target"
    shutil.copytree(chat_target, folder)
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize("eos_tokens", [[7, 95], None])
def test_the_tokenizers_eos_is_accepted_if_the_target_lists_it_or_has_none(chat_target, tmp_path, eos_tokens):
    folder = tmp_path / "target"
    shutil.copytree(chat_target, folder)
    _set_eos(folder, config=None, generation_config=eos_tokens)
    assert load(folder).tokenizer.eos_token_id == 95


def _split_weights(target, folder, prefix, *omitted):
    """Save the target's weights in two files with `prefix`, except weights whose names end with one of `omitted`."""
    weights = load_file(target / "model.safetensors")
    renamed = {f"{prefix}{name.removeprefix('model.')}": tensor for name, tensor in weights.items()}
    renamed["vision.embed_tokens.weight"] = torch.zeros(4, 4)  # must not be taken for the text embeddings
    renamed = {name: tensor for name, tensor in renamed.items() if not name.endswith(omitted)}
    for number, part in enumerate((sorted(renamed)[::2], sorted(renamed)[1::2])):
        save_file({name: renamed[name] for name in part}, folder / f"model-{number}.safetensors")
    return TargetWeights(folder, read_architecture(target))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_weights_are_found_with_any_prefix(tmp_path, target, prefix):
    weights, expected = _split_weights(target, tmp_path, prefix), load_file(target / "model.safetensors")
    torch.testing.assert_close(weights.final_norm(), expected["model.norm.weight"].float())
    name = "layers.3.mlp.up_proj.weight"
    torch.testing.assert_close(weights[name], expected[f"model.{name}"])
    assert weights.shape(name) == [64, 32]
    assert "mlp.up_proj.weight" in weights.names_in_layer(3)
    assert not weights.names_in_layer(4)


def test_missing_embeddings_are_refused(tmp_path, target):
    with pytest.raises(ConfigError, match=r"have no embed_tokens\.weight of 96 x 32"):
        _split_weights(target, tmp_path, "model.", "model.embed_tokens.weight")


def test_a_missing_lm_head_is_refused(tmp_path, target):
    config = (target / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"no lm_head\.weight of 96 x 32"):
        TargetWeights(target, read_architecture(tmp_path))


def test_a_missing_norm_is_refused(tmp_path, target):
    with pytest.raises(ConfigError, match=r"have no model\.norm\.weight"):
        _split_weights(target, tmp_path, "model.", "model.norm.weight").final_norm()


@pytest.mark.parametrize("model_type", FOREIGN)
def test_layer_config_has_the_targets_sizes(foreign_target, model_type):
    layers = read_architecture(foreign_target(model_type)).layer_config(num_layers=2, num_key_value_heads=None)
    assert layers.model_type == "llama"
    assert (layers.num_hidden_layers, layers.hidden_size, layers.intermediate_size) == (2, HIDDEN, 64)
    assert (layers.num_attention_heads, layers.num_key_value_heads, layers.head_dim) == (4, 2, 32)
    assert (layers.vocab_size, layers.max_position_embeddings) == (96, 512)
    assert (layers.hidden_act, layers.attention_bias, layers.mlp_bias) == ("silu", False, False)
    assert not hasattr(layers, "sliding_window")
    assert "rope_theta" in layers.rope_parameters


@pytest.mark.parametrize("model_type", FOREIGN)
def test_last_states_give_the_target_distribution(foreign_target, model_type, samples):
    folder = foreign_target(model_type)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = torch.tensor([samples[1].token_ids])
    with torch.inference_mode():
        outputs = model(token_ids, output_hidden_states=True)
    aux, last = HiddenStateReader(model, AUX_LAYERS).read(token_ids)
    torch.testing.assert_close(aux, torch.cat([outputs.hidden_states[layer] for layer in AUX_LAYERS], dim=-1))

    whole_vocabulary = frequent_vocabulary([], size=96, target_size=96)
    head = build_head(folder, HeadSpec(aux_layers=AUX_LAYERS, init="random"), whole_vocabulary)
    with torch.no_grad():
        after_norm = head.verifier_norm(last[0])
    targets = Targets(after_norm, head.verifier_lm_head.weight, head.verifier_softcap)
    # The divergence from a head with zero logits is log(vocabulary size) minus the entropy of the target.
    rows = torch.arange(len(after_norm))
    measured = linear_loss(torch.zeros_like(after_norm), targets.weight_VH, targets, rows, torch.ones(len(rows)))
    log_p = outputs.logits[0].log_softmax(-1)
    torch.testing.assert_close(
        measured.divergence_R, (log_p.exp() * log_p).sum(-1) + torch.tensor(96.0).log(), rtol=1e-4, atol=1e-4
    )


def _write_config(folder, target, **changes):
    config = json.loads((target / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    ("rope_parameters", "expected"),
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
def test_rope_parameters_of_a_head_have_no_partial_rotary_factor(tmp_path, target, rope_parameters, expected):
    folder = _write_config(tmp_path, target, rope_parameters=rope_parameters)
    assert read_architecture(folder).rope_parameters == expected


def test_multimodal_targets_are_read(tmp_path):
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
    assert (aux.shape, last.shape) == ((1, 3, len(AUX_LAYERS) * HIDDEN), (1, 3, HIDDEN))
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
def test_unsupported_architectures_are_refused(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as refused:
        read_architecture(tmp_path)
    assert str(tmp_path) in refused.value.message
    assert refused.value.hint == SUPPORTED or "cannot read" in message


def test_final_norms_other_than_rmsnorm_are_refused(tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = {"model_type": "olmo", **sizes, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="its final norm, OlmoLayerNorm, is not an RMSNorm"):
        read_architecture(tmp_path)
