from dataclasses import replace

import pytest

from peagle.engine.interface import CompletionOutput, TokenLogprob
from peagle.engine.lossless import Response, compare, tie_margin
from peagle.engine.precision import Precision

END = "<end>"


def target(*positions, finish_reason="stop"):
    """A response with the most likely tokens and log-probabilities of each position, most likely first."""
    logprobs = tuple(TokenLogprob(token=top[0][0], logprob=top[0][1], top=tuple(top)) for top in positions)
    text = "".join(token.token for token in logprobs).removesuffix(END)
    return CompletionOutput(text=text, finish_reason=finish_reason, num_output_tokens=len(logprobs), logprobs=logprobs)


def likely_tokens(*pairs):
    return list(pairs)


A_DOG = target(
    likely_tokens(("a", -0.1), ("the", -3.0)),
    likely_tokens((" dog", -0.70), (" cat", -0.71), (" cow", -1.7)),
    likely_tokens((END, -0.1), ("s", -2.6)),
)


def judge(text, *, reference=A_DOG, finish_reason="stop", num_output_tokens=3, ends=(END,)):
    committed = Response(text=text, finish_reason=finish_reason, num_output_tokens=num_output_tokens)
    return compare(committed, reference, ends=ends, max_tie=0.25)


def test_equal_text_has_the_outcome_same():
    assert judge("a dog").outcome == "same"


@pytest.mark.parametrize(
    ("text", "outcome", "position", "token", "margin"),
    [
        ("a cat and more", "tie", 1, " cat", 0.01),
        ("a cow", "different", 1, " cow", 1.0),
        ("the dog", "different", 0, "the", 2.9),
        ("a dogs", "different", 2, "s", 2.5),
        ("a horse", "different", 1, None, 1.0),  # not among the likely tokens: at least the last one's margin
        ("", "different", 0, None, 2.9),
    ],
)
def test_first_different_token_decides(text, outcome, position, token, margin):
    verdict = judge(text)
    assert (verdict.outcome, verdict.position, verdict.committed) == (outcome, position, token)
    assert verdict.margin == pytest.approx(margin)


def test_early_end_can_tie():
    cut_off = target(likely_tokens(("a", -0.1)), likely_tokens((" dog", -0.7), (END, -0.8)), finish_reason="length")
    verdict = judge("a", reference=cut_off, num_output_tokens=2)
    assert (verdict.outcome, verdict.position, verdict.committed) == ("tie", 1, END)
    assert judge("a", reference=cut_off, num_output_tokens=2, finish_reason="length").outcome == "different"


def test_token_may_extend_beyond_a_stop_string():
    reference = target(
        likely_tokens(("a", -0.1)), likely_tokens((" dog", -0.7), (".\n\n", -0.75)), finish_reason="length"
    )
    assert judge("a", reference=reference, num_output_tokens=2, ends=(".\n",)).outcome == "tie"


def test_longer_token_with_a_common_prefix_can_tie():
    reference = target(
        likely_tokens((" foo", -0.7), (" foobar", -0.8), (" f", -0.71)), likely_tokens(("l", -0.1), ("x", -0.2))
    )
    verdict = judge(" foobar", reference=reference, num_output_tokens=2)
    assert (verdict.outcome, verdict.position, verdict.committed) == ("tie", 0, " foobar")


def test_other_tokenisation_of_the_same_text_can_tie():
    reference = target(likely_tokens((" foo", -0.7), (" f", -0.72)), likely_tokens((END, -0.1)))
    assert judge(" foo", reference=reference, num_output_tokens=3).outcome == "tie"
    clear_choice = target(likely_tokens((" foo", -0.1), (" f", -4.0)), likely_tokens((END, -0.1)))
    assert judge(" foo", reference=clear_choice, num_output_tokens=3).outcome == "different"


def test_partial_characters_can_tie():
    reference = target(
        likely_tokens(("a", -0.1)), likely_tokens(("", -0.7), ("", -0.75), ("b", -3.0)), likely_tokens(("😀", -0.1))
    )
    assert judge("a🙃", reference=reference, num_output_tokens=3).outcome == "tie"
    assert judge("ax", reference=reference, num_output_tokens=3).outcome == "different"
    assert (
        judge("aa", reference=target(likely_tokens(("a", -0.1)), likely_tokens(("b", -0.7), ("", -0.75)))).outcome
        == "different"
    )


def test_dropped_leading_space_is_not_a_difference():
    reference = replace(
        target(likely_tokens((" A", -0.7), (" The", -0.8)), likely_tokens((" cow", -0.7), (" cat", -0.8))), text="A cow"
    )
    assert (judge("A cat", reference=reference).outcome, judge("A cat", reference=reference).position) == ("tie", 1)
    assert (judge("The cow", reference=reference).outcome, judge("The cow", reference=reference).position) == ("tie", 0)


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
def test_tie_margin_depends_on_precision(precision, margin):
    assert tie_margin(precision) == margin
