"""Write `report.json` and `report.html` of a run, with statistics of its rows."""

import contextlib
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from peagle.charts import grid_step
from peagle.corpus.extensions import to_values
from peagle.economics.account import account
from peagle.economics.prices import Price
from peagle.economics.report.data import report_dict
from peagle.economics.report.html import render_html
from peagle.economics.timeline import UnitTimes
from peagle.economics.usage import EngineSession
from peagle.engine.self_check import count_outcomes
from peagle.errors import PeagleError
from peagle.files import converted_write_errors
from peagle.plain_json import to_json
from peagle.runs.columns import OUTPUT_SCHEMA
from peagle.runs.directory import RunDirectory, read_rows, uses_fake_engine
from peagle.runs.scaling import max_concurrent_engines
from peagle.storage import StoragePath, write_atomic, write_json

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_Result = TypeVar("_Result")


def retry_if_changed(run: RunDirectory, make: Callable[[], _Result]) -> _Result:
    """Return the result of `make`, which is called again if the run changes in the meantime.

    A driver might be suspended while it writes a report, and resume after another driver has added a retry and written
    a newer report. For an unfinished run, `make` is called once: the driver that finishes the run writes the report.
    """
    while True:
        state_before = _finished_state(run)
        result = make()
        if _finished_state(run) in (None, state_before):
            return result


def _finished_state(run: RunDirectory) -> tuple[int, frozenset[int]] | None:
    """Return the number of retries and the units of a finished run, or None if the run is not finished."""
    plan, committed = run.plan(), frozenset(run.committed())
    return (plan.num_retries, committed) if committed.issuperset(unit.unit for unit in plan.units) else None


def make_report(run: RunDirectory) -> dict[str, Any]:
    """Write and return the report of a run in its current state."""
    return retry_if_changed(run, lambda: _write_report(run))


def _write_report(run: RunDirectory) -> dict[str, Any]:
    manifest = run.manifest()
    plan = run.plan()
    unit_times, price = UnitTimes(), Price.from_dict(manifest["price"])
    total = account(unit_times.record(run.usages()), _sessions_read_last(run), price)
    sessions = run.sessions()
    run_info = {
        **manifest["run"],
        "num_engines": max_concurrent_engines(sessions) or manifest["run"].get("num_engines") or 0,
        "path": str(run),
        "num_input_rows": plan.num_rows,
        "started_at": manifest["created_at"],
        "finished_at": max([session.last_seen_at for session in sessions], default=time.time()),
        "complete": total.num_units == len(plan.units),
        "is_stand_in": uses_fake_engine(manifest),
    }
    report = report_dict(total, run_info)
    report["timeline"] = unit_times.timeline(sessions, price)
    report["self_checks"] = count_outcomes(session.self_check for session in sessions)
    report["notes"] += [f"{note}." for note in plan.notes]
    for name, read in (("rows", row_statistics), ("failures", failures)):
        try:
            report[name] = read(run)
        except PeagleError as error:
            report[name] = None
            report["notes"].append(f"The {name} are not shown: {error.message}")
    with converted_write_errors(
        run, hint="free some space, or make the folder writable; peagle status and peagle audit only read"
    ):
        write_json(run.root / "report.json", report)
        write_atomic(run.root / "report.html", render_html(report).encode())
    return report


def _sessions_read_last(run: RunDirectory) -> Iterator[EngineSession]:
    """Yield the sessions, read when the first is used: after the units, so that each unit's session is included."""
    yield from run.sessions()


# --- rows

MAX_UNITS = 256  # maximum units to read, with up to `BATCH_ROWS` rows each
_NUM_READERS = 16
_MEASURED_COLUMNS = ("num_prompt_tokens", "num_output_tokens", "ttft_s", "latency_s")
_COLUMNS = frozenset({"finish_reason", *_MEASURED_COLUMNS})
_PERCENTS = (50, 95, 99)
_MIN_BARS = 6  # `grid_step` makes up to four times as many
# Limits of what the report shows.
_NUM_INPUTS, _INPUT_CHARS, _ANSWER_CHARS, _MESSAGE_CHARS = 6, 600, 1200, 200


