"""Values as JSON that every reader takes: no NaN, no infinity, and nothing in a shortened, printed form."""

import base64
import datetime
import decimal
import json
import math
import uuid
from typing import Any


def to_json(value: Any, **layout: Any) -> str:
    """A value as JSON text: bytes in base64, times as ISO 8601, null for NaN and infinity.

    Args:
        layout: `indent`, `separators`, `sort_keys` and `ensure_ascii` as `json.dumps` has them; text stays as it is by
            default.

    Raises:
        TypeError: a value that has no form in JSON.

    >>> to_json({"é": [float("nan"), b"ab"]})
    '{"é": [null, "YWI="]}'
    """
    layout = {"ensure_ascii": False, **layout}
    try:
        return json.dumps(value, allow_nan=False, default=_as_json, **layout)
    except ValueError:  # NaN and infinity are no JSON
        return json.dumps(_finite(value), allow_nan=False, default=_finite_as_json, **layout)


def is_nan(value: Any) -> bool:
    """Whether it is a number that is none."""
    return isinstance(value, float) and math.isnan(value)


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
    """As ISO 8601 has durations, and as pandas writes its own, which count nanoseconds.

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
