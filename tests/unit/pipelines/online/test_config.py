from pathlib import Path

import pytest
from pydantic import ValidationError

from pipelines.online.config import ServeConfig


def test_top_level_options_define_the_only_model_if_models_is_not_set():
    (model,) = ServeConfig(model="smollm2-135m", drafter="none", max_replicas=2).served
    assert (model.served_name, model.drafter, model.max_replicas) == ("smollm2-135m", "none", 2)


def test_top_level_options_apply_to_all_models():
    config = ServeConfig(max_num_seqs=4, enforce_eager=True, models=[{"name": "a"}, {"name": "b", "max_num_seqs": 2}])
    assert [(model.served_name, model.max_num_seqs, model.enforce_eager) for model in config.served] == [
        ("a", 4, True),
        ("b", 2, True),
    ]


def test_model_path_may_contain_a_colon():
    assert ServeConfig(model="models/qwen3:8b", name="qwen3").served[0].served_name == "qwen3"
    assert ServeConfig(model="/srv/models/mine").served[0].served_name == "mine"
    assert ServeConfig(model="models/qwen3:8b", models=[{"name": "a"}]).served[0].served_name == "a"


def test_tilde_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    config = ServeConfig(state="~/state", keys="~/keys.json")
    assert (config.state, config.keys) == (Path("/home/alice/state"), Path("/home/alice/keys.json"))
    assert ServeConfig().keys is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": [{"model": "m"}, {"model": "m"}]}, "several models have the name m"),
        ({"models": [{"modle": "m"}]}, "modle"),
        ({"min_replicas": 2}, r"min_replicas \(2\) exceeds max_replicas \(1\)"),
        ({"drafter": "none", "num_speculative_tokens": 3}, "cannot be used with drafter: none"),
        ({"port": 0}, "port"),
        ({"name": "qwen3:8b"}, "the model name qwen3:8b"),
        ({"model": "models/qwen3:8b"}, "the model name models/qwen3:8b"),
        ({"models": [{"name": "a"}, {"name": "b:c"}]}, "the model name b:c"),
    ],
)
def test_invalid_configuration_is_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        ServeConfig(**options)
