import argparse

import pytest

from jobs import bench, evaluate, flags, generate, plan, serve, train, tune
from jobs.cli import run
from peagle.bench.config import BenchConfig, EvaluateConfig
from peagle.drafter.config import TrainConfig
from peagle.engine.fake import FakeTraits
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


def test_flags_override_variables_which_override_yaml(parse, tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text("max_tokens: 1\ntop_k: 2\nengines: 3\n")
    monkeypatch.setenv("PEAGLE_TOP_K", "20")
    monkeypatch.setenv("PEAGLE_ENGINES", "30")
    config = parse("--config", str(path), "--engines", "300")
    assert (config.max_tokens, config.top_k, config.engines, config.temperature) == (
        1,
        20,
        "300",
        0.0,
    )


@pytest.mark.parametrize(
    ("command", "model", "ungrouped"),
    [
        (bench, BenchConfig, set()),
        (evaluate, EvaluateConfig, set()),
        (generate, GenerateConfig, {"fake"}),
        (plan, PlanConfig, set()),
        (serve, ServeConfig, {"models", "fake"}),
        (train, TrainConfig, set()),
        (tune, TuneConfig, set()),
    ],
)
def test_every_flag_is_in_a_group_of_the_help(command, model, ungrouped):
    grouped = [name for names in command._GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(model.model_fields.keys() - ungrouped)


@pytest.mark.parametrize("command", [generate, serve])
def test_fake_option_is_hidden_in_the_help(command):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert "--engine " in parser.format_help()
    assert "--fake" not in parser.format_help()
    assert parser.parse_args(["--fake", "{}"]).fake == "{}"


def test_fake_options_are_read_from_json_and_yaml(parse, tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text("engine: fake\nfake:\n  token_s: 0.5\n  die_on: poison\n")
    assert parse("--config", str(path)).fake == FakeTraits(token_s=0.5, die_on="poison")
    monkeypatch.setenv("PEAGLE_FAKE", '{"has_core": true}')
    assert parse("--config", str(path)).fake == FakeTraits(has_core=True)
    assert parse("--config", str(path), "--fake", '{"token_s": 1}').fake == FakeTraits(token_s=1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"tokens_s": 1}', r"^fake\.tokens_s: unknown key$"),
        ('{"token_s": -1}', r"^fake\.token_s: .*greater than or equal to 0, not -1$"),
        ('{"token_s": Infinity}', r"^fake\.token_s: .*finite number"),
        ("0.5", "^fake: "),
        ("token_s", "^fake: "),
    ],
)
def test_invalid_fake_options_are_refused(parse, text, message):
    with pytest.raises(ConfigError, match=message):
        parse("--engine", "fake", "--fake", text)


def test_list_and_boolean_flags_are_parsed(parse):
    config = parse("--stop", "a", "--stop", "b", "--no-chat", "--enforce-eager")
    assert (config.stop, config.chat, config.enforce_eager) == (["a", "b"], False, True)


def test_yaml_values_with_colons_are_not_parsed_as_sexagesimal_numbers(parse, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("engines: 2:8\ndeadline: 18:30\nmax_tokens: 64\n")
    config = parse("--config", str(path))
    assert (config.engines, config.deadline, config.max_tokens) == ("2:8", "18:30", 64)
    with pytest.raises(ConfigError, match=r"engines: a number of engines, or MIN:MAX, not '8:2'"):
        parse("--config", str(path), "--engines", "8:2")


@pytest.fixture
def load_serve():
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, ServeConfig, {}, yaml_only=["models"])
    return lambda *argv: flags.load(ServeConfig, parser.parse_args(argv))


@pytest.mark.parametrize("name", ["PEAGLE_PORT", "PEAGLE_METRICS_PORT"])
@pytest.mark.parametrize("value", ["tcp://10.0.0.1:8000", "udp://[fd00::1]:53"])
def test_kubernetes_service_variables_are_ignored(load_serve, monkeypatch, name, value):
    """Kubernetes sets these variables in every pod if the namespace has services named peagle and peagle-metrics."""
    for suffix in ("", "_8000_TCP", "_8000_TCP_PORT"):
        monkeypatch.setenv(name + suffix, value)
    monkeypatch.setenv("PEAGLE_SERVICE_HOST", "10.0.0.1")
    assert (load_serve().port, load_serve().metrics_port) == (8000, None)


def test_empty_variable_is_ignored(parse, monkeypatch):
    monkeypatch.setenv("PEAGLE_TOP_K", "")
    monkeypatch.setenv("PEAGLE_LIMIT", "")
    assert (parse().top_k, parse().limit) == (GenerateConfig.model_fields["top_k"].default, None)


@pytest.mark.parametrize(("name", "value"), [("PEAGLE_PORT", "http"), ("PEAGLE_MAX_NUM_SEQS", "many")])
def test_invalid_variable_is_named(load_serve, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name}: .* not '{value}'"):
        load_serve()
    with pytest.raises(ConfigError, match=r"^port: "):  # a flag has priority over the variable
        load_serve("--port", "x", *([] if name == "PEAGLE_PORT" else ["--max-num-seqs", "1"]))


def test_list_option_is_read_from_the_environment(monkeypatch):
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, BenchConfig, {})
    monkeypatch.setenv("PEAGLE_DRAFTER", "eagle3=heads/mine")
    monkeypatch.setenv("PEAGLE_METHODS", "none,eagle3")
    assert flags.load(BenchConfig, parser.parse_args([])).drafter == ["eagle3=heads/mine"]


