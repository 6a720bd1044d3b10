"""One engine with two ranks, with tensor or pipeline parallelism, on one node or on two."""

import os
import time
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from peagle import hardware
from tests.chaos import processes
from tests.chaos.ray_nodes import RayNodes

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        hardware.detect().platform != "cpu" or hardware.detect().num_cpus < 2, reason="needs two CPU cores"
    ),
]
PROMPTS = [f"say {n}" for n in range(6)]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def expected_answers(chat_target):
    """The target's greedy answers according to Transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat_target)
    model = AutoModelForCausalLM.from_pretrained(chat_target, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        tokens = tokenizer.encode(f"[{prompt}]", add_special_tokens=False)
        num_prompt_tokens = len(tokens)
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokenizer.decode(tokens[num_prompt_tokens:], skip_special_tokens=True))
    return answers


@pytest.fixture
def generate(peagle, chat_target, write_jsonl, tmp_path):
    """Return a function that starts a run with copies of the prompts, and returns its process and directory."""

    def start(*flags, repeats=1):
        corpus, output = write_jsonl([{"prompt": prompt} for prompt in PROMPTS] * repeats), tmp_path / "run"
        process = peagle(
            "generate", "--model", chat_target, "--drafter", "none", "--precision", "float32", "--input", corpus,
            "--output", output, "--max-tokens", NUM_TOKENS, "--max-model-len", 64, "--max-num-seqs", 4, "--ignore-eos",
            "--kv-cache-gib", 0.1, "--usd-per-hour", 1, *flags,
        )  # fmt: skip
        return process, output

    return start


def require_answers(process, output, expected):
    stdout = process.communicate()[0]
    assert process.returncode == 0, stdout
    rows = ds.dataset(output / "data", format="parquet").to_table().sort_by("id").to_pylist()
    assert {row["num_output_tokens"] for row in rows} == {NUM_TOKENS}
    assert [row["response"].replace(" ", "") for row in rows] == [text.replace(" ", "") for text in expected]


@pytest.mark.parametrize("flags", [("--tensor-parallel-size", 2, "--enforce-eager"), ("--pipeline-parallel-size", 2)])
def test_answers_of_two_ranks_equal_those_of_the_target(generate, expected_answers, flags):
    require_answers(*generate(*flags), expected_answers)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """A cluster of two nodes on this machine, each with all of its cores."""
    num_cpus = hardware.detect().num_cpus
    with RayNodes(2, num_cpus, tmp_path_factory.mktemp("ray")) as nodes, pytest.MonkeyPatch.context() as patch:
        for name, value in nodes.environment.items():
            patch.setitem(os.environ, name, value)
        yield nodes


def follower_processes(output):
    """Return the follower processes of an engine on several nodes."""
    return [pid for pid in processes.actors(output) if "-node-1.log" in str(Path(f"/proc/{pid}/fd/1").readlink())]


def wait_until_engines_end(output):
    deadline = time.monotonic() + 60
    while remaining := processes.engine_processes(output):
        assert time.monotonic() < deadline, [processes.command_line(pid) for pid in remaining]
        time.sleep(0.5)


@pytest.mark.parametrize("flags", [("--tensor-parallel-size", 2, "--enforce-eager"), ("--pipeline-parallel-size", 2)])
def test_answers_of_two_ranks_on_two_nodes_equal_those_of_the_target(two_nodes, generate, expected_answers, flags):
    process, output = generate("--nodes-per-engine", 2, *flags)
    require_answers(process, output, expected_answers)
    assert len(list((output / "logs").glob("engine-*-node-1.log"))) == 1
    wait_until_engines_end(output)


def test_engine_is_replaced_on_both_nodes_after_its_follower_is_killed(two_nodes, generate, expected_answers):
    flags = ("--tensor-parallel-size", 2, "--enforce-eager", "--rows-per-unit", 2)
    process, output = generate("--nodes-per-engine", 2, *flags, repeats=20)
    while not list((output / "data").glob("*.parquet")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    (follower,) = follower_processes(output)
    assert processes.kill(follower)
    require_answers(process, output, expected_answers * 20)
    assert len(list((output / "logs").glob("engine-*-node-1.log"))) == 2
    wait_until_engines_end(output)
