import json
from dataclasses import replace

import pytest

from peagle.speculation import (
    SpeculationStats,
    break_even_acceptance_length,
    expected_acceptance_length,
    note,
    sources_note,
    speedup,
)


def stats(num_drafts: int, *accepted: int) -> SpeculationStats:
    return SpeculationStats(
        num_drafts=num_drafts,
        num_draft_tokens=num_drafts * len(accepted),
        accepted_per_position=accepted,
    )


def test_the_acceptance_length_counts_the_bonus_token():
    measured = stats(100, 48, 10, 2)
    assert measured.num_accepted_tokens == 60
    assert measured.acceptance_length == pytest.approx(1.60)
    assert measured.acceptance_rates == pytest.approx((0.48, 0.10, 0.02))
    assert measured.draft_acceptance_rate == pytest.approx(0.2)


def test_without_drafts_nothing_is_claimed():
    none = SpeculationStats.empty()
    assert none.acceptance_length is None
    assert none.draft_acceptance_rate is None
    assert none.acceptance_rates == ()
    assert note(none.acceptance_length, break_even=1.5) is None


def test_a_histogram_agrees_with_counting_the_steps_one_by_one():
    accepted_in_each_step = [0, 0, 3, 1, 2, 0, 3, 1, 1]
    histogram = [accepted_in_each_step.count(j) for j in range(4)]
    measured = SpeculationStats.from_histogram(histogram, num_draft_tokens=27)
    assert measured.num_drafts == len(accepted_in_each_step)
    assert measured.num_accepted_tokens == sum(accepted_in_each_step)
    assert measured.accepted_per_position == tuple(
        sum(accepted > position for accepted in accepted_in_each_step) for position in range(3)
    )


def test_a_request_without_steps_has_an_empty_histogram():
    assert SpeculationStats.from_histogram([], 0) == SpeculationStats.empty()
    assert SpeculationStats.from_histogram([0, 0], 0).acceptance_length is None


def test_adding_pads_the_shorter_and_empty_is_neutral():
    longer, shorter = stats(10, 6, 3, 1), stats(5, 4)
    total = longer + shorter
    assert total == SpeculationStats(num_drafts=15, num_draft_tokens=35, accepted_per_position=(10, 3, 1))
    assert total == shorter + longer
    assert longer + SpeculationStats.empty() == longer
    assert sum([longer, shorter], SpeculationStats.empty()) == total


def test_json_and_back():
    original = stats(10, 6, 3, 1)
    assert SpeculationStats.from_dict(json.loads(json.dumps(original.to_dict()))) == original
    assert "num_lookup_tokens" not in original.to_dict()  # as records are that were made without a lookup
    looked_up = replace(original, num_lookup_tokens=4)
    assert SpeculationStats.from_dict(json.loads(json.dumps(looked_up.to_dict()))) == looked_up
    assert (looked_up + looked_up + original).num_lookup_tokens == 8


def test_no_more_is_looked_up_than_is_accepted():
    for num_lookup_tokens, reason in ((11, "11 of 10 accepted"), (-1, "negative"), ("3", "whole numbers")):
        with pytest.raises(ValueError, match=reason):
            replace(stats(10, 6, 3, 1), num_lookup_tokens=num_lookup_tokens)


def test_who_drafted_what_was_accepted_is_said_where_a_lookup_did():
    assert sources_note(stats(10, 6, 3, 1)) is None
    said = sources_note(replace(stats(4000, 3000, 1000), num_lookup_tokens=1500))
    assert said == (
        "Of 4,000 accepted draft tokens, 1,500 were found by the prompt lookup; the other 2,500 are the head's."
    )


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ((10, 30, (3, 6, 1)), "prefix"),
        ((10, 30, (11,)), "prefix"),
        ((10, 5, (6,)), "6 tokens accepted, but 5 drafted"),
        ((-1, 0, ()), "negative"),
        ((2, 4, (True,)), "whole numbers"),
        ((2, 4.0, (1,)), "whole numbers"),
        ((2, 4, [1]), "whole numbers"),
    ],
)
def test_counts_that_contradict_each_other_are_refused(counts, reason):
    num_drafts, num_draft_tokens, accepted = counts
    with pytest.raises(ValueError, match=reason):
        SpeculationStats(num_drafts=num_drafts, num_draft_tokens=num_draft_tokens, accepted_per_position=accepted)


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


def test_break_even_is_where_the_speedup_is_one():
    needed = break_even_acceptance_length(0.039, 0.0255)
    assert needed == pytest.approx(1.529, abs=1e-3)
    assert speedup(needed, 0.039, 0.0255) == pytest.approx(1)
    assert speedup(2 * needed, 0.039, 0.0255) == pytest.approx(2)


@pytest.mark.parametrize("step_times", [(0.0, 0.02), (0.02, 0.0), (-1.0, 0.02), (float("nan"), 0.02)])
def test_a_step_takes_time(step_times):
    with pytest.raises(ValueError, match="positive"):
        break_even_acceptance_length(*step_times)


def test_a_smaller_k_keeps_the_first_rates():
    measured = stats(100, 48, 10, 2)
    lengths = [expected_acceptance_length(measured.acceptance_rates, k) for k in range(4)]
    assert lengths == pytest.approx([1.0, 1.48, 1.58, 1.60])
    assert lengths[-1] == pytest.approx(measured.acceptance_length)
    with pytest.raises(ValueError, match="0 to 3"):
        expected_acceptance_length(measured.acceptance_rates, 4)


def test_the_note_speaks_only_when_the_drafter_is_known_to_cost():
    assert note(1.6) is None
    assert note(1.6, break_even=1.53) is None
    sentence = note(1.6, break_even=4.2)
    assert sentence is not None
    assert "1.60" in sentence
    assert "4.20" in sentence
    assert "--drafter none" in sentence
    hopeless = note(1.01)
    assert hopeless is not None
    assert "rejected" in hopeless
