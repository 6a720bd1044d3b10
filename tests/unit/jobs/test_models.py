import argparse
import re

import pytest

from jobs import models
from peagle.catalog.cards import load_catalog
from peagle.errors import ConfigError


@pytest.fixture(autouse=True)
def peagle_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))


def run(*argv):
    parser = argparse.ArgumentParser()
    models.add_arguments(parser)
    return models.run(parser.parse_args(argv))


def test_list_of_models_is_complete(capsys):
    code, result = run()
    names = load_catalog().names()
    assert code == 0
    assert [model["name"] for model in result["models"]] == names
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_card_has_facts_and_sources(capsys):
    code, result = run("gpt-oss-120b")
    printed = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert result["architecture"]["num_layers"] == 36
    assert "amazon/gpt-oss-120b-p-eagle" in printed
    assert "pull 32887" in printed


def test_published_speeds_are_printed_as_a_table(capsys):
    _, result = run("qwen3-coder-30b-a3b-instruct")
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("SPEED-Bench, Code: published, one B200, FP8, output tokens/s")
    rows = [re.split(r" {2,}", line.strip()) for line in lines[start + 1 : start + 11]]
    assert rows[0] == ["requests at once", "1", "4", "8", "32", "128"]
    assert rows[1] == ["no speculation", "294", "889", "1,587", "4,452", "10,943"]
    assert rows[3] == ["P-EAGLE K=7", "828", "2,656", "4,638", "10,643", "23,329"]
    assert rows[8] == ["best P-EAGLE / EAGLE-3", "1.41", "1.33", "1.24", "1.07", "1.02"]
    assert rows[9] == ["best P-EAGLE / no speculation", "2.97", "3.12", "2.95", "2.59", "2.13"]
    assert lines[start + 11].strip().startswith("[AWS machine learning blog")
    assert [table["dataset"] for table in result["published"]] == ["HumanEval", "SPEED-Bench, Code"]


def test_published_deployments_are_listed(capsys):
    run("qwen3-coder-30b-a3b-instruct")
    printed = " ".join(capsys.readouterr().out.split())
    assert "SageMaker JumpStart (its walk-through), ml.g7e.2xlarge: K=3" in printed
    assert "…" not in printed, "the address is not shortened"


@pytest.mark.parametrize("name", load_catalog().names())
def test_card_rows_have_sources(name):
    rows = models.card_rows(load_catalog().get(name))
    labels_without_source = {label for label, _, source in rows if not source}
    assert labels_without_source <= {"target", "", "speculation"}


def test_sagemaker_variables_are_printed_with_their_source(capsys):
    _, result = run("gpt-oss-20b", "--sagemaker-env")
    comment, *lines = capsys.readouterr().out.splitlines()
    assert comment.startswith("# gpt-oss 20B; drafter: peagle, K=7: advice for up to 64 concurrent requests [")
    assert dict(line.split("=", 1) for line in lines) == result["environment"]
    assert result["environment"]["SM_VLLM_MODEL"] == "openai/gpt-oss-20b"


def test_sagemaker_env_needs_a_model():
    with pytest.raises(ConfigError, match="requires the name of a model"):
        run("--sagemaker-env")