def row_statistics(run: RunDirectory) -> dict[str, Any] | None:
    """Return statistics of committed rows, or None without rows.

    Only the first rows of a unit are read, and at most `MAX_UNITS` units, evenly spread over the run.

    Returns:
        `num_read`, `finish_reasons` (counts), `measures` (by column: `p50`, `p95`, `p99` and `histogram`) and `samples`
        (`id`, `input` as pairs of name and text, `answer`, `finish_reason`; long texts are truncated).
    """
    committed = sorted(run.committed())
    paths = [run.unit_path(unit) for unit in _spread_evenly(committed, MAX_UNITS)]
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        batches = [(path, batch) for path, batch in zip(paths, readers.map(_first_rows, paths), strict=True) if batch]
    num_read = sum(batch.num_rows for _, batch in batches)
    if not num_read:
        return None
    import pyarrow as pa

    table = pa.Table.from_batches([batch for _, batch in batches])
    reasons = Counter(str(reason) for reason in table["finish_reason"].to_pylist())
    measures = {name: _measure(table[name].drop_null().to_numpy()) for name in _MEASURED_COLUMNS}
    return {
        "num_read": num_read,
        "finish_reasons": dict(reasons.most_common()),
        "measures": {name: measure for name, measure in measures.items() if measure},
        "samples": _samples([(path, batch.num_rows) for path, batch in batches]),
    }


def failures(run: RunDirectory) -> list[dict[str, Any]]:
    """Return each `reason` of dead letters that are not retried, with its `count` and an `example` message."""
    counts, examples = Counter[str](), dict[str, str]()
    for letter in run.dead_letters():
        counts[letter["reason"]] += 1
        examples.setdefault(letter["reason"], _truncated(str(letter["message"]), _MESSAGE_CHARS))
    return [{"reason": reason, "count": count, "example": examples[reason]} for reason, count in counts.most_common()]


def histogram(values: "np.ndarray[Any, Any]") -> dict[str, Any]:
    """Return counts over equal ranges up to the 99th percentile.

    Returns:
        `first` (the lower end), `step`, `counts`, and `has_more` (whether the last range includes all larger values).
    """
    import numpy as np

    low, high = float(values.min()), float(np.percentile(values, 99))
    step = grid_step((high - low or abs(high) or 1.0) / _MIN_BARS, finest=-9)
    if np.issubdtype(values.dtype, np.integer):
        step = max(step, 1.0)
    first = step * np.floor(low / step)
    num_bars = int((high - first) / step) + 1
    indices = np.minimum(((values - first) / step).astype(np.int64), num_bars)
    counts = np.bincount(indices, minlength=num_bars).tolist()
    return {"first": float(first), "step": step, "counts": counts, "has_more": len(counts) > num_bars}


def _measure(values: "np.ndarray[Any, Any]") -> dict[str, Any] | None:
    """Return percentiles and a histogram, or None without values."""
    import numpy as np

    if not len(values):
        return None
    at_percents = np.percentile(values, _PERCENTS)
    percentiles = {f"p{percent}": float(value) for percent, value in zip(_PERCENTS, at_percents, strict=True)}
    return {**percentiles, "histogram": histogram(values)}


def _first_rows(path: StoragePath, columns: frozenset[str] | None = _COLUMNS) -> "pa.RecordBatch | None":
    """Return the first batch of a unit's rows, or None if the unit has no rows."""
    with contextlib.closing(read_rows(path, columns)) as batches:
        return next(batches, None)


def _spread_evenly(units: Sequence[int], max_units: int) -> list[int]:
    """Return at most `max_units` units, evenly spread.

    >>> _spread_evenly([0, 1, 2, 3, 4, 5], 3)
    [0, 2, 4]
    """
    num_chosen = min(max_units, len(units))
    return [units[index * len(units) // num_chosen] for index in range(num_chosen)]


def _samples(units: Sequence[tuple[StoragePath, int]]) -> list[dict[str, Any]]:
    """Return the first, the middle and the last of the rows read. `units`: paths, and how many rows were read."""
    row_ends = list(accumulate(num_rows for _, num_rows in units))
    rows = []
    for row_number in dict.fromkeys((0, row_ends[-1] // 2, row_ends[-1] - 1)):
        index = bisect_right(row_ends, row_number)
        path, num_rows = units[index]
        batch = _first_rows(path, None)
        with contextlib.suppress(OverflowError, ValueError):  # a timestamp that Python cannot represent
            if batch:
                rows += to_values(batch.slice(row_number - (row_ends[index] - num_rows), 1))
    return [_sample(row) for row in rows]


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    columns = [(name, value) for name, value in row.items() if name not in OUTPUT_SCHEMA.names]
    return {
        "id": row["id"],
        "input": [
            [name, _truncated(value if isinstance(value, str) else to_json(value), _INPUT_CHARS)]
            for name, value in columns[:_NUM_INPUTS]
        ],
        "answer": _truncated(row["response"] or "", _ANSWER_CHARS),
        "finish_reason": row["finish_reason"],
    }


def _truncated(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]} …"
