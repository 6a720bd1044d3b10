import argparse

import pytest

from jobs import bench, evaluate, flags, generate, plan, serve, train, tune
from peagle.bench.config import BenchConfig
from peagle.drafter.config import TrainConfig
from peagle.drafter.evaluation.config import EvaluateConfig
from peagle.errors import ConfigError
from peagle.planning.config import PlanConfig
from peagle.tuning.config import TuneConfig
from pipelines.batch.config import GenerateConfig
from pipelines.online.config import ServeConfig


@pytest.fixture
def parse():
    def parse(*argv):
        parser = argparse.ArgumentParser()
        flags.add_flags(parser, GenerateConfig, {})
        return flags.load(GenerateConfig, parser.parse_args(["--input", "i", "--output", "o", *argv]))

    return parse


def test_flag_over_environment_over_yaml_over_default(parse, tmp_path, monkeypatch):
    config = tmp_path / "c.yaml"
    config.write_text("max_tokens: 1\ntop_k: 2\nengines: 3\n")
    monkeypatch.setenv("PEAGLE_TOP_K", "20")
    monkeypatch.setenv("PEAGLE_ENGINES", "30")
    found = parse("--config", str(config), "--engines", "300")
    assert (found.max_tokens, found.top_k, found.engines, found.temperature) == (1, 20, "300", 0.0)


def test_every_key_has_a_flag_with_help():
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, GenerateConfig, {})
    text = parser.format_help()
    for name, field in GenerateConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description


@pytest.mark.parametrize(
    ("command", "model", "yaml_only"),
    [
        (bench, BenchConfig, set()),
        (evaluate, EvaluateConfig, set()),
        (generate, GenerateConfig, set()),
        (plan, PlanConfig, set()),
        (serve, ServeConfig, {"models"}),
        (train, TrainConfig, set()),
        (tune, TuneConfig, set()),
    ],
)
def test_every_flag_stands_under_a_heading(command, model, yaml_only):
    grouped = [name for names in command._GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(model.model_fields.keys() - yaml_only)


def test_lists_repeat_and_booleans_negate(parse):
    found = parse("--stop", "a", "--stop", "b", "--no-chat", "--enforce-eager")
    assert (found.stop, found.chat, found.enforce_eager) == (["a", "b"], False, True)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("temprature: 1\n", "unknown key 'temprature'\n  did you mean temperature?"),
        ("temperature: hot\n", "temperature: .*number.*'hot'"),
        ("max_tokens: 0\n", "max_tokens: .*greater than or equal to 1"),
        ("engine: vlm\n", "engine: .*'vllm' or 'fake'"),
        ("a: [\n", "not valid YAML"),
        ("- a\n", "keys and values"),
        ("prompt_column: a\nprompt_template: b\n", "exclude each other"),
    ],
)
def test_bad_yaml_says_which_key_and_why(parse, tmp_path, yaml, message):
    config = tmp_path / "c.yaml"
    config.write_text(yaml)
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(config))


def test_a_missing_config_file_and_a_missing_flag(parse):
    with pytest.raises(ConfigError, match="No such file"):
        parse("--config", "missing.yaml")
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, GenerateConfig, {})
    with pytest.raises(ConfigError, match="--output is needed"):
        flags.load(GenerateConfig, parser.parse_args(["--input", "x"]))


def test_what_looks_like_a_number_to_the_base_of_60_is_text(parse, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("engines: 2:8\ndeadline: 18:30\nmax_tokens: 64\n")
    found = parse("--config", str(config))
    assert (found.engines, found.deadline, found.max_tokens) == ("2:8", "18:30", 64)
    with pytest.raises(ConfigError, match=r"engines: a number of engines, or MIN:MAX, not '8:2'"):
        parse("--config", str(config), "--engines", "8:2")
