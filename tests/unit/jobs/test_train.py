"""`peagle train`: flags and errors. Training is tested in tests/unit/drafter."""

import importlib.util

import pytest
import torch
from config_only import write_head
from safetensors.torch import save_file

from jobs.cli import run
from peagle.errors import StoppedEarly

SMALL_VOCABULARY = ("--draft-vocab-size", 40)  # the tiny target has 96 tokens


def _train(*arguments):
    return run(["train", *map(str, arguments)])


def test_missing_flag_is_refused(capsys):
    assert _train("--output", "out") == 2
    assert "--prompts is required" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompts", "stdlib", "--responses", "given"), "stdlib has no responses"),
        (("--prompts", "p", "--responses", "given", "--limit", "9"), "limit cannot be combined with --responses given"),
        (("--prompts", "stdlib", "--on-the-fly", "--features", "f"), "features and on_the_fly cannot be combined"),
        (("--prompts", "gs://bucket/p.jsonl"), "gs://bucket/p.jsonl is neither a local path nor in S3"),
        (("--prompts", "p.jsonl", "--responses", "runs/responses"), "'regenerate' or 'given'"),
        (("--prompts", "p", "--algorithm", "dflash", "--num-speculative-tokens", "9"), "num_depths 8 drafts at most 8"),
        (
            ("--prompts", "p", "--algorithm", "dspark", "--num-depths", "1", "--num-speculative-tokens", "1"),
            "a dspark head requires at least 2",
        ),
        (("--prompts", "p.jsonl", "--features", "s3://bucket/f"), "features: must be a folder on a disk"),
        (("--prompts", "p.jsonl", "--output", "s3://bucket/out"), "output: must be a folder on a disk"),
    ],
)
def test_invalid_training_options_are_refused(capsys, arguments, message):
    assert _train("--output", "out", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("responses", ["given", "regenerate"])
def test_missing_prompts_are_refused(chat_target, tmp_path, capsys, responses):
    output = tmp_path / "out"
    flags = ["--target", chat_target, "--prompts", tmp_path / "none", "--responses", responses]
    assert _train(*flags, *SMALL_VOCABULARY, "--output", output) == 2
    assert "has no prompts or responses" in capsys.readouterr().err
    assert not output.exists()


@pytest.fixture
def heads(tmp_path):
    """Heads that do not fit the tiny target."""
    layers = {"hidden_size": 32, "vocab_size": 96}
    inputs = {"eagle_aux_hidden_state_layer_ids": [2, 3]}
    write_head(tmp_path / "unrelated", **inputs)
    write_head(tmp_path / "deep", transformer_layer_config=layers | {"num_hidden_layers": 3}, **inputs)
    fp8 = write_head(tmp_path / "fp8", transformer_layer_config=layers, **inputs)
    save_file({"fc.weight": torch.zeros(2, 2, dtype=torch.float8_e4m3fn)}, fp8 / "model.safetensors")


@pytest.mark.usefixtures("heads")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--init", "nowhere"), "init must be one of warm, random or the folder of a head, got 'nowhere'"),
        (("--init", "."), "config.json cannot be read"),
        (("--device", "cuda"), "torch does not find a GPU on this machine"),
        (("--num-key-value-heads", "3"), "3 KV heads do not divide 4 attention heads"),
        (("--num-layers", "5"), "5 layers cannot start as the last layers of a target that has 4"),
        (("--mask-token-id", "96"), "--mask-token-id 96: the target's tokens are 0 to 95"),
        ((), "--draft-vocab-size 8192: the target has only 96 tokens"),
        (("--init", "unrelated"), "its hidden size is 8, but the target's is 32"),
        (("--init", "deep"), "deep: has 3 layers, but the head to train has 2"),
        (("--init", "fp8"), "fp8: fc.weight is in FP8, which cannot be trained"),
    ],
)
def test_impossible_training_is_refused_early(chat_target, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        "pipelines.training.responses.generate_responses", lambda *_, **__: pytest.fail("generation started")
    )
    monkeypatch.chdir(tmp_path)
    assert _train("--target", chat_target, "--prompts", "stdlib", "--output", "out", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_training_warnings_come_before_generation(foreign_target, monkeypatch, capsys):
    def generate_responses(*_, **__):
        printed = capsys.readouterr()
        assert "might not serve heads for 'gemma3_text' targets" in printed.out
        assert "the head starts with random weights" in printed.out
        raise StoppedEarly("generation would start")

    monkeypatch.setattr("pipelines.training.responses.generate_responses", generate_responses)
    flags = ["--target", foreign_target("gemma3_text"), "--prompts", "stdlib"]
    assert _train(*flags, *SMALL_VOCABULARY, "--output", "out") == 3
    assert "generation would start" in capsys.readouterr().err


def test_generating_responses_requires_ray(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _train("--prompts", "stdlib", "--output", "out") == 2
    assert "use --responses given" in capsys.readouterr().err
