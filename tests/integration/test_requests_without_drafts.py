"""`logit_bias` and `min_p` give the same answers with a drafter as without one, next to requests with drafts.

Real engines in float32: a request that vLLM cannot draft for has the target's own text, and so have the others in its
batch, whose drafts are verified in the same steps.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "biased_tokens.py"
PROMPTS = ["The capital of France is", "def fib(n):", "1, 2, 3, 4, 5, 6,", "Once upon a time"]
GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "logprobs": 0}
# These tokens are frequent; 7.5 makes one win where its logit is close, and 100 everywhere.
SAMPLING = {
    "plain": GREEDY,
    "biased": {**GREEDY, "logit_bias": {"253": 7.5, "28": -100.0, "198": -4.0}},
    "forced": {**GREEDY, "logit_bias": {"253": 100.0}},
    # Only the likeliest token remains, which equals greedy.
    "min_p": {**GREEDY, "temperature": 1.0, "min_p": 1.0},
}

pytestmark = pytest.mark.timeout(600)


def answers(folder: Path, method: str, *, lookup: bool = False) -> dict[str, list[dict[str, object]]]:
    job, out = folder / f"{method}.json", folder / f"{method}-{lookup}.out"
    job.write_text(json.dumps({"method": method, "lookup": lookup, "prompts": PROMPTS, "sampling": SAMPLING}))
    ended = subprocess.run([sys.executable, SCRIPT, job, out], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result: dict[str, list[dict[str, object]]] = json.loads(out.read_text())
    return result


@pytest.fixture(scope="module")
def without_drafter(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    return answers(tmp_path_factory.mktemp("none"), "none")


@pytest.mark.parametrize(("method", "lookup"), [("peagle", False), ("peagle", True), ("eagle3", False)])
def test_requests_without_draft_support_are_not_drafted(method, lookup, without_drafter, tmp_path):
    result = answers(tmp_path, method, lookup=lookup)
    for name in SAMPLING:
        texts = [[answer["text"] for answer in answers_by_name[name]] for answers_by_name in (result, without_drafter)]
        assert texts[0] == texts[1], name
        for drafted, own in zip(result[name], without_drafter[name], strict=True):
            assert drafted["logprobs"] == pytest.approx(own["logprobs"], abs=1e-3)
        drafts = [answer["num_drafts"] for answer in result[name]]
        assert all(drafts) if name == "plain" else not any(drafts), name


def test_parameters_have_their_effect(without_drafter):
    texts = {name: [answer["text"] for answer in answers_] for name, answers_ in without_drafter.items()}
    assert texts["min_p"] == texts["plain"]
    assert all(biased != plain for biased, plain in zip(texts["biased"], texts["plain"], strict=True))
    assert len(set(texts["forced"])) == 1
