import json
from dataclasses import replace

import pytest

from peagle.speculation import (
    SpeculationStats,
    break_even_acceptance_length,
    drafter_warning,
)


def stats(num_drafts: int, *accepted: int) -> SpeculationStats:
    num_draft_tokens = num_drafts * len(accepted)
    return SpeculationStats(num_drafts=num_drafts, num_draft_tokens=num_draft_tokens, accepted_per_position=accepted)


def test_acceptance_length_counts_the_bonus_token():
    statistics = stats(100, 48, 10, 2)
    assert statistics.num_accepted_tokens == 60
    assert statistics.acceptance_length == pytest.approx(1.60)
    assert statistics.acceptance_rates == pytest.approx((0.48, 0.10, 0.02))
    assert statistics.draft_acceptance_rate == pytest.approx(0.2)


def test_statistics_without_drafts_are_unknown():
    empty = SpeculationStats.empty()
    assert empty.acceptance_length is None
    assert empty.draft_acceptance_rate is None
    assert empty.acceptance_rates == ()
    assert drafter_warning(empty.acceptance_length, break_even=1.5) is None


def test_histogram_is_converted_to_accepted_tokens_per_position():
    accepted_in_each_step = [0, 0, 3, 1, 2, 0, 3, 1, 1]
    histogram = [accepted_in_each_step.count(j) for j in range(4)]
    measured = SpeculationStats.from_histogram(histogram, num_draft_tokens=27)
    assert measured.num_drafts == len(accepted_in_each_step)
    assert measured.num_accepted_tokens == sum(accepted_in_each_step)
    assert measured.accepted_per_position == tuple(
        sum(accepted > position for accepted in accepted_in_each_step) for position in range(3)
    )


def test_empty_histogram_has_no_drafts():
    assert SpeculationStats.from_histogram([], 0) == SpeculationStats.empty()
    assert SpeculationStats.from_histogram([0, 0], 0).acceptance_length is None


def test_statistics_can_be_added():
    longer, shorter = stats(10, 6, 3, 1), stats(5, 4)
    total = longer + shorter
    assert total == SpeculationStats(num_drafts=15, num_draft_tokens=35, accepted_per_position=(10, 3, 1))
    assert total == shorter + longer
    assert longer + SpeculationStats.empty() == longer
    assert sum([longer, shorter], SpeculationStats.empty()) == total


def test_speculation_json_round_trip():
    original = stats(10, 6, 3, 1)
    assert SpeculationStats.from_dict(json.loads(json.dumps(original.to_dict()))) == original
    assert "num_lookup_tokens" not in original.to_dict()  # as in records without a lookup
    with_lookup = replace(original, num_lookup_tokens=4)
    assert SpeculationStats.from_dict(json.loads(json.dumps(with_lookup.to_dict()))) == with_lookup
    assert (with_lookup + with_lookup + original).num_lookup_tokens == 8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"accepted_per_position": (3, 6, 1)}, "prefix"),
        ({"accepted_per_position": (11,)}, "prefix"),
        ({"num_draft_tokens": 5}, "10 tokens accepted, but 5 drafted"),
        ({"num_drafts": -1}, "negative"),
        ({"accepted_per_position": (True,)}, "whole numbers"),
        ({"num_draft_tokens": 30.0}, "whole numbers"),
        ({"accepted_per_position": [6, 3, 1]}, "whole numbers"),
        ({"num_lookup_tokens": 11}, "11 lookup tokens exceed 10 accepted"),
        ({"num_lookup_tokens": -1}, "negative"),
        ({"num_lookup_tokens": "3"}, "whole numbers"),
    ],
)
def test_contradictory_counts_are_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        replace(stats(10, 6, 3, 1), **changes)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"num_drafts": 1, "num_draft_tokens": 1, "accepted_per_position": [1], "accepted": 1},
        {"num_drafts": 1, "num_draft_tokens": 1, "accepted_per_position": "1"},
        {"num_drafts": "1", "num_draft_tokens": 1, "accepted_per_position": [1]},
    ],
)
def test_malformed_counts_are_refused(data):
    with pytest.raises(ValueError, match=r"counts|list"):
        SpeculationStats.from_dict(data)


@pytest.mark.parametrize("step_times", [(0.0, 0.02), (0.02, 0.0), (-1.0, 0.02), (float("nan"), 0.02)])
def test_step_time_that_is_not_positive_is_refused(step_times):
    with pytest.raises(ValueError, match="positive"):
        break_even_acceptance_length(*step_times)
