"""The simulated INT8 of the quality benchmark, and its likelihoods."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.precision.quality import Int8Linear, Text, likelihood, load
from peagle.catalog.int8_weights import convert, quantize


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
    text = Text(prompt=[1, 2, 3], response=[4, 5, 6, 7])
    plain, converted = (likelihood(load(target, folder), [text]) for folder in (None, tmp_path))
    assert plain.num_tokens == converted.num_tokens == 4
    assert converted.nats_per_token != plain.nats_per_token
    assert converted.nats_per_token == pytest.approx(plain.nats_per_token, abs=0.2)


def test_a_likelihood_is_that_of_the_response_alone(target: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = [1, 2, 3, 4, 5]
    labels = torch.tensor([[-100, -100, -100, 4, 5]])
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), labels=labels).loss.item()
    found = likelihood(model, [Text(prompt=ids[:3], response=ids[3:])])
    assert found.nats_per_token == pytest.approx(expected, rel=1e-5)
