"""Where a choice holds, by lines worked by hand (the head of ranges.py)."""

from typing import Any

import pytest

from peagle.profiles.ranges import acceptance_range, best_at, best_with_acceptance, break_evens, concurrency_range


def test_the_bounds_are_where_another_measured_configuration_is_as_fast(cell: Any) -> None:
    chosen = cell("peagle", 3, 4, 50.0, 1.6)
    low, high = acceptance_range(chosen, [chosen, cell("none", 0, 4, 40.0)])
    assert low == pytest.approx(1.28)  # 31.25 * 1.28 = 40
    assert high == 4.0, "K=3 cannot yield more"


def test_a_larger_k_bounds_it_from_above(cell: Any, cells: Any) -> None:
    # K=5: 48 / 1.75 * (1 + 0.75 s) = 27.43 + 20.57 s; K=3: 31.25 + 18.75 s. They cross at s = 2.1.
    low, high = acceptance_range(cells[0], cells)
    assert (low, high) == (pytest.approx(1.28), pytest.approx(1 + 0.6 * 2.1, abs=0.01))


def test_the_measured_length_is_within_even_where_another_was_a_little_faster(cell: Any) -> None:
    chosen = cell("peagle", 3, 4, 50.0, 1.6)
    low, high = acceptance_range(chosen, [chosen, cell("none", 0, 4, 50.4), cell("peagle", 5, 4, 50.4, 1.9)])
    assert low == 1.6 == high


def test_a_limit_bounds_it_where_the_time_per_token_would_break_it(cell: Any) -> None:
    chosen = cell("peagle", 3, 4, 50.0, 1.6).model_copy(update={"tpot_s": {"p95": 0.020}})
    cells = [chosen, cell("none", 0, 4, 40.0)]
    assert acceptance_range(chosen, cells, max_tpot_ms=22)[0] == pytest.approx(1.6 * 20 / 22)
    assert acceptance_range(chosen, cells, max_tpot_ms=40)[0] == pytest.approx(1.28), "the other bound is the nearer"
    assert acceptance_range(chosen, cells, max_tpot_ms=19)[0] == 1.6, "what was measured is within"


def test_drafts_break_even_where_a_token_takes_as_long_as_without_them(cell: Any, cells: Any) -> None:
    assert break_evens(cells[0], cells) == pytest.approx({4: 1.28, 1: 1.2, 16: 2.0})  # as 1.6 * 40 / 50
    assert break_evens(cells[1], cells) == pytest.approx({4: 1.75 * 40 / 48})
    assert break_evens(cells[2], cells) == {}
    ngram = cell("ngram", 3, 4, 50.0, 1.6)
    assert break_evens(ngram, [*cells, ngram]) == {}


def test_without_drafts_there_is_no_range_of_acceptance(cells: Any) -> None:
    assert acceptance_range(cells[2], cells) is None


def test_concurrencies_reach_as_far_as_the_same_choice_wins(cells: Any, cell: Any) -> None:
    assert concurrency_range(cells[0], cells) == (1, 4)
    assert concurrency_range(cells[5], cells) == (16, 16)
    level = [cell("peagle", 3, 16, 99.0, 1.6) if c.concurrency == 16 and c.drafts else c for c in cells]
    assert concurrency_range(level[0], level) == (1, 16), "as good within 2 %"


def test_the_best_elsewhere_is_that_of_the_nearest_measurement(cells: Any) -> None:
    assert best_at(cells, 30).method == "none"
    assert best_at(cells, 2.5).concurrency == 4
    assert best_at(cells, 1.5).concurrency == 1


@pytest.mark.parametrize(("length", "best", "ratio"), [(1.1, ("none", 0), 40 / 34.375), (1.6, ("peagle", 3), 1.0)])
def test_the_best_at_another_acceptance(cells: Any, length: float, best: Any, ratio: float) -> None:
    found, times = best_with_acceptance(cells[0], cells, length)
    assert ((found.method, found.k), times) == (best, pytest.approx(ratio))


def test_no_more_than_every_draft_can_be_accepted(cells: Any) -> None:
    # At s = 5, K=3 would have 4 tokens a step: 125. K=5 has 27.43 + min(102.9, 5 * 27.43) = 130.3.
    found, times = best_with_acceptance(cells[0], cells, 4.0)
    assert (found.k, times) == (5, pytest.approx(130.286 / 125, rel=1e-3))
