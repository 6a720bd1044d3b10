"""What is said when a run leaves the tuned range: the figure, the range, the better measurement and its flags."""

import pytest

from peagle.profiles.profile import MeasuredCell, Profile, Tuned
from peagle.profiles.watch import DrafterWatch, acceptance_advice, concurrency_advice, needed_at, reliable_length

NEEDED = {1: 1.5, 8: 2.0}


@pytest.mark.parametrize("length", [1.3, 1.6, 2.2, None])
def test_within_the_range_nothing_is_said(profile: Profile, length: float | None) -> None:
    assert acceptance_advice(profile, length) is None


def test_below_it_no_speculation_is_named_with_what_it_would_give(profile: Profile) -> None:
    said = acceptance_advice(profile, 1.1)
    assert said is not None
    assert "The acceptance length is 1.10, and the profile holds from 1.28 to 2.26." in said
    assert "no speculation 40.0 output tokens/s, P-EAGLE K=3 50.0" in said
    assert "no speculation would be 1.16 times as fast: --drafter none." in said


def test_above_it_the_larger_k_is_named(profile: Profile) -> None:
    said = acceptance_advice(profile, 3.4)
    assert said is not None
    assert "P-EAGLE K=5 would be" in said
    assert "--drafter peagle --num-speculative-tokens 5" in said


@pytest.mark.parametrize("concurrency", [None, 0.95, 1, 3.2, 4.2])
def test_concurrencies_around_the_range_are_fine(profile: Profile, concurrency: float | None) -> None:
    assert concurrency_advice(profile, concurrency) is None


def test_another_concurrency_names_the_best_there(profile: Profile) -> None:
    said = concurrency_advice(profile, 12)
    assert said == (
        "12 requests are in an engine at once, and the profile holds from 1 to 4. Measured at 16 at once: no "
        "speculation 100.0 output tokens/s, P-EAGLE K=3 80.0: --drafter none --max-num-seqs 16."
    )


def test_where_nothing_better_was_measured_it_says_what_to_measure(profile: Profile) -> None:
    said = concurrency_advice(profile, 6)
    assert said is not None
    assert "The nearest measurement is at 4: tune with --max-num-seqs nearer to it." in said


def test_few_drafts_are_not_believed() -> None:
    assert reliable_length(199, 1.2) is None
    assert reliable_length(200, 1.2) == 1.2
    assert reliable_length(0, None) is None


def test_what_breaks_a_limit_of_the_profile_is_not_advised(profile: Profile) -> None:
    limited = profile.model_copy(update={"objective": {"max_tpot_ms": 40}})
    assert limited.alternatives == [profile.chosen], "no other has latencies"
    said = concurrency_advice(limited, 12)
    assert said is not None
    assert "no speculation" not in said


def limited(profile: Profile, cells: list[MeasuredCell], plain_tpot_ms: float) -> Profile:
    """The profile as tuned under a limit of 22 ms, which P-EAGLE K=3 keeps by 2 ms."""
    tpot_ms = {("peagle", 3): 20.0, ("peagle", 5): 22.0, ("none", 0): plain_tpot_ms}
    timed = [cell.model_copy(update={"tpot_s": {"p95": tpot_ms[cell.method, cell.k] / 1000}}) for cell in cells]
    changes = {"measurements": timed, "tuned": Tuned.of(timed[0], timed, max_tpot_ms=22)}
    return profile.model_copy(update=changes | {"objective": {"max_tpot_ms": 22}})


def test_an_acceptance_that_breaks_the_limit_is_said_with_what_keeps_it(
    profile: Profile, cells: list[MeasuredCell]
) -> None:
    assert acceptance_advice(profile, 1.4) is None, "without a limit it is the fastest there"
    said = acceptance_advice(limited(profile, cells, 21.0), 1.4)
    assert said is not None
    assert "holds from 1.45 to 2.26. Its p95 time per output token would be 22.9 ms, and the limit is 22 ms." in said
    assert "at this acceptance no speculation would be 0.91 times as fast: --drafter none." in said


def test_an_acceptance_at_which_nothing_keeps_the_limit_is_said_to_be(
    profile: Profile, cells: list[MeasuredCell]
) -> None:
    said = acceptance_advice(limited(profile, cells, 25.0), 1.4)
    assert said is not None
    assert said.endswith("No measured configuration would be within it: tune with prompts like these.")


def test_what_is_needed_is_that_of_the_nearest_measured_concurrency() -> None:
    assert [needed_at(NEEDED, at_once) for at_once in (0.2, 1, 2.8, 2.9, 8, 64)] == [1.5, 1.5, 1.5, 2.0, 2.0, 2.0]
    assert needed_at(NEEDED, None) is None
    assert needed_at({}, 3) is None


def test_a_drafter_that_costs_more_than_it_saves_is_told_once_with_the_flag_that_leaves_it_out() -> None:
    watch = DrafterWatch(NEEDED)
    assert watch.new(num_drafts=199, acceptance_length=1.2, concurrency=1) == []  # too few to believe
    assert watch.new(num_drafts=200, acceptance_length=1.6, concurrency=1) == []
    (said,) = watch.new(num_drafts=300, acceptance_length=1.6, concurrency=7)
    assert "1.60 tokens a step, and this hardware needs 2.00" in said
    assert "--drafter none" in said
    assert watch.new(num_drafts=400, acceptance_length=1.3, concurrency=7) == []


def test_where_nobody_says_how_many_run_at_once_it_is_the_engines_slots() -> None:
    assert DrafterWatch(NEEDED, 8).needed == 2.0
    assert DrafterWatch(NEEDED, 8).new(num_drafts=300, acceptance_length=1.9)
    assert DrafterWatch(NEEDED).needed is None
    assert DrafterWatch(NEEDED).new(num_drafts=300, acceptance_length=1.9) == []


def test_without_a_measurement_only_the_hopeless_is_told() -> None:
    assert DrafterWatch({}, 8).new(num_drafts=300, acceptance_length=1.2) == []
    (said,) = DrafterWatch({}, 8).new(num_drafts=300, acceptance_length=1.02)
    assert "nearly every draft is rejected" in said
