from typing import Any

import pydantic
import pytest

from peagle.bench.config import BenchConfig


def test_lists_from_one_flag_and_several() -> None:
    config = BenchConfig(methods=["none,eagle3", "none"], num_speculative_tokens=["7,3"], concurrency="8,1")
    assert config.methods == ["none", "eagle3"]
    assert config.num_speculative_tokens == [3, 7]
    assert config.concurrency == [1, 8]


def test_without_any_key_it_is_the_shipped_head_against_none() -> None:
    config = BenchConfig()
    assert (config.methods, config.num_speculative_tokens, config.concurrency) == (
        ["none", "peagle"],
        [3, 5, 7],
        [1, 4, 8],
    )
    assert not config.is_synthetic
    assert config.sampling() == {"temperature": 0.0, "max_tokens": 256}


def test_text_that_means_nothing_ends_at_its_full_length() -> None:
    config = BenchConfig(load_format="dummy", synthetic_acceptance="3.2")
    assert config.is_synthetic
    assert config.sampling()["ignore_eos"] is True


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"methods": "none,eagle"}, "methods are none, peagle, eagle3, ngram, suffix"),
        ({"num_speculative_tokens": "0"}, "K must be whole numbers"),
        ({"concurrency": "x"}, "concurrencies must be whole numbers"),
        ({"drafter": "heads/mine"}, "METHOD=HEAD"),
        ({"drafter": "ngram=heads/mine"}, "METHOD=HEAD"),
        ({"drafter": ["peagle=a", "peagle=b"]}, "a method has one head"),
        ({"drafter": "eagle3=a"}, "is of none of the methods"),
        ({"concurrency": "1,8", "max_num_seqs": 4}, "below the largest concurrency"),
        ({"methods": "none", "synthetic_acceptance": "2"}, "needs a method that drafts"),
        ({"synthetic_acceptance": "0.5,0.7"}, "never rise"),
    ],
)
def test_what_contradicts_itself_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        BenchConfig(**keys)


def test_dummy_weights_alone_mean_nothing_either() -> None:
    assert BenchConfig(load_format="dummy").is_synthetic
