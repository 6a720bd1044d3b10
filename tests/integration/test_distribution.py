"""Above temperature 0, text follows the target's own distribution with every drafter.

The drafters are P-EAGLE and EAGLE-3, with and without a prompt lookup, and no drafter. A real engine in float32 draws
several thousand samples for one prompt. The joint distribution of the first four tokens is compared with that of the
same target in Transformers. The first token is never drafted. The other three are drafted and verified. Half of the
samples are drawn without other requests, half with concurrent greedy requests, whose answers must not change.
"""

import functools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from chi_square import MIN_EXPECTED, p_value, power, sharpened

MODEL = "smollm2-135m"
TEXT = "class Stack:\n    def __init__(self"
# The lookup finds the last tokens earlier in the text and drafts the continuation `, size`.
REPETITIVE_TEXT = (
    "class Queue:\n    def __init__(self, size=None):\n        pass\n\nclass Stack:\n    def __init__(self"
)
GREEDY = ["The capital of France is", "def fibonacci(n):\n", "Water boils at", "Once upon a time, there"]
NUM_JOINT, NUM_SAMPLES, K = 4, 3072, 3
LEVEL = 1e-4  # significance of each comparison; with thirty of them, one run in three hundred fails by chance

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def target(embedded_target):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded_target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens_of(embedded_target):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_target).encode


@pytest.fixture(scope="module")
def target_probabilities(target, tokens_of):
    """Return a function that returns the target's probabilities of sequences of four tokens.

    Sequences that are too rare for the chi-square test are omitted.
    """

    @functools.cache
    def probabilities(text, top_p):
        return joint_probabilities(target, tokens_of(text), top_p, MIN_EXPECTED / NUM_SAMPLES)

    return probabilities


def joint_probabilities(target, prompt, top_p, min_probability):
    result = {(): 1.0}
    for _ in range(NUM_JOINT):
        batch = torch.tensor([[*prompt, *tokens] for tokens in result])
        with torch.inference_mode():
            rows = torch.cat([target(part).logits[:, -1] for part in batch.split(32)]).double().softmax(-1)
        result = {
            (*tokens, token): prefix_probability * probability
            for (tokens, prefix_probability), row in zip(result.items(), rows, strict=True)
            for token, probability in nucleus(row, top_p)
            if prefix_probability * probability >= min_probability
        }
    return result


def nucleus(row, top_p):
    """Return the tokens of top-p sampling with their normalised probabilities, without those below 1e-4."""
    values, tokens = row.sort(descending=True)
    is_likely = values.cumsum(0) - values < top_p
    values, tokens = values[is_likely] / values[is_likely].sum(), tokens[is_likely]
    is_frequent = values > 1e-4
    return list(zip(tokens[is_frequent].tolist(), values[is_frequent].tolist(), strict=True))


@pytest.fixture
def draw_samples(tokens_of, tmp_path):
    """Return a function that runs `sampled_tokens.py` with a drafter and returns the result."""

    def run(method, text, top_p, *, lookup, verify):
        job = {
            "model": MODEL, "method": method, "k": K, "lookup": lookup, "verify": verify,
            "prompt": tokens_of(text), "tokens": NUM_JOINT,
            "greedy": GREEDY, "num_samples": NUM_SAMPLES, "sampling": {"temperature": 1.0, "top_p": top_p},
        }  # fmt: skip
        paths = tmp_path / "job.json", tmp_path / "sampled.json"
        paths[0].write_text(json.dumps(job))
        command = [sys.executable, str(Path(__file__).with_name("sampled_tokens.py")), *map(str, paths)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads(paths[1].read_text())

    return run


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize(
    ("method", "lookup", "verify"),
    [
        ("peagle", False, "all"),
        ("eagle3", False, "all"),
        ("none", False, "all"),
        ("peagle", True, "all"),
        ("eagle3", True, "all"),
        ("peagle", False, "auto"),
    ],
)
def test_samples_follow_the_targets_distribution(method, lookup, verify, top_p, draw_samples, target_probabilities):
    text = REPETITIVE_TEXT if lookup else TEXT
    result = draw_samples(method, text, top_p, lookup=lookup, verify=verify)
    probabilities = target_probabilities(text, top_p)
    assert (result["num_accepted"] > 0) if method != "none" else result["num_accepted"] is None
    assert (result["num_looked_up"] > 100) == lookup, "the lookup found too few drafts for a meaningful test"
    assert len(result["greedy"]) > 2
    assert len(set(map(str, result["greedy"]))) == 1, "concurrent sampled requests changed greedy answers"
    separate, concurrent = (Counter(map(tuple, result[half])) for half in ("separate", "concurrent"))
    assert separate.total() == concurrent.total() == NUM_SAMPLES // 2
    values = [p_value(counts, probabilities) for counts in (separate, concurrent, separate + concurrent)]
    assert min(values) > LEVEL, (
        values,
        (separate + concurrent).most_common(10),
        sorted(probabilities.items(), key=lambda k: -k[1]),
    )
    # The test would nearly always detect a sampler with temperature 0.8 instead of 1.
    assert power(probabilities, sharpened(probabilities, 0.8), NUM_SAMPLES, LEVEL) > 0.98
