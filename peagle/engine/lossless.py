"""Compare a response with the target's response without a drafter, and distinguish rounding ties from differences.

Drafts are verified in one pass and share the batch with other requests, so terms are added in a different order, and
the sums differ in their last bits. If the two highest logits are that close, either token can be chosen, and the texts
diverge.
"""

import os.path
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from peagle.engine.interface import CompletionOutput, TokenLogprob
from peagle.engine.precision import Precision

NUM_LIKELIEST = 5  # tokens requested at each position
Outcome = Literal["same", "tie", "different"]

# Logits of bf16 have 8 significant bits: between 16 and 32, where the largest logits are, neighbouring values are
# 0.125 apart, and both logits may move by that much. float16 has 11 bits. In float32, long sums differ by far more
# than its precision.
_TIE_MARGINS = {"bf16": 0.25, "float16": 0.03125, "float32": 0.001}


def tie_margin(precision: Precision) -> float:
    """Return the largest difference of two log-probabilities that counts as a tie.

    >>> tie_margin(Precision(dtype="bfloat16"))
    0.25
    """
    if {"fp8", "int8"} & {precision.weights, precision.kv_cache}:
        return 0.5  # a value that is rounded differently moves logits by more
    return _TIE_MARGINS[precision.kv_cache]


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The committed response of a row, which is stored without token ids."""

    text: str
    finish_reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of a response with the target's own.

    Attributes:
        position: index of the first different token; None if the responses are the same.
        committed, target: the tokens at this position; `committed` is None if it was not among the most likely.
        margin: difference of their log-probabilities; a lower bound if `committed` is None.
    """

    outcome: Outcome
    position: int | None = None
    committed: str | None = None
    target: str | None = None
    margin: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(committed: Response, target: CompletionOutput, *, ends: Sequence[str], max_tie: float) -> Comparison:
    """Compare a committed response with the target's own.

    Args:
        target: the target's response, with the `NUM_LIKELIEST` tokens at each position.
        ends: texts that end a response without being part of it: stop strings and end-of-text tokens.
        max_tie: see `tie_margin`.

    Example: the run has "a cat" and the target "a dog". At token 1, " dog" has -0.70 and " cat" -0.71: a tie of 0.01.
    """
    assert target.logprobs is not None, "log-probabilities were requested"
    same_text = committed.text == target.text and committed.finish_reason == target.finish_reason
    if same_text and committed.num_output_tokens == target.num_output_tokens:
        return Comparison(outcome="same")
    tokens = list(target.logprobs)
    # SentencePiece drops the leading space of the first token.
    if tokens and tokens[0].token.startswith(" ") and not target.text.startswith(" "):
        top = tuple((likely.removeprefix(" "), logprob) for likely, logprob in tokens[0].top)
        tokens[0] = replace(tokens[0], token=tokens[0].token.removeprefix(" "), top=top)
    texts = [token.token for token in tokens]
    alternatives = list(_alternatives(committed, tokens, ends, same_text))
    if alternatives:
        margin, position, text = min(alternatives)
        outcome: Outcome = "tie" if margin <= max_tie else "different"
        return Comparison(outcome=outcome, position=position, committed=text, target=texts[position], margin=margin)
    # The first token that does not fit the committed text.
    prefixes = accumulate(texts)
    position = next((n for n, prefix in enumerate(prefixes) if not committed.text.startswith(prefix)), len(texts) - 1)
    top = tokens[position].top
    lower_bound = top[0][1] - top[-1][1] if top else None  # the committed token is not in `top`
    return Comparison(outcome="different", position=position, target=texts[position], margin=lower_bound)


def _alternatives(
    committed: Response, tokens: Sequence[TokenLogprob], ends: Sequence[str], same_text: bool
) -> Iterator[tuple[float, int, str]]:
    """Yield other tokens that the run might have chosen: margin, position, text.

    A token that fits both texts is skipped, unless only the tokenisation differs.
    """
    complete_texts = [committed.text]
    if committed.finish_reason == "stop":
        complete_texts += [committed.text + end for end in ends]
    target_text = "".join(token.token for token in tokens)
    num_shared_chars = len(os.path.commonprefix([target_text, committed.text]))  # noqa: RUF071 - a text, not a path
    within_character = not committed.text[num_shared_chars : num_shared_chars + 1].isascii()
    prefix = ""
    for position, token in enumerate(tokens):
        if not any(text.startswith(prefix) for text in complete_texts):
            return
        for text, logprob in token.top:
            if text == token.token and text:
                continue
            new_prefix = prefix + text
            if text:
                fits = any(_fits(new_prefix, complete, complete != committed.text) for complete in complete_texts)
                fits = fits and (same_text or not target_text.startswith(new_prefix))
            else:  # only some bytes of a character, so without text
                fits = within_character and len(prefix) == num_shared_chars and logprob < token.logprob
            if fits:
                yield token.logprob - logprob, position, text
        prefix += token.token


def _fits(prefix: str, complete: str, may_overshoot: bool) -> bool:
    """Return whether `complete` can start with `prefix`. The token that completes a stop string may overshoot it."""
    return complete.startswith(prefix) or (may_overshoot and prefix.startswith(complete))
