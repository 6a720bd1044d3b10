"""The responses of a training, made by bulk runs on a real Ray cluster with the engine's stand-in."""

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
from pipelines.training.responses import regenerate

pytestmark = pytest.mark.usefixtures("ray_cluster")
NUM_PROMPTS = 24


@pytest.fixture
def config(speaking_target, write_jsonl, tmp_path):
    leak = {"id": "leak", "prompt": humaneval_references()[0]}
    prompts = write_jsonl([*({"id": f"p{n}", "prompt": f"count to {n}"} for n in range(NUM_PROMPTS)), leak])
    values = {"draft_vocab_size": 40, "num_depths": 3, "epochs": 1, "precision": "fp32", "device": "cpu"}

    def make(**changes):
        source = {"target": str(speaking_target), "prompts": [prompts], "output": tmp_path / "out"}
        return TrainConfig(**{**source, **values, **changes})

    return make


def answer(config, console=None):
    progress = RunProgress(console or Console(quiet=True))
    regenerate(config, progress, command=["peagle", "train"], engine="fake")


def rows_of(config, way):
    return ds.dataset(config.answers(way) / "data", format="parquet").to_table().to_pylist()


def test_the_target_answers_greedily_and_by_sampling_and_a_head_is_trained_on_it(config, tmp_path):
    config, said = config(), tmp_path / "said.txt"
    with said.open("w") as stream:
        answer(config, Console(file=stream, width=200))
    assert "overlaps humaneval: leak" in said.read_text()
    ways = {way: rows_of(config, way) for way in ("greedy", "sampled")}
    asked = [row["input_id"] for rows in ways.values() for row in rows]
    assert sorted(asked) == sorted(f"p{n}" for n in range(NUM_PROMPTS))
    assert all(len(rows) >= 3 for rows in ways.values())
    runs = {way: RunDirectory(config.answers(way)).manifest()["config"] for way in ways}
    assert {way: (run["temperature"], run["top_p"], run["seed"], run["drafter"]) for way, run in runs.items()} == {
        "greedy": (0.0, 1.0, None, "none"),
        "sampled": (0.8, 0.95, None, "none"),
    }
    result = train_head(config, Listener())
    assert result["finished"]
    assert result["documents"] + result["held_out_documents"] == NUM_PROMPTS
    card = (tmp_path / "out" / "head" / "README.md").read_text()
    assert "responses of the target (50% of the prompts at temperature 0.8" in card


def test_a_killed_run_continues_and_a_finished_one_is_left_alone(config):
    config = config()
    answer(config)
    expected = [row["response"] for row in rows_of(config, "sampled")]
    greedy, sampled = (RunDirectory(config.answers(way)) for way in ("greedy", "sampled"))
    lost = max(sampled.committed())
    sampled.unit_path(lost).unlink()  # as if killed before it was committed
    answer(config)
    assert [row["response"] for row in rows_of(config, "sampled")] == expected
    assert (len(greedy.sessions()), len(sampled.sessions())) == (1, 2)
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens: was 224, now 7"):
        answer(config.model_copy(update={"max_response_tokens": 7}))


def test_prompts_that_get_no_response_are_counted(config, write_jsonl, tmp_path):
    prompts = write_jsonl([{"prompt": "fine"}, {"prompt": "x" * 3000}, {"prompt": None}], name="odd.jsonl")
    config, said = config(prompts=[prompts], sampled_share=0), tmp_path / "said.txt"
    with said.open("w") as stream:
        answer(config, Console(file=stream, width=200))
    assert "2 of 3 prompts have no response; the first: the prompt has 3018 tokens" in said.read_text()
    assert config.response_sources == [str(config.answers("greedy"))]
    assert len(rows_of(config, "greedy")) == 1


def test_no_response_at_all_is_an_error(config, write_jsonl):
    prompts = write_jsonl([json.dumps({"prompt": "x" * 600})], name="long.jsonl")
    with pytest.raises(InputError, match="none of 1 prompts has a response; the first: the prompt has 618 tokens"):
        answer(config(prompts=[prompts]))
