"""Strict JSON: without NaN and infinities, and with defined forms of bytes, times and decimals."""

import base64
import datetime
import decimal
import json
import math
import re
import uuid
from typing import Any, Literal


class HalfSurrogate(ValueError):  # noqa: N818
    """JSON text with half a surrogate pair, which cannot be encoded in UTF-8."""


def to_json(value: Any, *, non_finite: Literal["null", "keep", "refuse"] = "null", **layout: Any) -> str:
    """Return a value as JSON text: bytes in base64, times as ISO 8601. `layout` are arguments of `json.dumps`.

    NaN and infinities become null, are written as Python's `NaN` and `Infinity` ("keep"), or raise ValueError
    ("refuse"). A value without a JSON form raises TypeError.

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
        return json.dumps(_finite(value), allow_nan=False, default=lambda other: _finite(_as_json(other)), **layout)


def has_non_finite(value: Any) -> bool:
    """Return whether a value contains NaN or an infinity.

    >>> has_non_finite({"a": [1.0, float("inf")]}), has_non_finite([1.0, "nan"])
    (True, False)
    """
    try:
        to_json(value, non_finite="refuse")
    except ValueError:
        return True
    return False


def from_json(text: str | bytes, **options: Any) -> Any:
    """Parse strict JSON text; bytes are UTF-8, with or without a BOM. `options` are arguments of `json.loads`.

    Raises ValueError for what only Python's parser accepts: NaN, infinities (also as 1e999), half surrogate pairs, and
    bytes in other encodings.
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    value = json.loads(text, parse_constant=refuse_constant, **{"parse_float": finite_float, **options})
    require_unicode(text, value)
    return value


def require_unicode(text: str, value: Any) -> None:
    """Raise HalfSurrogate if parsed JSON has half a surrogate pair in a key or a value."""
    try:
        text.encode()
        if "\\ud" in text.lower():  # an escape; two escapes may form a pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise HalfSurrogate("half a surrogate pair (\\ud800 to \\udfff) is not valid text") from None


def logprob_number(logprob: float) -> float:
    """Return a log-probability for JSON. Impossible tokens get -9999, as in OpenAI's API."""
    return logprob if logprob > -9999.0 else -9999.0


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def finite_float(text: str) -> float:
    """A `parse_float` of `json.loads`; refuses numbers that do not fit a 64-bit float, or would become 0."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large for a 64-bit float")
    if number == 0 and re.match(r"-?[0.]*[1-9]", text):
        raise ValueError(f"{text} is too small for a 64-bit float")
    return number


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` of `json.loads`; refuses repeated keys, of which Python's parser keeps the last."""
    members = dict(pairs)
    if len(members) < len(pairs):
        key = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"an object has the key {key!r} twice")
    return members


def refuse_constant(word: str) -> None:
    """A `parse_constant` of `json.loads`; refuses NaN and infinities."""
    raise ValueError(f"{word} is not JSON")


def _as_json(value: Any) -> Any:
    """Return the JSON form of a value of a type that JSON lacks."""
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
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _duration(value: datetime.timedelta) -> str:
    """Return a duration in ISO 8601, with nanoseconds if it is from pandas.

    >>> _duration(datetime.timedelta(days=1, seconds=61, microseconds=5))
    'P1DT0H1M1.000005S'
    """
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    minutes, seconds = divmod(value.seconds, 60)
    fraction = f".{value.microseconds:06}".rstrip("0") if value.microseconds else ""
    return f"P{value.days}DT{minutes // 60}H{minutes % 60}M{seconds}{fraction}S"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):  # Arrow's maps are lists of pairs
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
