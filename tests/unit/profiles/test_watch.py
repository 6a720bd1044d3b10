"""Warnings about drafters that cost more than they save."""

from peagle.profiles.watch import DrafterWatch, needed_at

NEEDED = {1: 1.5, 8: 2.0}


def test_what_is_needed_is_that_of_the_nearest_measured_concurrency():
    assert [needed_at(NEEDED, at_once) for at_once in (0.2, 1, 2.8, 2.9, 8, 64)] == [1.5, 1.5, 1.5, 2.0, 2.0, 2.0]
    assert needed_at(NEEDED, None) is None
    assert needed_at({}, 3) is None


def test_a_drafter_that_costs_more_than_it_saves_is_told_once_with_the_flag_that_leaves_it_out():
    watch = DrafterWatch(NEEDED)
    assert watch.new(num_drafts=199, acceptance_length=1.2, concurrency=1) == []  # too few to believe
    assert watch.new(num_drafts=200, acceptance_length=1.6, concurrency=1) == []
    (said,) = watch.new(num_drafts=300, acceptance_length=1.6, concurrency=7)
    assert "1.60 tokens a step, and this hardware needs 2.00" in said
    assert "--drafter none" in said
    assert watch.new(num_drafts=400, acceptance_length=1.3, concurrency=7) == []


def test_where_nobody_says_how_many_run_at_once_it_is_the_engines_slots():
    assert DrafterWatch(NEEDED, 8).needed == 2.0
    assert DrafterWatch(NEEDED, 8).new(num_drafts=300, acceptance_length=1.9)
    assert DrafterWatch(NEEDED).needed is None
    assert DrafterWatch(NEEDED).new(num_drafts=300, acceptance_length=1.9) == []


def test_without_a_measurement_only_the_hopeless_is_told():
    assert DrafterWatch({}, 8).new(num_drafts=300, acceptance_length=1.2) == []
    (said,) = DrafterWatch({}, 8).new(num_drafts=300, acceptance_length=1.02)
    assert "nearly every draft is rejected" in said
