"""Write `report.json` and `report.html` of a run.

A driver may be suspended while it writes a report, and resume after another driver has added a retry and written a
newer report. So each driver checks after writing whether the run has changed, and if so writes again.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from peagle.economics.account import account
from peagle.economics.prices import Price
from peagle.economics.report.data import report_dict
from peagle.economics.report.html import render_html
from peagle.economics.timeline import UnitTimes
from peagle.economics.usage import EngineSession
from peagle.engine.self_check import counted
from peagle.errors import PeagleError
from peagle.files import writing
from peagle.runs.directory import RunDirectory, uses_fake_engine
from peagle.runs.row_figures import failures, row_figures
from peagle.runs.scaling import most_at_once
from peagle.storage import write_atomic, write_json

_Made = TypeVar("_Made")


def until_settled(run: RunDirectory, make: Callable[[], _Made]) -> _Made:
    """Return the result of `make`, which is called again if the run changes in the meantime.

    For an unfinished run it is not called again: the driver that finishes the run writes the report.
    """
    while True:
        before = _finished(run)
        made = make()
        after = _finished(run)
        if after in (None, before):
            return made


def _finished(run: RunDirectory) -> tuple[int, frozenset[int]] | None:
    """Return the retries and units of a finished run; None of an unfinished one."""
    plan, committed = run.plan(), frozenset(run.committed())
    return (plan.num_retries, committed) if committed.issuperset(unit.unit for unit in plan.units) else None


_WRITABLE = "free some space, or make the folder writable; peagle status and peagle audit write nothing"


def make_report(run: RunDirectory) -> dict[str, Any]:
    """Write and return the report of a run in its current state.

    Raises:
        ConfigError: there is no run.
        PeagleError: one of its files is damaged.
        CapacityError: the disk is full, or the folder cannot be written.
    """
    return until_settled(run, lambda: _make(run))


def _make(run: RunDirectory) -> dict[str, Any]:
    manifest = run.manifest()
    plan = run.plan()
    times, price = UnitTimes(), Price.from_dict(manifest["price"])
    total = account(times.keep(run.usages()), _read_late(run), price)
    sessions = run.sessions()
    finished = max([s.last_seen_at for s in sessions], default=time.time())
    information = {
        **manifest["run"],
        "num_engines": most_at_once(sessions) or manifest["run"].get("num_engines") or 0,
        "path": str(run),
        "num_input_rows": plan.num_rows,
        "started_at": manifest["created_at"],
        "finished_at": finished,
        "complete": total.num_units == len(plan.units),
        "is_stand_in": uses_fake_engine(manifest),
    }
    report = report_dict(total, information)
    report["timeline"] = times.timeline(sessions, price)
    report["self_checks"] = counted(session.self_check for session in sessions)
    report["notes"] += [f"{note}." for note in plan.notes]
    report |= _row_sections(run, report["notes"])
    with writing(run, hint=_WRITABLE):
        write_json(run.root / "report.json", report)
        write_atomic(run.root / "report.html", render_html(report).encode())
    return report


def _row_sections(run: RunDirectory, notes: list[str]) -> dict[str, Any]:
    """Return the sections about rows and failures. Damaged files become a note."""
    figures: dict[str, Any] = {}
    for name, read in (("rows", row_figures), ("failures", failures)):
        try:
            figures[name] = read(run)
        except PeagleError as error:
            figures[name] = None
            notes.append(f"The {name} are not shown: {error.message}")
    return figures


def _read_late(run: RunDirectory) -> Iterator[EngineSession]:
    """Read the sessions after the units, so that the session of each unit is among them."""
    yield from run.sessions()
