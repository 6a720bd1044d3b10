"""Bulk runs with the fake engine on a real Ray cluster generate the responses for training."""

import json

import pyarrow.dataset as ds
import pytest
from rich.console import Console

from peagle.drafter.config import TrainConfig
from peagle.drafter.decontamination import humaneval_references
from peagle.drafter.pipeline import Listener, train_head
from peagle.errors import ConfigError, InputError
from peagle.runs.directory import RunDirectory
from peagle.runs.progress import RunProgress
from pipelines.training.responses import generate_responses

pytestmark = pytest.mark.usefixtures("ray_cluster")
NUM_PROMPTS = 24


@pytest.fixture
def make_config(chat_target, write_jsonl, tmp_path):
    leak = {"id": "leak", "prompt": humaneval_references()[0]}
    prompts = write_jsonl([*({"id": f"p{n}", "prompt": f"count to {n}"} for n in range(NUM_PROMPTS)), leak])
    values = {"draft_vocab_size": 40, "num_depths": 3, "epochs": 1, "precision": "fp32", "device": "cpu"}

    def make(**changes):
        defaults = {"model": str(chat_target), "prompts": [prompts], "output": tmp_path / "out"}
        return TrainConfig(**{**defaults, **values, **changes})

    return make


def generate_with_fake_engine(config, console=None):
    progress = RunProgress(console or Console(quiet=True))
    generate_responses(config, progress, command=["peagle", "train"], engine="fake")


def rows_of(config, mode):
    return ds.dataset(config.responses_folder(mode) / "data", format="parquet").to_table().to_pylist()


def test_head_is_trained_on_greedy_and_sampled_responses(make_config, tmp_path):
    config, output_file = make_config(), tmp_path / "output.txt"
    with output_file.open("w") as stream:
        generate_with_fake_engine(config, Console(file=stream, width=200))
    assert "overlaps humaneval: leak" in output_file.read_text()
    rows_by_mode = {mode: rows_of(config, mode) for mode in ("greedy", "sampled")}
    ids = [row["id"] for rows in rows_by_mode.values() for row in rows]
    assert sorted(ids) == sorted(f"p{n}" for n in range(NUM_PROMPTS))
    assert all(len(rows) >= 3 for rows in rows_by_mode.values())
    runs = {mode: RunDirectory(config.responses_folder(mode)).manifest()["config"] for mode in rows_by_mode}
    assert {mode: (run["temperature"], run["top_p"], run["seed"], run["drafter"]) for mode, run in runs.items()} == {
        "greedy": (0.0, 1.0, None, "none"),
        "sampled": (0.8, 0.95, None, "none"),
    }
    result = train_head(config, Listener())
    assert result["finished"]
    assert result["documents"] + result["held_out_documents"] == NUM_PROMPTS
    card = (tmp_path / "out" / "head" / "README.md").read_text()
    assert "responses of the target (50% of the prompts at temperature 0.8" in card


def test_unfinished_response_run_continues_and_finished_run_is_kept(make_config):
    config = make_config()
    generate_with_fake_engine(config)
    expected = [row["response"] for row in rows_of(config, "sampled")]
    greedy, sampled = (RunDirectory(config.responses_folder(mode)) for mode in ("greedy", "sampled"))
    last_unit = max(sampled.committed())
    sampled.unit_path(last_unit).unlink()  # as if the run had been killed before this commit
    generate_with_fake_engine(config)
    assert [row["response"] for row in rows_of(config, "sampled")] == expected
    assert (len(greedy.sessions()), len(sampled.sessions())) == (1, 2)
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens: was 224, now 7"):
        generate_with_fake_engine(config.model_copy(update={"max_response_tokens": 7}))


def test_prompts_without_a_response_are_counted(make_config, write_jsonl, tmp_path):
    prompts = write_jsonl([{"prompt": "fine"}, {"prompt": "x" * 3000}, {"prompt": None}], name="odd.jsonl")
    config, output_file = make_config(prompts=[prompts], sampled_share=0), tmp_path / "output.txt"
    with output_file.open("w") as stream:
        generate_with_fake_engine(config, Console(file=stream, width=200))
    assert "2 of 3 prompts have no response; first error: the prompt has 3018 tokens" in output_file.read_text()
    assert config.response_sources == [str(config.responses_folder("greedy"))]
    assert len(rows_of(config, "greedy")) == 1


def test_training_without_any_response_is_refused(make_config, write_jsonl):
    prompts = write_jsonl([json.dumps({"prompt": "x" * 600})], name="long.jsonl")
    with pytest.raises(InputError, match="none of 1 prompts has a response; first error: the prompt has 618 tokens"):
        generate_with_fake_engine(make_config(prompts=[prompts]))
