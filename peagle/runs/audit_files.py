"""Audit the files of a run directory against its plan.

Every unit, every id, the ledger, and nothing else.

What makes a result wrong is a finding. What only belongs to a run that is not finished is a note: units that are still
to be done, and temporary files, which the next attempt clears. It reads one unit at a time and writes nothing.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from peagle.economics.sessions import sessions_from_table
from peagle.economics.usage import EngineSession
from peagle.errors import PeagleError
from peagle.files import TEMPORARY_SUFFIX
from peagle.parquet_table import read_table
from peagle.runs.audit_unit import Finding, UnitAudit, audit_unit, expected_schema, input_findings
from peagle.runs.directory import UNIT_FILE, RunDirectory
from peagle.runs.files import PLAN_FILE
from peagle.runs.lease import read_lease
from peagle.runs.plan import Plan
from peagle.storage import Place, open_to_read

_ROOT = re.compile(r"run\.json|report\.(json|html)|plan-\d{4}\.parquet|data|failed|ledger|logs|suspects|export|\.lease")
_OF_FOLDER = {
    "data": UNIT_FILE,
    "failed": re.compile(r"unit-\d{8,}\.\w+\.jsonl"),
    "ledger": re.compile(r"session-.+\.parquet"),
    "suspects": re.compile(r"unit-\d{8,}\..+\.json"),
}

TakenUp = dict[int, frozenset[str]]
"""By unit, the ids of its rows for which retries answer."""


@dataclass(kw_only=True)
class FilesAudit:
    """The findings in a run directory.

    Attributes:
        rows_of: rows of each committed unit that is sound.
        num_rows_left: planned, and neither in a row nor a dead letter that counts.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows_of: dict[int, int] = field(default_factory=dict)
    num_units_planned: int = 0
    num_units: int = 0
    num_rows_planned: int = 0
    num_rows: int = 0
    num_failed_rows: int = 0
    num_rows_left: int = 0
    num_output_tokens: int = 0
    num_lost_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether every unit of the plan is committed."""
        return self.num_units == self.num_units_planned

    def add(self, kind: str, where: str, message: str) -> None:
        """Note a finding."""
        self.findings.append(Finding(kind=kind, where=where, message=message))


def audit_files(run: RunDirectory, manifest: dict[str, Any]) -> FilesAudit:
    """Check every file of the run directory against the plan."""
    audit = FilesAudit()
    try:
        plan = run.plan()
    except PeagleError as error:
        audit.add("damaged", "plan", error.message)
        return audit
    audit.num_units_planned, audit.num_rows_planned = len(plan.units), plan.num_rows
    _check_plan(audit, plan, manifest)
    taken = _ids_taken_up(plan)
    audits = _audit_units(audit, run, plan, manifest, taken)
    _count(audit, plan, audits, taken)
    _check_retries(audit, plan, audits, taken)
    _check_ledger(audit, run, audits)
    _check_other_files(audit, run, manifest["plan"], {one.letters_name for one in audits.values()})
    _check_report(audit, run)
    findings, notes = input_findings(plan, manifest)
    audit.findings += findings
    audit.notes += notes
    return audit


def _check_plan(audit: FilesAudit, plan: Plan, manifest: dict[str, Any]) -> None:
    """The plan is of this run, and its units follow each other without a gap."""
    planned_for = manifest["fingerprint"]["corpus"]["content"]
    if plan.corpus_fingerprint != planned_for:
        audit.add("plan", manifest["plan"], "it is of another corpus than run.json: the plan of another run")
    next_id = 0
    for number, unit in enumerate(unit for unit in plan.units if unit.supersedes is None):
        if (unit.unit, unit.first_id) != (number, next_id):
            audit.add("plan", manifest["plan"], f"unit {unit.unit} begins at row {unit.first_id}, not at {next_id}")
            return
        next_id += unit.span.num_rows


def _audit_units(
    audit: FilesAudit, run: RunDirectory, plan: Plan, manifest: dict[str, Any], taken: TakenUp
) -> dict[int, UnitAudit]:
    """Every unit of the plan that is committed."""
    schema = expected_schema(plan.schema)
    answered_by = {"model": manifest["run"]["model"], "drafter": manifest["run"]["drafter"]}
    units = {unit.unit: unit for unit in plan.units}
    found = {}
    for name in _names(run.data):
        if (match := _OF_FOLDER["data"].fullmatch(name)) is None:
            continue  # told among the other files
        if (number := int(match[1])) not in units:
            audit.add("foreign", f"data/{name}", "the plan has no such unit")
            continue
        found[number] = audit_unit(run, units[number], schema, answered_by, taken.get(number, frozenset()))
        audit.findings += found[number].findings
    return found


def _count(audit: FilesAudit, plan: Plan, audits: dict[int, UnitAudit], taken: TakenUp) -> None:
    audit.num_units = len(audits)
    audit.rows_of = {number: one.num_rows for number, one in sorted(audits.items()) if not one.findings}
    audit.num_rows = sum(one.num_rows for one in audits.values())
    audit.num_failed_rows = sum(
        len(one.letter_ids)
        for number, one in audits.items()
        if taken.get(number, frozenset()).isdisjoint(one.letter_ids)
    )
    audit.num_output_tokens = sum(one.usage.num_output_tokens for one in audits.values() if one.usage)
    audit.num_rows_left = sum(unit.num_rows for unit in plan.left(audits))
    if not audit.is_finished:
        left = audit.num_units_planned - audit.num_units
        audit.notes.append(f"{left:,} units with {audit.num_rows_left:,} rows are not committed yet")


def _check_retries(audit: FilesAudit, plan: Plan, audits: dict[int, UnitAudit], taken: TakenUp) -> None:
    """Retries take up all dead letters that a unit has, each once.

    A unit that was done again since a retry took up its dead letters has none of these: it left those rows out.
    """
    units = {unit.unit: unit for unit in plan.units}
    seen = Counter(
        (unit.supersedes, row) for unit in plan.units if unit.supersedes is not None for row in unit.rows or ()
    )
    for unit in plan.units:
        if unit.supersedes is None:
            continue
        where, earlier = f"unit {unit.unit}", units[unit.supersedes]
        before = audits.get(earlier.unit)
        letters = set(before.letter_ids) if before else set()
        if any(seen[earlier.unit, row] > 1 for row in unit.rows or ()):
            audit.add("plan", where, f"rows of unit {earlier.unit} are taken up again more than once")
        elif not taken[earlier.unit] <= {earlier.row_id(n) for n in range(earlier.num_rows)}:
            audit.add("plan", where, f"it takes up rows that unit {earlier.unit} does not have")
        elif before is None:
            audit.add("lost", where, f"it takes up dead letters of unit {earlier.unit}, which is not committed")
        elif not before.findings and letters & taken[earlier.unit] and letters - taken[earlier.unit]:
            audit.add("plan", where, f"it does not take up all dead letters of unit {earlier.unit}")


def _ids_taken_up(plan: Plan) -> TakenUp:
    taken = plan.taken_up()
    spans = (replace(unit, rows=None) for unit in plan.units if unit.unit in taken)
    return {span.unit: frozenset(map(span.row_id, taken[span.unit])) for span in spans}


def _check_ledger(audit: FilesAudit, run: RunDirectory, audits: dict[int, UnitAudit]) -> None:
    """Check the ledger: known engine processes, no more committed than generated."""
    sessions = _read_sessions(audit, run)
    committed: Counter[str] = Counter()
    for number, one in sorted(audits.items()):
        if one.usage is None:
            continue
        if one.usage.session_id not in sessions:
            message = f"committed by engine process {one.usage.session_id}, which the ledger does not have"
            audit.add("ledger", run.unit_path(number).name, message)
        committed[one.usage.session_id] += one.usage.num_output_tokens
    for session_id, session in sessions.items():
        lost = session.num_output_tokens - committed[session_id]
        audit.num_lost_tokens += max(0, lost)
        # The last heartbeat of a process that was killed may be older than its last commit.
        if lost < 0 and session.ended:
            message = f"{session.num_output_tokens:,} tokens generated, {committed[session_id]:,} committed"
            audit.add("ledger", f"ledger/session-{session_id}.parquet", message)


def _read_sessions(audit: FilesAudit, run: RunDirectory) -> dict[str, EngineSession]:
    sessions: dict[str, EngineSession] = {}
    for name in _names(run.ledger):
        if not _OF_FOLDER["ledger"].fullmatch(name):
            continue  # told among the other files
        try:
            with open_to_read(run.ledger / name) as file:
                read = sessions_from_table(read_table(file))
        except (PeagleError, OSError, ValueError) as error:  # an Arrow error is a ValueError
            audit.add("damaged", f"ledger/{name}", getattr(error, "message", str(error)))
            continue
        for session in read:
            if sessions.get(session.session_id, session) != session:  # equal: they are being put together
                audit.add("ledger", f"ledger/{name}", f"engine process {session.session_id} is there twice")
            sessions[session.session_id] = session
    return sessions


def _check_other_files(audit: FilesAudit, run: RunDirectory, plan_name: str, valid_letters: set[str]) -> None:
    """Check files beside the units: nothing foreign, nothing left over at the end."""
    lease = read_lease(run.root)
    leftovers = []
    for name in _names(run.root):
        if name.endswith(TEMPORARY_SUFFIX) or (PLAN_FILE.fullmatch(name) and name != plan_name):
            leftovers.append(name)
        elif not _ROOT.fullmatch(name) and name != plan_name:
            audit.add("foreign", name, "not a file of a run")
    for folder, known in _OF_FOLDER.items():
        for name in _names(run.root / folder):
            where = f"{folder}/{name}"
            is_orphan = folder == "suspects" or (folder == "failed" and name not in valid_letters)
            if name.endswith(TEMPORARY_SUFFIX) or (known.fullmatch(name) and is_orphan):
                leftovers.append(where)
            elif not known.fullmatch(name):
                audit.add("foreign", where, "not a file of a run")
    if audit.is_finished and not (lease is not None and lease.seems_alive()):
        for where in leftovers:
            audit.add("leftover", where, "it counts for nothing; the run's own command clears it")
    elif leftovers:
        audit.notes.append(f"{len(leftovers):,} files of attempts that did not end: the next attempt clears them")


def _check_report(audit: FilesAudit, run: RunDirectory) -> None:
    """Check that a report counts no more units than are committed now.

    It counts those that were committed when it was made.
    """
    path = run.root / "report.json"
    if not path.exists():
        return
    try:
        report = json.loads(path.read_bytes())
    except ValueError as error:
        audit.add("damaged", path.name, str(error))
        return
    num_gone = report["account"]["num_units"] - audit.num_units
    if num_gone > 0:
        audit.add("lost", "data", f"{num_gone:,} units that were committed when report.json was made are gone")
    elif not audit.findings and report["account"]["num_output_tokens"] != audit.num_output_tokens:
        audit.notes.append("report.json is older than the units: peagle report makes it again")


def _names(folder: Place) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
