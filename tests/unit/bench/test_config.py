from typing import Any

import pydantic
import pytest

from peagle.bench.config import BenchConfig, parse_synthetic, rates_for, rates_of_length, rates_of_lengths
from peagle.errors import ConfigError
from peagle.speculation import expected_acceptance_length


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


@pytest.mark.parametrize(("length", "k"), [(1.0, 3), (2.4, 3), (4.0, 3), (3.25, 7)])
def test_rates_of_a_length_add_up_to_it(length: float, k: int) -> None:
    assert expected_acceptance_length(rates_of_length(length, k), k) == pytest.approx(length)


def test_the_most_particular_entry_wins() -> None:
    entries = parse_synthetic(["2", "peagle=0.8,0.5,0.2", "peagle:1=0.9"])
    assert rates_for("peagle", 1, entries) == (0.9,)
    assert rates_for("peagle", 2, entries) == (0.8, 0.5)
    assert rates_for("eagle3", 2, entries) == (1.0, 0.0)


def test_a_single_share_is_a_rate_and_one_is_a_length() -> None:
    assert rates_for("ngram", 1, parse_synthetic(["0.7"])) == (0.7,)
    assert rates_for("ngram", 1, parse_synthetic(["1"])) == (0.0,)


def test_a_method_of_which_nothing_is_said_has_none() -> None:
    assert rates_for("eagle3", 2, parse_synthetic(["peagle=3"])) is None


def test_published_lengths_hold_at_their_k_and_lie_on_a_line_between() -> None:
    # P-EAGLE for Qwen3-Coder-30B-A3B on HumanEval (its model card).
    entries = parse_synthetic(["peagle=4:4.30,10:6.66,18:7.51"])
    lengths = {k: 1 + sum(rates_for("peagle", k, entries) or ()) for k in (3, 4, 7, 10, 11, 18)}
    assert lengths == pytest.approx({3: 3.475, 4: 4.30, 7: 5.48, 10: 6.66, 11: 6.76625, 18: 7.51}, abs=1e-4)
    with pytest.raises(ConfigError, match="18 positions, and K is 19"):
        rates_for("peagle", 19, entries)


def test_a_length_at_k_1_is_no_length_at_every_k() -> None:
    entries = parse_synthetic(["peagle=1:2.0"])
    assert rates_for("peagle", 1, entries) == (1.0,)
    with pytest.raises(ConfigError, match="1 positions, and K is 2"):
        rates_for("peagle", 2, entries)


@pytest.mark.parametrize("lengths", [{3: 4.5}, {3: 3.0, 7: 2.9}, {3: 2.0, 4: 3.0}])
def test_lengths_that_cannot_be_are_refused(lengths: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        rates_of_lengths(lengths)


@pytest.mark.parametrize(
    ("entry", "k", "message"), [("3.2", 2, "more than peagle can reach at K=2: 3"), ("0.8,0.6", 3, "2 positions")]
)
def test_what_does_not_reach_a_k_is_refused(entry: str, k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rates_for("peagle", k, parse_synthetic([entry]))


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
def test_what_is_of_no_form_is_refused(entries: list[str]) -> None:
    with pytest.raises(ValueError, match=r"synthetic|NUMBERS|number|neither"):
        parse_synthetic(entries)
