"""Statistics of a run's rows for its report: lengths, finish reasons, times, failures, and three examples.

Only the first rows of at most 256 units are read, evenly spread over the run.
"""

import contextlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from peagle.charts import grid_step
from peagle.corpus.extensions import to_values
from peagle.plain_json import to_json
from peagle.runs.directory import RunDirectory, read_rows
from peagle.runs.rows import OUTPUT_SCHEMA
from peagle.storage import StoragePath

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

MAX_UNITS = 256  # up to `BATCH_ROWS` rows of each are read
_READERS = 16
_MEASURES = ("num_prompt_tokens", "num_output_tokens", "ttft_s", "latency_s")
_COLUMNS = frozenset({"finish_reason", *_MEASURES})
_PERCENTS = (50, 95, 99)
_FEW_COLUMNS = 6  # a histogram has up to four times as many
_NUM_INPUTS, _INPUT_LETTERS, _ANSWER_LETTERS, _MESSAGE_LETTERS = 6, 600, 1200, 200


def row_figures(run: RunDirectory) -> dict[str, Any] | None:
    """Return statistics of committed rows, or None without rows.

    Returns:
        `num_read`, `finish_reasons` (counts), `measures` (by column: `p50`, `p95`, `p99` and `histogram`) and `samples`
        (`id`, `input` as pairs of name and text, `answer`, `finish_reason`; long texts are cut).

    Raises:
        PeagleError: a unit is damaged.
    """
    committed = sorted(run.committed())
    paths = [run.unit_path(unit) for unit in _evenly(committed, MAX_UNITS)]
    with ThreadPoolExecutor(_READERS) as readers:
        found = [(path, batch) for path, batch in zip(paths, readers.map(_first_rows, paths), strict=True) if batch]
    num_read = sum(batch.num_rows for _, batch in found)
    if not num_read:
        return None
    import pyarrow as pa

    table = pa.Table.from_batches([batch for _, batch in found])
    reasons = Counter(str(reason) for reason in table["finish_reason"].to_pylist())
    measured = {name: _measure(table[name].drop_null().to_numpy()) for name in _MEASURES}
    return {
        "num_read": num_read,
        "finish_reasons": dict(reasons.most_common()),
        "measures": {name: measure for name, measure in measured.items() if measure},
        "samples": _samples([(path, batch.num_rows) for path, batch in found]),
    }


def failures(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the valid dead letters by `reason`, with `count` and the message of an `example`.

    Raises:
        PeagleError: a file is missing or damaged.
    """
    counts, examples = Counter[str](), dict[str, str]()
    for letter in run.dead_letters():
        counts[letter["reason"]] += 1
        examples.setdefault(letter["reason"], _cut(str(letter["message"]), _MESSAGE_LETTERS))
    return [{"reason": reason, "count": count, "example": examples[reason]} for reason, count in counts.most_common()]


def histogram(values: "np.ndarray[Any, Any]") -> dict[str, Any]:
    """Return counts over equal ranges up to the 99th percentile.

    Returns:
        `first` (the lower end), `step`, `counts`, and `has_more`: the last range includes all larger values.
    """
    import numpy as np

    low, high = float(values.min()), float(np.percentile(values, 99))
    step = grid_step((high - low or abs(high) or 1.0) / _FEW_COLUMNS, finest=-9)
    if np.issubdtype(values.dtype, np.integer):
        step = max(step, 1.0)
    first = step * np.floor(low / step)
    num = int((high - first) / step) + 1
    places = np.minimum(((values - first) / step).astype(np.int64), num)
    counts = np.bincount(places, minlength=num).tolist()
    return {"first": float(first), "step": step, "counts": counts, "has_more": len(counts) > num}


def _measure(values: "np.ndarray[Any, Any]") -> dict[str, Any] | None:
    import numpy as np

    if not len(values):
        return None
    at = np.percentile(values, _PERCENTS)
    percentiles = {f"p{percent}": float(value) for percent, value in zip(_PERCENTS, at, strict=True)}
    return {**percentiles, "histogram": histogram(values)}


def _first_rows(path: StoragePath, columns: frozenset[str] | None = _COLUMNS) -> "pa.RecordBatch | None":
    with contextlib.closing(read_rows(path, columns)) as batches:
        return next(batches, None)


def _evenly(units: Sequence[int], most: int) -> list[int]:
    """Return at most `most` units, evenly spread.

    >>> _evenly([0, 1, 2, 3, 4, 5], 3)
    [0, 2, 4]
    """
    num = min(most, len(units))
    return [units[index * len(units) // num] for index in range(num)]


def _samples(found: Sequence[tuple[StoragePath, int]]) -> list[dict[str, Any]]:
    """Return the first, the middle and the last of the rows that were read."""
    ends = list(accumulate(num_rows for _, num_rows in found))
    rows = []
    for number in dict.fromkeys((0, ends[-1] // 2, ends[-1] - 1)):
        at = bisect_right(ends, number)
        path, num_rows = found[at]
        rows.append(_row(path, number - (ends[at] - num_rows)))
    return [_sample(row) for row in rows if row is not None]


def _row(path: StoragePath, index: int) -> dict[str, Any] | None:
    batch = _first_rows(path, None)
    try:
        return to_values(batch.slice(index, 1))[0] if batch else None
    except (OverflowError, ValueError):  # a timestamp that Python cannot represent
        return None


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    given = [(name, value) for name, value in row.items() if name not in OUTPUT_SCHEMA.names]
    return {
        "id": row["id"],
        "input": [[name, _cut(_text(value), _INPUT_LETTERS)] for name, value in given[:_NUM_INPUTS]],
        "answer": _cut(row["response"] or "", _ANSWER_LETTERS),
        "finish_reason": row["finish_reason"],
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def _cut(words: str, num_letters: int) -> str:
    return words if len(words) <= num_letters else f"{words[:num_letters]} …"
