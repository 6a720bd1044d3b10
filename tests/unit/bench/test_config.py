from pathlib import Path

import pydantic
import pytest

from peagle.bench.config import BenchConfig, EvaluateConfig, as_benchmark, whole_numbers
from peagle.drafter.config import TrainConfig
from peagle.tuning.config import TuneConfig


@pytest.mark.parametrize(
    ("given", "numbers"),
    [("8, 1", [1, 8]), (["4,2", 2], [2, 4]), (["3,5", "5,8"], [3, 5, 8]), ([1, 2], [1, 2]), (4, [4])],
)
def test_numbers_from_flags_environment_and_yaml(given, numbers):
    assert whole_numbers(given, "N", 8) == numbers


@pytest.mark.parametrize("value", ["0", "9", "", "1,", "-1", "1.5", 2.5, "x", ["3", "-1"]])
def test_other_things_are_refused_by_name(value):
    with pytest.raises(ValueError, match="N must be whole numbers from 1 to 8"):
        whole_numbers(value, "N", 8)


@pytest.mark.parametrize("command", [BenchConfig, EvaluateConfig, TuneConfig])
def test_results_are_kept_on_a_disk(command):
    assert command(output="runs/mine").output == Path("runs/mine")
    with pytest.raises(pydantic.ValidationError, match="has to be a folder on a disk"):
        command(output="s3://bucket/mine")


def test_the_benchmark_of_another_command_has_what_was_said_and_no_more():
    config = TuneConfig(model="mine", usd_per_hour=2, max_tokens=9, output="runs/tuned", precision="fp8")
    benchmark = as_benchmark(config, precision="bf16", concurrency=[2])
    assert (benchmark.model, benchmark.usd_per_hour, benchmark.max_tokens) == ("mine", 2, 9)
    assert (benchmark.precision, benchmark.concurrency, benchmark.output) == ("bf16", [2], None)
    assert benchmark.model_fields_set == {"model", "usd_per_hour", "max_tokens", "precision", "concurrency"}


def test_k_of_an_evaluation():
    assert EvaluateConfig(num_speculative_tokens="7,3").num_speculative_tokens == [3, 7]
    with pytest.raises(pydantic.ValidationError, match="K must be whole numbers from 1 to 32"):
        EvaluateConfig(num_speculative_tokens="33")


def test_a_drafter_by_itself_and_several():
    assert EvaluateConfig(drafter="peagle").drafter == ["peagle"]
    assert EvaluateConfig().drafter == ["auto"]


def test_none_has_nothing_to_accept():
    with pytest.raises(pydantic.ValidationError, match="no acceptance to measure"):
        EvaluateConfig(drafter=["peagle", "none"])


def test_a_temperature_that_vllm_refuses_is_refused_before_an_engine_starts():
    with pytest.raises(pydantic.ValidationError, match="less than or equal to 2"):
        EvaluateConfig(temperature=2.5)
    with pytest.raises(pydantic.ValidationError, match="less than or equal to 2"):
        TrainConfig(prompts=["stdlib"], output="out", temperature=2.5)


def test_lists_from_one_flag_and_several():
    config = BenchConfig(methods=["none,eagle3", "none"], num_speculative_tokens=["7,3"], concurrency="8,1")
    assert config.methods == ["none", "eagle3"]
    assert config.num_speculative_tokens == [3, 7]
    assert config.concurrency == [1, 8]


def test_without_any_key_it_is_the_shipped_head_against_none():
    config = BenchConfig()
    assert (config.methods, config.num_speculative_tokens, config.concurrency) == (
        ["none", "peagle"],
        [3, 5, 7],
        [1, 4, 8],
    )
    assert not config.is_synthetic
    assert config.sampling() == {"temperature": 0.0, "max_tokens": 256}


def test_text_that_means_nothing_ends_at_its_full_length():
    config = BenchConfig(load_format="dummy", synthetic_acceptance="3.2")
    assert config.is_synthetic
    assert config.sampling()["ignore_eos"] is True


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"methods": "none,eagle"}, "is not one of none, peagle, eagle3, ngram, suffix"),
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
def test_what_contradicts_itself_is_refused(keys, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        BenchConfig(**keys)


def test_dummy_weights_alone_mean_nothing_either():
    assert BenchConfig(load_format="dummy").is_synthetic


def test_a_head_of_the_catalog_says_its_method_by_itself():
    config = BenchConfig(methods="none,peagle,eagle3", drafter=["smollm2-135m-peagle", "eagle3=heads/mine"])
    assert config.heads == {"peagle": "smollm2-135m-peagle", "eagle3": "heads/mine"}
