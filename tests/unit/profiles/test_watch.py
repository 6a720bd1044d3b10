from peagle.profiles.watch import DrafterWatch, break_even_at

NEEDED = {1: 1.5, 8: 2.0}


def test_needed_length_of_the_nearest_concurrency():
    needed = [break_even_at(NEEDED, concurrency) for concurrency in (0.2, 1, 2.8, 2.9, 8, 64)]
    assert needed == [1.5, 1.5, 1.5, 2.0, 2.0, 2.0]
    assert break_even_at(NEEDED, None) is None
    assert break_even_at({}, 3) is None


def test_the_warning_names_the_flag():
    watch = DrafterWatch(NEEDED)
    assert watch.new_warnings(num_drafts=199, acceptance_length=1.2, concurrency=1) == []  # too few drafts
    assert watch.new_warnings(num_drafts=200, acceptance_length=1.6, concurrency=1) == []
    (warning,) = watch.new_warnings(num_drafts=300, acceptance_length=1.6, concurrency=7)
    assert "1.60 tokens per step, but this hardware needs 2.00" in warning
    assert "--drafter none" in warning
    assert watch.new_warnings(num_drafts=400, acceptance_length=1.3, concurrency=7) == []


def test_the_default_concurrency_is_that_of_the_engine():
    assert DrafterWatch(NEEDED, 8).break_even_length == 2.0
    assert DrafterWatch(NEEDED, 8).new_warnings(num_drafts=300, acceptance_length=1.9)
    assert DrafterWatch(NEEDED).break_even_length is None
    assert DrafterWatch(NEEDED).new_warnings(num_drafts=300, acceptance_length=1.9) == []


def test_without_measurements_only_rejected_drafts_have_a_warning():
    assert DrafterWatch({}, 8).new_warnings(num_drafts=300, acceptance_length=1.2) == []
    (warning,) = DrafterWatch({}, 8).new_warnings(num_drafts=300, acceptance_length=1.02)
    assert "nearly all drafts are rejected" in warning
