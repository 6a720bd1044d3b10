"""The simulated INT8 of the quality benchmark, and its likelihoods."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.precision.emulated import Int8Linear, load
from benchmarks.precision.quality import accepted, drawn, greedy_answers, negative_log_likelihood
from benchmarks.precision.summary import summarize
from peagle.catalog.int8_weights import convert, quantize
from peagle.drafter.head import build_head
from peagle.drafter.head_spec import HeadSpec
from peagle.drafter.vocabulary import frequent_vocabulary


def test_a_layer_is_the_exact_integer_product() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 64, generator=generator), torch.randn(5, 64, generator=generator)
    stored, scale = quantize("w", weight)
    bias = torch.randn(24, generator=generator)
    levels = x.abs().amax(dim=1, keepdim=True) / 127
    sums = (x / levels).round().to(torch.int64) @ stored.T.to(torch.int64)
    assert torch.allclose(Int8Linear(stored, scale, bias)(x), sums * levels * scale.T + bias, rtol=1e-5)
    assert torch.equal(Int8Linear(stored, scale, None)(torch.zeros(1, 64)), torch.zeros(1, 24))


def test_a_target_in_int8_is_near_itself(target: Path, tmp_path: Path) -> None:
    convert(target, tmp_path)
    plain, converted = (
        negative_log_likelihood(load(target, folder), [1, 2, 3], [4, 5, 6, 7]) for folder in (None, tmp_path)
    )
    assert converted != plain
    assert converted == pytest.approx(plain, abs=0.8)


def test_a_likelihood_is_that_of_the_response_alone(target: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = [1, 2, 3, 4, 5]
    labels = torch.tensor([[-100, -100, -100, 4, 5]])
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), labels=labels).loss.item()
    assert negative_log_likelihood(model, ids[:3], ids[3:]) == pytest.approx(2 * expected, rel=1e-5)


def test_answers_are_greedy_whatever_they_are_batched_with(speaking_target: Path) -> None:
    model, tokenizer = load(speaking_target, None), AutoTokenizer.from_pretrained(speaking_target)
    chats = ["[ab]", "[a much longer chat]"]
    alone = [greedy_answers(model, tokenizer, [chat], 12)[0] for chat in chats]
    assert greedy_answers(model, tokenizer, chats, 12) == alone
    for chat, answer in zip(chats, alone, strict=True):
        ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            likeliest = model(torch.tensor([ids + answer])).logits[0].argmax(-1).tolist()
        assert likeliest[len(ids) - 1 : -1] == answer


@pytest.mark.parametrize("algorithm", ["peagle", "eagle3"])
def test_accepted_drafts_make_up_the_answer(target: Path, algorithm: str) -> None:
    vocabulary = frequent_vocabulary([1, 2, 3], size=48, target_size=96, always=[95])
    head = build_head(target, HeadSpec(aux_layers=(1, 2, 3), algorithm=algorithm, num_layers=1), vocabulary).eval()
    histogram = accepted(load(target, None), head, [1, 2, 3], [4, 5, 6, 7, 8, 9], 3)
    assert len(histogram) == 4
    # A step yields its accepted drafts and one token more; the first token is prefill's, the last step's may be cut.
    steps, drafts = sum(histogram), sum(number * count for number, count in enumerate(histogram))
    assert 5 <= steps + drafts <= 6


def test_more_problems_begin_with_the_fewer() -> None:
    rows = [{"id": number} for number in range(20)]
    assert drawn(rows, 20)[:5] == drawn(rows, 5) != rows[:5]


def test_the_figures_add_up() -> None:
    def side(nats: float, passed: bool, accepted: list[int]) -> dict[str, Any]:
        return {"nats": nats, "passed": passed, "answer": f"{passed}", "accepted": {"peagle": accepted}}

    problems = {
        "a": {"num_tokens": 10, "float32": side(5.0, True, [1, 1, 2]), "int8": side(6.0, True, [2, 1, 1])},
        "b": {"num_tokens": 30, "float32": side(9.0, True, [1, 0, 0]), "int8": side(9.0, False, [1, 0, 0])},
    }
    found = summarize({"responses": {}, "problems": problems})
    assert found["passed"] == {"float32": 2, "int8": 1}
    assert (found["passed_with_float32_alone"], found["passed_with_int8_alone"], found["equal_answers"]) == (1, 0, 1)
    nats = found["nats_per_token"]["problems"]
    assert (nats["float32"], nats["int8"], nats["num_tokens"]) == (14 / 40, 15 / 40, 40)
    assert (nats["more"], nats["standard_error"]) == (pytest.approx(0.05), pytest.approx(0.05))
    lengths = found["acceptance_length"]["peagle"]
    assert (lengths["float32"]["length"], lengths["int8"]["length"]) == (1 + 5 / 5, 1 + 3 / 5)
