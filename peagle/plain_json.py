"""Strict JSON: no NaN, no infinity, no printed forms."""

import base64
import datetime
import decimal
import json
import math
import re
import uuid
from typing import Any, Literal

_LEAST_LOGPROB = -9999.0


class HalfSurrogate(ValueError):  # noqa: N818 - as a part of a sentence
    """JSON text with half of a surrogate pair, which no UTF-8 can hold."""


def to_json(value: Any, *, non_finite: Literal["null", "keep", "refuse"] = "null", **layout: Any) -> str:
    """Return a value as JSON text: bytes in base64, times as ISO 8601.

    Args:
        non_finite: NaN and infinities become null, are kept as Python writes and reads them, or are refused. JSON has
            none of them.
        layout: `indent`, `separators`, `sort_keys` and `ensure_ascii` as `json.dumps` has them; text stays as it is by
            default.

    Raises:
        TypeError: a value that has no form in JSON.
        ValueError: NaN or an infinity, if these are refused.

    >>> to_json({"é": [float("nan"), b"ab"]})
    '{"é": [null, "YWI="]}'
    >>> to_json([float("-inf")], non_finite="keep")
    '[-Infinity]'
    """
    layout = {"ensure_ascii": False, **layout}
    try:
        return json.dumps(value, allow_nan=non_finite == "keep", default=_as_json, **layout)
    except ValueError:  # NaN or an infinity
        if non_finite == "refuse":
            raise
        return json.dumps(_finite(value), allow_nan=False, default=_finite_as_json, **layout)


def has_non_finite(value: Any) -> bool:
    """Whether NaN or an infinity is in a value.

    >>> has_non_finite({"a": [1.0, float("inf")]}), has_non_finite([1.0, "nan"])
    (True, False)
    """
    try:
        to_json(value, non_finite="refuse")
    except ValueError:
        return True
    return False


def from_json(text: str | bytes, **options: Any) -> Any:
    """Parse strict JSON text.

    Python's own parser also takes NaN and infinities, written so or as 1e999, halves of surrogate pairs, and bytes of
    any encoding.

    Args:
        text: bytes are UTF-8, with a BOM or without.
        options: as `json.loads` has them.

    Raises:
        HalfSurrogate: there is half of a surrogate pair in it.
        ValueError: it is not JSON.
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    value = json.loads(text, parse_constant=refuse_constant, **{"parse_float": finite_float, **options})
    require_unicode(text, value)
    return value


def require_unicode(text: str, value: Any) -> None:
    """Refuse parsed JSON with half of a surrogate pair in a key or a value.

    Raises:
        HalfSurrogate: it has.
    """
    try:
        text.encode()
        if "\\ud" in text.lower():  # an escape, of which two may make a pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise HalfSurrogate("half a surrogate pair (\\ud800 to \\udfff), which is no text") from None


def logprob_number(logprob: float) -> float:
    """A log-probability as a number.

    Impossible tokens get the least one, as in OpenAI's API.

    >>> logprob_number(-0.5), logprob_number(float("-inf"))
    (-0.5, -9999.0)
    """
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def is_nan(value: Any) -> bool:
    """Whether it is a number that is none."""
    return isinstance(value, float) and math.isnan(value)


def finite_float(text: str) -> float:
    """Parse a number of JSON text.

    Raises:
        ValueError: it is too large for a 64-bit float, or so small that it would become 0.
    """
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large for a 64-bit float")
    if number == 0 and re.match(r"-?[0.]*[1-9]", text):
        raise ValueError(f"{text} is too small for a 64-bit float")
    return number


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its members; an `object_pairs_hook` of `json.loads`.

    Raises:
        ValueError: a key is in it twice, of which Python's parser would drop the first value.
    """
    members = dict(pairs)
    if len(members) < len(pairs):
        key = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"key {key!r} is in an object twice")
    return members


def refuse_constant(word: str) -> None:
    """Refuse NaN and infinities; a `parse_constant` of `json.loads`.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{word} is no JSON")


def _as_json(value: Any) -> Any:
    """The JSON form of what Arrow and Python have and JSON does not."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return _duration(value)
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def _duration(value: datetime.timedelta) -> str:
    """A duration in ISO 8601, with nanoseconds as pandas writes its own.

    >>> _duration(datetime.timedelta(days=1, seconds=61, microseconds=5))
    'P1DT0H1M1.000005S'
    """
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    minutes, seconds = divmod(value.seconds, 60)
    fraction = f".{value.microseconds:06}".rstrip("0") if value.microseconds else ""
    return f"P{value.days}DT{minutes // 60}H{minutes % 60}M{seconds}{fraction}S"


def _finite_as_json(value: Any) -> Any:
    return _finite(_as_json(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):  # a map is a list of pairs
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
