"""How much a request's lists, texts and patterns may hold, in bulk and online alike. Pure: values in, a fault out."""

from collections.abc import Iterator, Mapping
from typing import Any

MOST_ENTRIES = {
    "tools": 128, "stop": 64, "bad_words": 128, "documents": 128, "stop_token_ids": 1024,
    # vLLM 0.29 on accelerators dies of more than these (v1/worker/gpu/sample/logit_bias.py).
    "allowed_token_ids": 1024, "logit_bias": 1024,
}  # fmt: skip
_MOST_STOP_IDS = 100  # likewise, where a response has a least length
_MOST_TEXT_BYTES = {"stop": 8_192, "bad_words": 8_192}
_MOST_REPETITIONS = {"max_pattern_size": 64, "min_count": 64}  # vLLM's core looks for each length at each token


def bounds_error(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The field that holds more than an engine is given, and a sentence about it; None where none does.

    >>> bounds_error({"stop_token_ids": [1] * 101, "min_tokens": 1})
    ('stop_token_ids', 'stop_token_ids has 101 entries, and may have 100')
    """
    return next(_errors(values), None)


def _errors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for field, most in MOST_ENTRIES.items():
        value = values.get(field)
        most = _MOST_STOP_IDS if field == "stop_token_ids" and values.get("min_tokens") else most
        if isinstance(value, list | dict) and len(value) > most:
            yield field, f"{field} has {len(value):,} entries, and may have {most:,}"
    for field, most in _MOST_TEXT_BYTES.items():
        value = values.get(field)
        texts = value if isinstance(value, list) else [value]
        size = sum(len(text.encode(errors="replace")) for text in texts if isinstance(text, str))
        if size > most:
            yield field, f"{field} has {size:,} bytes, and may have {most:,}"
    detection = values.get("repetition_detection")
    detection = detection if isinstance(detection, dict) else {}
    for name, most in _MOST_REPETITIONS.items():
        number = detection.get(name)
        # A number as text is one for pydantic, too.
        if (isinstance(number, int | float) and number > most) or (isinstance(number, str) and len(number) > 2):
            yield "repetition_detection", f"repetition_detection.{name} may be {most} at most"
