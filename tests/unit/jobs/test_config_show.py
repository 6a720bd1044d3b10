import json
from pathlib import Path

import pytest
from tuned_profiles import cell, cells, profile  # noqa: F401 - fixtures

from jobs import cli
from peagle.profiles.profile import write_profile


@pytest.fixture
def job(tmp_path, chat_target):
    path = tmp_path / "job.yaml"
    path.write_text(f"input: in.jsonl\noutput: runs/a\nmodel: {chat_target}\nmax_tokens: 7\ntop_k: 2\n")
    return path


@pytest.fixture
def show_config(capsys):
    def show(*argv):
        assert cli.run(["config", "show", *map(str, argv), "--json", "-"]) == 0
        return {name: (entry["value"], entry["from"]) for name, entry in json.loads(capsys.readouterr().out).items()}

    return show


def test_values_have_their_sources(job, show_config, monkeypatch):
    monkeypatch.setenv("PEAGLE_TOP_K", "3")
    monkeypatch.setenv("PEAGLE_SEED", "4")
    values = show_config(job, "--max-tokens", "9", "--engines", "2")
    assert values["max_tokens"] == (9, "flag")
    assert values["engines"] == ("2", "flag")
    assert values["top_k"] == (3, "environment, PEAGLE_TOP_K")
    assert values["output"] == (str(Path("runs/a").absolute()), str(job))
    assert values["temperature"] == (0.0, "default")
    assert values["max_num_seqs"] == (8, "default on cpu")
    assert values["precision"][1].startswith("detected: ")
    assert values["drafter"][1].startswith("catalog: ")
    assert values["instance_type"] == ("c7a.large", "assumed")


def test_source_of_profile_options(show_config, tmp_path, embedded_target, profile):  # noqa: F811
    write_profile(tmp_path / "profile.yaml", profile)
    path = tmp_path / "serve.yaml"
    path.write_text(f"profile: {tmp_path / 'profile.yaml'}\n")
    values = show_config(path)
    assert values["max_num_seqs"][1] == f"profile {tmp_path / 'profile.yaml'}"
    assert values["profile"][1] == str(path)
    assert values["max_replicas"] == (1, "default")


def test_endpoint_configuration_with_several_models(show_config, tmp_path, chat_target):
    path = tmp_path / "serve.yaml"
    path.write_text(f"model: {chat_target}\nmodels:\n- name: a\n- name: b\n  max_num_seqs: 4\n")
    values = show_config(path)
    assert values["a.max_num_seqs"] == (8, "default on cpu")
    assert "b.max_num_seqs" not in values
    assert [model["name"] for model in values["models"][0]] == ["a", "b"]


def test_invalid_configuration_is_refused(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text("input: a\noutput: b\ntemprature: 1\n")
    assert cli.run(["config", "show", str(path)]) == 2
    assert "did you mean temperature?" in capsys.readouterr().err
    assert cli.run(["config", "show", str(tmp_path / "none.yaml")]) == 2
    path.write_text("input: a\noutput: b\nmodel: nobody/has/it\n")
    assert cli.run(["config", "show", str(path)]) == 2
    printed = capsys.readouterr()
    assert "nobody/has/it" in printed.err
    assert "temperature" in printed.out  # the options are shown nevertheless


def test_flag_of_another_command_is_refused(job):
    with pytest.raises(SystemExit) as error:
        cli.run(["config", "show", str(job), "--max-replicas", "2"])
    assert error.value.code == 2
