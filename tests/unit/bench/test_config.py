from pathlib import Path

import pydantic
import pytest

from peagle.bench.config import (
    BenchConfig,
    EvaluateConfig,
    as_benchmark,
    parse_synthetic_acceptance,
    rates_for,
    rates_from_length,
    rates_from_lengths_by_k,
    whole_numbers,
)
from peagle.drafter.config import TrainConfig
from peagle.errors import ConfigError
from peagle.tuning.config import TuneConfig


@pytest.mark.parametrize(
    ("value", "numbers"),
    [("8, 1", [1, 8]), (["4,2", 2], [2, 4]), (["3,5", "5,8"], [3, 5, 8]), ([1, 2], [1, 2]), (4, [4])],
)
def test_numbers_are_read_from_flags_environment_and_yaml(value, numbers):
    assert whole_numbers(value, "N", 8) == numbers


@pytest.mark.parametrize("command", [BenchConfig, EvaluateConfig, TuneConfig])
def test_output_must_be_on_disk(command):
    assert command(output="runs/mine").output == Path("runs/mine")
    with pytest.raises(pydantic.ValidationError, match="must be a folder on a disk"):
        command(output="s3://bucket/mine")


def test_as_benchmark_copies_only_options_that_the_user_set():
    config = TuneConfig(model="mine", usd_per_hour=2, max_tokens=9, output="runs/tuned", precision="fp8")
    benchmark = as_benchmark(config, precision="bf16", concurrency=[2])
    assert (benchmark.model, benchmark.usd_per_hour, benchmark.max_tokens) == ("mine", 2, 9)
    assert (benchmark.precision, benchmark.concurrency, benchmark.output) == ("bf16", [2], None)
    assert benchmark.model_fields_set == {"model", "usd_per_hour", "max_tokens", "precision", "concurrency"}


def test_method_none_cannot_be_evaluated():
    with pytest.raises(pydantic.ValidationError, match="no acceptance to measure"):
        EvaluateConfig(drafter=["peagle", "none"])


def test_invalid_temperatures_are_refused():
    with pytest.raises(pydantic.ValidationError, match="less than or equal to 2"):
        EvaluateConfig(temperature=2.5)
    with pytest.raises(pydantic.ValidationError, match="less than or equal to 2"):
        TrainConfig(prompts=["stdlib"], output="out", temperature=2.5)


def test_dummy_weights_generate_the_full_length():
    config = BenchConfig(load_format="dummy", synthetic_acceptance="3.2")
    assert config.is_synthetic
    assert config.sampling()["ignore_eos"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": "none,eagle"}, "is not one of none, peagle, eagle3, dflash, dspark, ngram, suffix"),
        ({"num_speculative_tokens": "0"}, "K must be whole numbers"),
        ({"concurrency": "x"}, "concurrencies must be whole numbers"),
        ({"drafter": "heads/mine"}, "METHOD=HEAD"),
        ({"drafter": "ngram=heads/mine"}, "METHOD=HEAD"),
        ({"drafter": ["peagle=a", "peagle=b"]}, "peagle is given twice"),
        ({"drafter": "eagle3=a"}, "is not one of the methods"),
        ({"concurrency": "1,8", "max_num_seqs": 4}, "smaller than the largest concurrency"),
        ({"methods": "none", "synthetic_acceptance": "2"}, "requires a method that drafts"),
        ({"synthetic_acceptance": "0.5,0.7"}, "non-increasing rates"),
    ],
)
def test_contradictory_options_are_refused(options, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        BenchConfig(**options)


def test_method_of_a_catalog_head_is_known():
    config = BenchConfig(methods="none,peagle,eagle3", drafter=["smollm2-135m-peagle", "eagle3=heads/mine"])
    assert config.heads == {"peagle": "smollm2-135m-peagle", "eagle3": "heads/mine"}


@pytest.mark.parametrize(("length", "k"), [(1.0, 3), (2.4, 3), (4.0, 3), (3.25, 7)])
def test_rates_add_up_to_the_acceptance_length(length, k):
    assert 1 + sum(rates_from_length(length, k)[:k]) == pytest.approx(length)


def test_most_specific_synthetic_acceptance_is_used():
    entries = parse_synthetic_acceptance(["2", "peagle=0.8,0.5,0.2", "peagle:1=0.9"])
    assert rates_for("peagle", 1, entries) == (0.9,)
    assert rates_for("peagle", 2, entries) == (0.8, 0.5)
    assert rates_for("eagle3", 2, entries) == (1.0, 0.0)


def test_acceptance_lengths_are_interpolated_between_ks():
    # P-EAGLE for Qwen3-Coder-30B-A3B on HumanEval (its model card).
    entries = parse_synthetic_acceptance(["peagle=4:4.30,10:6.66,18:7.51"])
    lengths = {k: 1 + sum(rates_for("peagle", k, entries) or ()) for k in (3, 4, 7, 10, 11, 18)}
    assert lengths == pytest.approx({3: 3.475, 4: 4.30, 7: 5.48, 10: 6.66, 11: 6.76625, 18: 7.51}, abs=1e-4)
    with pytest.raises(ConfigError, match="18 rates, but K is 19"):
        rates_for("peagle", 19, entries)


@pytest.mark.parametrize("lengths", [{3: 4.5}, {3: 3.0, 7: 2.9}, {3: 2.0, 4: 3.0}])
def test_impossible_acceptance_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="impossible"):
        rates_from_lengths_by_k(lengths)


@pytest.mark.parametrize(
    ("entry", "k", "message"), [("3.2", 2, "exceeds the maximum of peagle at K=2: 3"), ("0.8,0.6", 3, "2 rates")]
)
def test_synthetic_acceptance_that_does_not_fit_k_is_refused(entry, k, message):
    with pytest.raises(ConfigError, match=message):
        rates_for("peagle", k, parse_synthetic_acceptance([entry]))


@pytest.mark.parametrize(
    "entries",
    [
        ["x"],
        ["-1"],
        ["1.5,0.5"],
        ["none=2"],
        ["peagle:x=2"],
        ["2", "3"],
        ["inf"],
        ["3:x"],
        ["3:3,2"],
        ["0:1,4:3"],
        ["4:3,4:2"],
        ["-1:1,4:3"],
    ],
)
def test_invalid_synthetic_acceptance_is_refused(entries):
    with pytest.raises(ValueError, match=r"synthetic|NUMBERS|number|neither"):
        parse_synthetic_acceptance(entries)
