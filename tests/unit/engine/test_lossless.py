from dataclasses import replace

import pytest

from peagle.engine.interface import CompletionOutput, TokenLogprob
from peagle.engine.lossless import Response, compare, tie_margin
from peagle.engine.precision import Precision

END = "<end>"


def target(*places, finish_reason="stop"):
    """A response by its places: each the likely tokens with their log-probabilities, the likeliest first."""
    logprobs = tuple(TokenLogprob(token=top[0][0], logprob=top[0][1], top=tuple(top)) for top in places)
    text = "".join(token.token for token in logprobs).removesuffix(END)
    return CompletionOutput(text=text, finish_reason=finish_reason, num_output_tokens=len(logprobs), logprobs=logprobs)


def place(*pairs):
    return list(pairs)


A_DOG = target(
    place(("a", -0.1), ("the", -3.0)),
    place((" dog", -0.70), (" cat", -0.71), (" cow", -1.7)),
    place((END, -0.1), ("s", -2.6)),
)


def judge(text, *, by=A_DOG, finish_reason="stop", num_output_tokens=3, ends=(END,)):
    committed = Response(text=text, finish_reason=finish_reason, num_output_tokens=num_output_tokens)
    return compare(committed, by, ends=ends, max_tie=0.25)


def test_equal_text_is_the_same():
    assert judge("a dog").outcome == "same"


@pytest.mark.parametrize(
    ("text", "outcome", "position", "token", "margin"),
    [
        ("a cat and more", "tie", 1, " cat", 0.01),
        ("a cow", "different", 1, " cow", 1.0),
        ("the dog", "different", 0, "the", 2.9),
        ("a dogs", "different", 2, "s", 2.5),
        ("a horse", "different", 1, None, 1.0),  # not among the likeliest: at least as far as the last of them
        ("", "different", 0, None, 2.9),
    ],
)
def test_the_first_differing_token_decides(text, outcome, position, token, margin):
    verdict = judge(text)
    assert (verdict.outcome, verdict.position, verdict.committed) == (outcome, position, token)
    assert verdict.margin == pytest.approx(margin)


def test_a_response_that_ends_where_the_target_goes_on_took_an_end():
    going_on = target(place(("a", -0.1)), place((" dog", -0.7), (END, -0.8)), finish_reason="length")
    verdict = judge("a", by=going_on, num_output_tokens=2)
    assert (verdict.outcome, verdict.position, verdict.committed) == ("tie", 1, END)
    assert judge("a", by=going_on, num_output_tokens=2, finish_reason="length").outcome == "different"


def test_a_token_that_completes_a_stop_string_may_go_on_behind_it():
    by = target(place(("a", -0.1)), place((" dog", -0.7), (".\n\n", -0.75)), finish_reason="length")
    assert judge("a", by=by, num_output_tokens=2, ends=(".\n",)).outcome == "tie"


def test_a_longer_token_that_begins_like_the_targets_is_where_they_part():
    by = target(place((" foo", -0.7), (" foobar", -0.8), (" f", -0.71)), place(("l", -0.1), ("x", -0.2)))
    verdict = judge(" foobar", by=by, num_output_tokens=2)
    assert (verdict.outcome, verdict.position, verdict.committed) == ("tie", 0, " foobar")


def test_the_same_text_in_other_tokens_is_no_silent_match():
    by = target(place((" foo", -0.7), (" f", -0.72)), place((END, -0.1)))
    assert judge(" foo", by=by, num_output_tokens=3).outcome == "tie"
    apart = target(place((" foo", -0.1), (" f", -4.0)), place((END, -0.1)))
    assert judge(" foo", by=apart, num_output_tokens=3).outcome == "different"


def test_parts_of_a_character_have_no_text_and_can_tie():
    by = target(place(("a", -0.1)), place(("", -0.7), ("", -0.75), ("b", -3.0)), place(("😀", -0.1)))
    assert judge("a🙃", by=by, num_output_tokens=3).outcome == "tie"
    assert judge("ax", by=by, num_output_tokens=3).outcome == "different"
    assert judge("aa", by=target(place(("a", -0.1)), place(("b", -0.7), ("", -0.75)))).outcome == "different"


def test_the_space_that_a_text_drops_at_its_beginning_is_no_difference():
    by = replace(target(place((" A", -0.7), (" The", -0.8)), place((" cow", -0.7), (" cat", -0.8))), text="A cow")
    assert (judge("A cat", by=by).outcome, judge("A cat", by=by).position) == ("tie", 1)
    assert (judge("The cow", by=by).outcome, judge("The cow", by=by).position) == ("tie", 0)


@pytest.mark.parametrize(
    ("precision", "margin"),
    [
        (Precision(dtype="float32"), 0.001),
        (Precision(dtype="float16"), 0.03125),
        (Precision(dtype="bfloat16"), 0.25),
        (Precision(dtype="bfloat16", native_quantization="mxfp4"), 0.25),
        (Precision(dtype="bfloat16", kv_cache_dtype="fp8"), 0.5),
        (Precision(dtype="float32", quantization="int8"), 0.5),
    ],
)
def test_a_tie_depends_on_the_precision(precision, margin):
    assert tie_margin(precision) == margin
