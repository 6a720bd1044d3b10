import argparse
from functools import partial

import pytest

from jobs import serve
from jobs.flags import load
from peagle.engine.sagemaker import variable_of
from peagle.errors import ConfigError
from pipelines.online import sagemaker
from pipelines.online.config import ServeConfig
from pipelines.online.sagemaker import SageMakerConfig, config_class, config_from_env

CONTAINER_VARIABLES = {"PEAGLE_SAGEMAKER": "true", "SM_VLLM_MODEL": "smollm2-135m"}


@pytest.fixture
def load_config(monkeypatch):
    """Return a function that loads the configuration of `peagle serve` from variables and arguments."""

    def load_config(env, *arguments):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        return load(config_class(env), parser.parse_args(arguments), config_from_env(env), partial(variable_of, env))

    return load_config


def test_sagemaker_sets_address_and_drain_time(load_config):
    config = load_config(CONTAINER_VARIABLES)
    assert (config.host, config.port, config.url) == ("0.0.0.0", 8080, "http://0.0.0.0:8080/v1")
    assert config.is_behind_sagemaker
    assert (config.served[0].served_name, config.served[0].drain_s) == ("smollm2-135m", 15)


def test_sagemaker_variables_are_ignored_elsewhere(load_config):
    config = load_config({"SM_VLLM_MODEL": "another", "PEAGLE_SAGEMAKER": "false"})
    assert type(config) is ServeConfig
    assert (config.host, config.model, config.is_behind_sagemaker) == ("127.0.0.1", "smollm2-135m", False)


def test_flags_override_variables_and_variables_override_the_file(load_config, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("max_num_seqs: 1\nmax_model_len: 111\nmax_choices: 2\n")
    env = CONTAINER_VARIABLES | {"SM_VLLM_MAX_MODEL_LEN": "512", "SM_VLLM_MAX_NUM_SEQS": "4", "SM_VLLM_PORT": "8081"}
    config = load_config(env | {"PEAGLE_MAX_NUM_SEQS": "3"}, "--config", str(file), "--port", "8082")
    assert (config.max_model_len, config.max_num_seqs, config.port, config.max_choices) == (512, 3, 8082, 2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "no model: set SM_VLLM_MODEL"),
        ({"model": "m", "drain_s": 25}, "less than or equal to 20"),
        ({"model": "m", "min_replicas": 0}, "greater than or equal to 1"),
        ({"models": [{"model": "m"}]}, "drain_s of at most 20"),
        ({"models": [{"model": "m", "min_replicas": 0}], "drain_s": 5}, "min_replicas of at least 1"),
        ({"model": "m", "idle_timeout": "30m"}, "restarts a container that exits"),
    ],
)
def test_configuration_that_sagemaker_does_not_allow_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        SageMakerConfig(**options)


@pytest.mark.parametrize(
    ("text", "is_enabled"), [("", False), ("no", False), ("0", False), ("on", True), ("TRUE", True)]
)
def test_sagemaker_mode_is_enabled_by_a_variable(text, is_enabled):
    assert sagemaker.is_enabled({"PEAGLE_SAGEMAKER": text}) is is_enabled


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"SM_VLLM_MAX_NUM_SEQS": "-1"}, "SM_VLLM_MAX_NUM_SEQS: Input should be greater"),
        ({"SM_VLLM_MAX_MODEL_LEN": "4"}, "SM_VLLM_MAX_MODEL_LEN: Input should be greater"),
        ({"SM_VLLM_KV_CACHE_MEMORY_BYTES": "0"}, "SM_VLLM_KV_CACHE_MEMORY_BYTES: Input should be greater"),
        ({"SM_VLLM_LIMIT_MM_PER_PROMPT": '{"smell": 1}'}, "SM_VLLM_LIMIT_MM_PER_PROMPT: unknown modality 'smell'"),
    ],
)
def test_error_names_the_variable(load_config, variables, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(CONTAINER_VARIABLES | variables)


def test_ignored_variables_are_reported_in_one_note():
    env = {"SM_VLLM_MODEL": "m", "SM_VLLM_SEED": "1", "OTHER": "x"}
    note = sagemaker.ignored_variables(env)
    assert note.startswith("SM_VLLM_MODEL and 1 more ignored: ")
    assert "PEAGLE_SAGEMAKER=true" in note
    assert sagemaker.ignored_variables(env | {"PEAGLE_SAGEMAKER": "false"}) is None
    assert sagemaker.ignored_variables(CONTAINER_VARIABLES) is None
    assert sagemaker.ignored_variables({"OTHER": "x"}) is None
