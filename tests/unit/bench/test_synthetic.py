import pytest

from peagle.bench.config import parse_synthetic, rates_for, rates_of_length, rates_of_lengths
from peagle.errors import ConfigError
from peagle.speculation import expected_acceptance_length


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
    with pytest.raises(ConfigError, match="18 rates, but K is 19"):
        rates_for("peagle", 19, entries)


def test_a_length_at_k_1_is_no_length_at_every_k() -> None:
    entries = parse_synthetic(["peagle=1:2.0"])
    assert rates_for("peagle", 1, entries) == (1.0,)
    with pytest.raises(ConfigError, match="1 rates, but K is 2"):
        rates_for("peagle", 2, entries)


@pytest.mark.parametrize("lengths", [{3: 4.5}, {3: 3.0, 7: 2.9}, {3: 2.0, 4: 3.0}])
def test_lengths_that_cannot_be_are_refused(lengths: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="impossible"):
        rates_of_lengths(lengths)


@pytest.mark.parametrize(
    ("entry", "k", "message"), [("3.2", 2, "exceeds the maximum of peagle at K=2: 3"), ("0.8,0.6", 3, "2 rates")]
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
