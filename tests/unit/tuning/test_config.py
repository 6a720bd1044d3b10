import pydantic
import pytest

from peagle.tuning.config import TuneConfig


def test_lists_of_values_are_parsed_and_completed():
    config = TuneConfig(methods="peagle,eagle3", precision="bf16,fp8", max_num_seqs="16,1", max_num_batched_tokens=4096)
    assert config.methods == ["none", "peagle", "eagle3"]
    assert (config.precision, config.max_num_seqs) == (["bf16", "fp8"], [1, 16])
    assert config.max_num_batched_tokens == ["4096"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": "ngram"}, "'ngram' is not one of none, peagle, eagle3"),
        ({"precision": "int4"}, "'int4' is not one of auto, bf16"),
        ({"max_num_seqs": "0"}, "max_num_seqs must be whole numbers from 1"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens is auto or whole numbers"),
        ({"num_speculative_tokens": "a"}, "K must be whole numbers"),
        ({"drafter": "heads/mine"}, "is not METHOD=HEAD"),
        ({"drafter": "eagle3=h"}, "drafter eagle3=h: eagle3 is not one of the methods"),
        ({"time_budget_s": 0}, "greater than 0"),
        ({"max_tpot_ms": -1}, "greater than 0"),
        ({"objective": "latency"}, "tokens-per-dollar"),
        ({"budget": 3}, "Extra inputs"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        TuneConfig(**options)
