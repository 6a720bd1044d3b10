from peagle.profiles.watch import DrafterWatch, break_even_at

BREAK_EVENS = {1: 1.5, 8: 2.0}


def test_break_even_is_that_of_the_nearest_concurrency():
    break_evens = [break_even_at(BREAK_EVENS, concurrency) for concurrency in (0.2, 1, 2.8, 2.9, 8, 64)]
    assert break_evens == [1.5, 1.5, 1.5, 2.0, 2.0, 2.0]
    assert break_even_at(BREAK_EVENS, None) is None
    assert break_even_at({}, 3) is None


def test_warning_is_given_once_and_names_the_flag():
    watch = DrafterWatch(BREAK_EVENS)
    assert watch.new_warnings(num_drafts=199, acceptance_length=1.2, concurrency=1) == []  # too few drafts
    assert watch.new_warnings(num_drafts=200, acceptance_length=1.6, concurrency=1) == []
    (warning,) = watch.new_warnings(num_drafts=300, acceptance_length=1.6, concurrency=7)
    assert "1.60 tokens per step, but this hardware needs 2.00" in warning
    assert "--drafter none" in warning
    assert watch.new_warnings(num_drafts=400, acceptance_length=1.3, concurrency=7) == []


def test_default_concurrency_is_that_of_the_engine():
    assert DrafterWatch(BREAK_EVENS, 8).break_even_length == 2.0
    assert DrafterWatch(BREAK_EVENS, 8).new_warnings(num_drafts=300, acceptance_length=1.9)
    assert DrafterWatch(BREAK_EVENS).break_even_length is None
    assert DrafterWatch(BREAK_EVENS).new_warnings(num_drafts=300, acceptance_length=1.9) == []


def test_without_measurements_the_warning_needs_nearly_all_drafts_rejected():
    assert DrafterWatch({}, 8).new_warnings(num_drafts=300, acceptance_length=1.2) == []
    (warning,) = DrafterWatch({}, 8).new_warnings(num_drafts=300, acceptance_length=1.02)
    assert "nearly all drafts are rejected" in warning
