"""Strict JSON: no NaN, no infinity, no values as their repr."""

import base64
import datetime
import decimal
import json
import math
import re
import uuid
from typing import Any, Literal

_LEAST_LOGPROB = -9999.0


class HalfSurrogate(ValueError):  # noqa: N818
    """JSON text with half a surrogate pair, which cannot be encoded in UTF-8."""


def to_json(value: Any, *, non_finite: Literal["null", "keep", "refuse"] = "null", **layout: Any) -> str:
    """Return a value as JSON text: bytes in base64, times as ISO 8601.

    Args:
        non_finite: NaN and infinities become null, are kept as Python writes and reads them, or are refused.
        layout: arguments of `json.dumps`; `ensure_ascii` is False by default.

    Raises:
        TypeError: a value has no JSON form.
        ValueError: NaN or an infinity, if refused.

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
    """Whether a value contains NaN or an infinity.

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

    Python's parser also accepts NaN, infinities (also as 1e999), half surrogate pairs, and bytes of any encoding.

    Args:
        text: bytes are UTF-8, with or without a BOM.
        options: arguments of `json.loads`.

    Raises:
        HalfSurrogate: it contains half a surrogate pair.
        ValueError: it is not JSON.
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    value = json.loads(text, parse_constant=refuse_constant, **{"parse_float": finite_float, **options})
    require_unicode(text, value)
    return value


def require_unicode(text: str, value: Any) -> None:
    """Raise HalfSurrogate if parsed JSON has half a surrogate pair in a key or a value."""
    try:
        text.encode()
        if "\\ud" in text.lower():  # an escape; two of them may form a pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise HalfSurrogate("half a surrogate pair (\\ud800 to \\udfff) is not valid text") from None


def logprob_number(logprob: float) -> float:
    """Return a log-probability for JSON. Impossible tokens get -9999, as in OpenAI's API.

    >>> logprob_number(-0.5), logprob_number(float("-inf"))
    (-0.5, -9999.0)
    """
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def finite_float(text: str) -> float:
    """Parse a number of JSON text; a `parse_float` of `json.loads`.

    Raises:
        ValueError: it does not fit a 64-bit float, or would become 0.
    """
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large for a 64-bit float")
    if number == 0 and re.match(r"-?[0.]*[1-9]", text):
        raise ValueError(f"{text} is too small for a 64-bit float")
    return number


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; an `object_pairs_hook` of `json.loads`.

    Raises:
        ValueError: a key occurs twice. Python's parser would drop the first value.
    """
    members = dict(pairs)
    if len(members) < len(pairs):
        key = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"an object has the key {key!r} twice")
    return members


def refuse_constant(word: str) -> None:
    """Refuse NaN and infinities; a `parse_constant` of `json.loads`."""
    raise ValueError(f"{word} is not JSON")


def _as_json(value: Any) -> Any:
    """Return the JSON form of types that only Arrow and Python have."""
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


def _finite_as_json(value: Any) -> Any:
    return _finite(_as_json(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):  # a map is a list of pairs
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