def test_error_lists_the_variables_that_set_options(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PEAGLE_INPUT", str(tmp_path / "nothing.jsonl"))
    assert run(["generate", "--engine", "fake", "--output", str(tmp_path / "run")]) == 2
    errors = capsys.readouterr().err
    assert "nothing.jsonl': no such file" in errors
    assert "set by environment variables: PEAGLE_INPUT" in errors


def test_mapping_from_flags_replaces_the_mapping_in_yaml(parse, tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text("engine_args:\n  block_size: 32\n  async_scheduling: false\n")
    assert parse("--config", str(path)).engine_args == {"block_size": 32, "async_scheduling": False}
    config = parse("--config", str(path), "--engine-arg", "block-size=16", "--engine-arg", "stream_interval=4")
    assert config.engine_args == {"block_size": 16, "stream_interval": 4}
    monkeypatch.setenv("PEAGLE_ENGINE_ARGS", "block_size=64")
    assert parse("--config", str(path)).engine_args == {"block_size": 64}
    with pytest.raises(ConfigError, match="'dtype' is managed by peagle; set peagle's 'precision' instead"):
        parse("--engine-arg", "dtype=bfloat16")


def test_flags_made_from_a_configuration_give_the_same_configuration(tmp_path):
    options = {
        "input": "in.jsonl", "output": str(tmp_path / "a b"), "prompt_template": "x {{ prompt }}\n", "chat": False,
        "enforce_eager": True, "max_num_seqs": 1, "drafter": "none", "stop": ["a", "b"], "tags": {"team": "search"},
        "engine_args": {"seed": 3}, "engine": "fake", "fake": {"token_s": 0.5},
    }  # fmt: skip
    config = GenerateConfig(**options)
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    assert flags.load(GenerateConfig, parser.parse_args(flags.to_arguments(config))) == config


def test_old_option_name_target_is_accepted(tmp_path, monkeypatch):
    def model(*argv):
        parser = argparse.ArgumentParser()
        train.add_arguments(parser)
        return flags.load(TrainConfig, parser.parse_args(["--prompts", "stdlib", "--output", "o", *argv])).model

    assert model("--target", "by-flag") == model("--model", "by-flag") == "by-flag"
    (tmp_path / "old.yaml").write_text("target: by-yaml\n")
    assert model("--config", str(tmp_path / "old.yaml")) == "by-yaml"
    monkeypatch.setenv("PEAGLE_TARGET", "by-environment")
    assert model("--config", str(tmp_path / "old.yaml")) == "by-environment"
