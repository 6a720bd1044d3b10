"""Audit a run: compare the files with the plan, and the recorded usage with the rows; generate a sample of rows again.

`regeneration.py` generates the sample. A finding is an error in the run; a note is only
information, for example that the run is not finished. The audit writes nothing.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from peagle.bench.engine import StartEngine
from peagle.corpus.extensions import plain_schema
from peagle.corpus.files import SourceFile, discover
from peagle.corpus.rows import WorkEstimate
from peagle.corpus.scan import find_files, scan
from peagle.economics.usage import EngineSession, UnitUsage, sessions_from_table
from peagle.engine.response_parser import has_parser
from peagle.errors import ConfigError, InputError, PeagleError
from peagle.files import TEMPORARY_SUFFIX
from peagle.parquet_table import read_table
from peagle.runs.columns import internal_names, names_in_file, output_schema
from peagle.runs.directory import PLAN_FILE, UNIT_FILE, RunDirectory
from peagle.runs.lease import read_lease
from peagle.runs.plan import Plan, WorkUnit
from peagle.runs.regeneration import AuditedEngine, RowAudit, audit_rows, audited_engine, sample_rows
from peagle.storage import StoragePath, open_to_read
from peagle.tables import aligned

_MAX_FINDINGS_SHOWN = 50
_ROOT_NAMES = re.compile(
    r"run\.json|report\.(json|html)|plan-\d{4}\.parquet|data|failed|ledger|logs|suspects|export|\.lease"
)
_FILES_BY_FOLDER = {
    "data": UNIT_FILE,
    "failed": re.compile(r"unit-\d{8,}\.\w+\.jsonl"),
    "ledger": re.compile(r"session-.+\.parquet"),
    "suspects": re.compile(r"unit-\d{8,}\..+\.json"),
}

RetriedIds = dict[int, frozenset[str]]  # for each unit, the ids of its rows that were retried in another unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    kind: str
    where: str
    message: str


@dataclass(kw_only=True)
class FilesAudit:
    """The findings in a run directory, and its counts."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows_by_unit: dict[int, int] = field(default_factory=dict)  # number of rows of each committed unit without findings
    num_units_planned: int = 0
    num_units: int = 0
    num_rows_planned: int = 0
    num_rows: int = 0
    num_failed_rows: int = 0
    num_rows_left: int = 0  # neither committed nor dead letters
    num_output_tokens: int = 0
    num_lost_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        return self.num_units == self.num_units_planned

    def add(self, kind: str, where: str, message: str) -> None:
        self.findings.append(Finding(kind=kind, where=where, message=message))


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit. `engine` and `rows` describe the sample; they are None and empty without a sample."""

    path: str
    files: FilesAudit
    engine: AuditedEngine | None = None
    seed: int = 0
    rows: tuple[RowAudit, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not self.files.findings and not self._outcomes()["different"]

    def to_dict(self) -> dict[str, Any]:
        files = self.files
        counts = {name: value for name, value in vars(files).items() if name.startswith("num_")}
        regenerated = None
        if self.engine is not None:
            regenerated = {
                "precision": self.engine.precision,
                "max_tie": self.engine.max_tie,
                "seed": self.seed,
                **{f"num_{outcome}": count for outcome, count in self._outcomes().items()},
                "rows": [row.to_dict() for row in self.rows],
            }
        return {
            "path": self.path,
            "ok": self.is_clean,
            "complete": files.is_finished,
            **counts,
            "findings": [asdict(finding) for finding in files.findings],
            "notes": files.notes,
            "regenerated": regenerated,
        }

    def describe(self) -> str:
        files = self.files
        figures = {
            "units": f"{files.num_units:,} of {files.num_units_planned:,} committed",
            "rows": f"{files.num_rows:,} committed, {files.num_failed_rows:,} failed, {files.num_rows_left:,} left, "
            f"of {files.num_rows_planned:,} planned",
            "output tokens": f"{files.num_output_tokens:,} committed, {files.num_lost_tokens:,} lost",
        }
        if self.engine is not None:
            figures["without drafter"] = ", ".join(f"{count:,} {name}" for name, count in self._outcomes().items())
            figures["tie"] = f"log-probabilities at most {self.engine.max_tie:g} apart"
        lines = [self.path, *(f"  {name:<16} {value}" for name, value in figures.items())]
        lines += [f"  note: {note}" for note in files.notes]
        lines += _table_of_rows(self.rows)
        findings = files.findings[:_MAX_FINDINGS_SHOWN]
        lines += [f"  {finding.kind:<8} {finding.where}: {finding.message}" for finding in findings]
        if (num_more := len(files.findings) - _MAX_FINDINGS_SHOWN) > 0:
            lines.append(f"  ... and {num_more:,} more; --json FILE has all of them")
        return "\n".join([*lines, "clean" if self.is_clean else "NOT CLEAN"])

    def _outcomes(self) -> dict[str, int]:
        counts = Counter(row.outcome for row in self.rows)
        return {outcome: counts[outcome] for outcome in ("same", "tie", "different", "skipped")}


def audit(
    run: RunDirectory,
    *,
    num_rows: int,
    seed: int,
    max_tie: float | None,
    announce: Callable[[str], None],
    start: StartEngine,
) -> Audit:
    """Audit a run, and generate `num_rows` of its rows again.

    Args:
        max_tie: largest difference of log-probabilities that counts as a tie; None means the default for the
            run's precision.
        start: starts an engine on this machine.

    Raises:
        ConfigError: there is no run, or its rows cannot be generated here.
    """
    if not run.exists:
        raise ConfigError(f"{run} is not a run directory: it has no run.json")
    try:
        manifest = run.manifest()
    except PeagleError as error:
        finding = Finding(kind="damaged", where="run.json", message=error.message)
        return Audit(path=str(run), files=FilesAudit(findings=[finding]))
    engine = audited_engine(manifest, max_tie) if num_rows else None
    files = audit_files(run, manifest)
    if engine is None:
        return Audit(path=str(run), files=files)
    sample = sample_rows(files.rows_by_unit, num_rows, seed)
    rows = audit_rows(run, manifest, engine, sample, announce, start)
    return Audit(path=str(run), files=files, engine=engine, seed=seed, rows=tuple(rows))


def _table_of_rows(rows: Sequence[RowAudit]) -> list[str]:
    table = [("row", "outcome", "token", "margin", "run", "target alone")]
    for row in rows:
        verdict = row.verdict
        if verdict is None or verdict.outcome == "same":
            continue
        margin = "-" if verdict.margin is None else f"{verdict.margin:.4f}"
        committed = "(not among the likeliest)" if verdict.committed is None else repr(verdict.committed)
        table.append((row.id, verdict.outcome, str(verdict.position), margin, committed, repr(verdict.target)))
    reasons = Counter(row.skipped for row in rows if row.verdict is None)
    lines = [f"  skipped {count:,}: {reason}" for reason, count in reasons.items()]
    return lines + ([f"  {line}" for line in aligned(table)] if len(table) > 1 else [])


# --- files


def audit_files(run: RunDirectory, manifest: dict[str, Any]) -> FilesAudit:
    audit = FilesAudit()
    try:
        plan = run.plan()
    except PeagleError as error:
        audit.add("damaged", "plan", error.message)
        return audit
    audit.num_units_planned, audit.num_rows_planned = len(plan.units), plan.num_rows
    _check_plan(audit, plan, manifest)
    retried_rows = plan.retried_rows()
    # Retried rows are positions in the unit's span; `row_id` accepts them only if `rows` is None.
    whole_units = (replace(unit, rows=None) for unit in plan.units if unit.unit in retried_rows)
    retried = {unit.unit: frozenset(map(unit.row_id, retried_rows[unit.unit])) for unit in whole_units}
    units = _audit_units(audit, run, plan, manifest, retried)
    _count_totals(audit, plan, units, retried)
    _check_retries(audit, plan, units, retried)
    _check_ledger(audit, run, units)
    _check_other_files(audit, run, manifest["plan"], {unit.dead_letters_name for unit in units.values()})
    _check_report(audit, run)
    _check_input(audit, plan, manifest)
    return audit


def _check_plan(audit: FilesAudit, plan: Plan, manifest: dict[str, Any]) -> None:
    """Check that the plan is for the run's corpus, and that unit numbers and row ids have no gaps."""
    if plan.corpus_fingerprint != manifest["fingerprint"]["corpus"]["content"]:
        audit.add("plan", manifest["plan"], "the plan is for a different corpus than run.json")
    next_id = 0
    for number, unit in enumerate(unit for unit in plan.units if unit.supersedes is None):
        if (unit.unit, unit.first_id) != (number, next_id):
            audit.add("plan", manifest["plan"], f"unit {unit.unit} starts at row {unit.first_id}, not at {next_id}")
            return
        next_id += unit.span.num_rows


def _audit_units(
    audit: FilesAudit, run: RunDirectory, plan: Plan, manifest: dict[str, Any], retried: RetriedIds
) -> dict[int, "UnitAudit"]:
    schema = expected_schema(plan.schema, keeps_inputs=run.keeps_inputs, is_parsed=has_parser(manifest["config"]))
    expected_values = {"model": manifest["run"]["model"], "drafter": manifest["run"]["drafter"]}
    planned = {unit.unit: unit for unit in plan.units}
    audits = {}
    for name in _list_names(run.data):
        match = _FILES_BY_FOLDER["data"].fullmatch(name)
        if match is None:
            continue  # `_check_other_files` reports it
        number = int(match[1])
        if number not in planned:
            audit.add("foreign", f"data/{name}", "the plan has no such unit")
            continue
        audits[number] = audit_unit(run, planned[number], schema, expected_values, retried.get(number, frozenset()))
        audit.findings += audits[number].findings
    return audits


def _count_totals(audit: FilesAudit, plan: Plan, units: dict[int, "UnitAudit"], retried: RetriedIds) -> None:
    audit.num_units = len(units)
    audit.rows_by_unit = {number: unit.num_rows for number, unit in sorted(units.items()) if not unit.findings}
    audit.num_rows = sum(unit.num_rows for unit in units.values())
    for number, unit in units.items():
        if retried.get(number, frozenset()).isdisjoint(unit.letter_ids):
            audit.num_failed_rows += len(unit.letter_ids)
    audit.num_output_tokens = sum(unit.usage.num_output_tokens for unit in units.values() if unit.usage)
    audit.num_rows_left = sum(unit.num_rows for unit in plan.remaining_units(units))
    if not audit.is_finished:
        num_left = audit.num_units_planned - audit.num_units
        audit.notes.append(f"not committed yet: {_count(num_left, 'unit')} with {_count(audit.num_rows_left, 'row')}")


def _check_retries(audit: FilesAudit, plan: Plan, units: dict[int, "UnitAudit"], retried: RetriedIds) -> None:
    """Check that retries cover all dead letters of a unit, each once."""
    planned = {unit.unit: unit for unit in plan.units}
    num_retries: Counter[tuple[int, int]] = Counter()  # by (unit, position of the row)
    for unit in plan.units:
        if unit.supersedes is not None:
            num_retries.update((unit.supersedes, row) for row in unit.rows or ())
    for unit in plan.units:
        if unit.supersedes is None:
            continue
        where, earlier = f"unit {unit.unit}", planned[unit.supersedes]
        earlier_audit, retried_ids = units.get(earlier.unit), retried[earlier.unit]
        letter_ids = set(earlier_audit.letter_ids) if earlier_audit else set()
        if any(num_retries[earlier.unit, row] > 1 for row in unit.rows or ()):
            audit.add("plan", where, f"rows of unit {earlier.unit} are retried more than once")
        elif not retried_ids <= {earlier.row_id(index) for index in range(earlier.num_rows)}:
            audit.add("plan", where, f"retries rows that unit {earlier.unit} does not have")
        elif earlier_audit is None:
            audit.add("lost", where, f"retries dead letters of unit {earlier.unit}, which is not committed")
        # A unit that ran again after its dead letters were retried skipped them: none is among its new dead letters.
        elif not earlier_audit.findings and letter_ids & retried_ids and letter_ids - retried_ids:
            audit.add("plan", where, f"does not retry all dead letters of unit {earlier.unit}")


def _check_ledger(audit: FilesAudit, run: RunDirectory, units: dict[int, "UnitAudit"]) -> None:
    """Check that the ledger has every engine process, and that no process committed more than it generated."""
    sessions = _read_sessions(audit, run)
    committed: Counter[str] = Counter()
    for number, unit in sorted(units.items()):
        if unit.usage is None:
            continue
        session_id = unit.usage.session_id
        if session_id not in sessions:
            message = f"committed by engine process {session_id}, which is not in the ledger"
            audit.add("ledger", run.unit_path(number).name, message)
        committed[session_id] += unit.usage.num_output_tokens
    for session_id, session in sessions.items():
        lost = session.num_output_tokens - committed[session_id]
        audit.num_lost_tokens += max(0, lost)
        # The last heartbeat of a process that was killed may be older than its last commit.
        if lost < 0 and session.ended:
            message = f"{session.num_output_tokens:,} tokens generated, {committed[session_id]:,} committed"
            audit.add("ledger", f"ledger/session-{session_id}.parquet", message)


def _read_sessions(audit: FilesAudit, run: RunDirectory) -> dict[str, EngineSession]:
    sessions: dict[str, EngineSession] = {}
    for name in _list_names(run.ledger):
        if not _FILES_BY_FOLDER["ledger"].fullmatch(name):
            continue  # `_check_other_files` reports it
        try:
            with open_to_read(run.ledger / name) as file:
                file_sessions = sessions_from_table(read_table(file))
        except (PeagleError, OSError, ValueError) as error:  # an Arrow error is a ValueError
            audit.add("damaged", f"ledger/{name}", getattr(error, "message", str(error)))
            continue
        for session in file_sessions:
            if sessions.get(session.session_id, session) != session:  # a session can be in two files, equally
                audit.add("ledger", f"ledger/{name}", f"engine process {session.session_id} is recorded twice")
            sessions[session.session_id] = session
    return sessions


def _check_other_files(audit: FilesAudit, run: RunDirectory, plan_name: str, valid_letter_files: set[str]) -> None:
    """Check that there are no foreign files, and no leftovers once the run is finished."""
    lease = read_lease(run.root)
    leftovers = []
    for name in _list_names(run.root):
        if name.endswith(TEMPORARY_SUFFIX) or (PLAN_FILE.fullmatch(name) and name != plan_name):
            leftovers.append(name)
        elif not _ROOT_NAMES.fullmatch(name) and name != plan_name:
            audit.add("foreign", name, "not a file of a run")
    for folder, pattern in _FILES_BY_FOLDER.items():
        for name in _list_names(run.root / folder):
            where = f"{folder}/{name}"
            is_leftover = folder == "suspects" or (folder == "failed" and name not in valid_letter_files)
            if name.endswith(TEMPORARY_SUFFIX) or (pattern.fullmatch(name) and is_leftover):
                leftovers.append(where)
            elif not pattern.fullmatch(name):
                audit.add("foreign", where, "not a file of a run")
    if audit.is_finished and not (lease is not None and lease.seems_alive()):
        for where in leftovers:
            audit.add("leftover", where, "not used; the next attempt removes it")
    elif leftovers:
        audit.notes.append(
            f"{_count(len(leftovers), 'file')} of unfinished attempts, to be removed by the next attempt"
        )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _check_report(audit: FilesAudit, run: RunDirectory) -> None:
    """Check that all units that were committed when the report was written still exist."""
    path = run.root / "report.json"
    if not path.exists():
        return
    try:
        report = json.loads(path.read_bytes())
    except ValueError as error:
        audit.add("damaged", path.name, str(error))
        return
    num_missing = report["account"]["num_units"] - audit.num_units
    if num_missing > 0:
        audit.add("lost", "data", f"{_count(num_missing, 'committed unit')} missing since report.json was written")
    elif not audit.findings and report["account"]["num_output_tokens"] != audit.num_output_tokens:
        audit.notes.append("report.json is older than the units: `peagle report` writes it again")


def _check_input(audit: FilesAudit, plan: Plan, manifest: dict[str, Any]) -> None:
    """Check that the input has not changed since the run was planned. Missing input is only a note."""
    formats = {unit.span.path: unit.span.format for unit in plan.units}
    files: list[SourceFile] = []
    for path, input_format in formats.items():
        try:
            files += discover(path, input_format)
        except InputError as error:
            if "://" in path or not Path(path).exists():
                audit.notes.append(f"the input was not compared: {error.message}")
            else:
                audit.add("input", path, error.message)
            return
    limit = manifest["fingerprint"]["corpus"]["limit"]
    difference = _input_difference(files, plan, limit)
    # A file without rows is part of the fingerprint but not of any unit, so the whole corpus must be listed again.
    if difference is not None and not _is_configured_corpus_same(plan, manifest["config"], limit):
        audit.add("input", ", ".join(formats), difference)


def _input_difference(files: list[SourceFile], plan: Plan, limit: int | None) -> str | None:
    """Return how the input differs from the plan, or None."""
    try:
        _, _, fingerprint = scan(files, plan.cut, limit, WorkEstimate(), earlier_fingerprint=plan.corpus_fingerprint)
    except InputError as error:
        return error.message
    return None if fingerprint == plan.corpus_fingerprint else "the input changed after the run was planned"


def _is_configured_corpus_same(plan: Plan, config: dict[str, Any], limit: int | None) -> bool:
    try:
        files = find_files(
            config["input"], config["input_format"], exclude=config["output"], announce=lambda note: None
        )
        return _input_difference(files, plan, limit) is None
    except InputError:
        return False


def _list_names(folder: StoragePath) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# --- one unit

_LETTER_KEYS = {"id", "unit", "attempt", "reason", "message", "row"}
_TOKEN_COLUMNS = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens")
_DRAFT_COLUMNS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_MAX_IDS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitAudit:
    """The findings in a committed unit. `letter_ids` are the ids of its failed rows, whether retried or not."""

    findings: tuple[Finding, ...]
    usage: UnitUsage | None = None
    dead_letters_name: str = ""
    num_rows: int = 0
    letter_ids: tuple[str, ...] = ()


def expected_schema(corpus: pa.Schema, *, keeps_inputs: bool, is_parsed: bool = False) -> pa.Schema:
    """Return the columns of every unit: the corpus's columns, then the output columns."""
    outputs = output_schema(is_parsed=is_parsed)
    names = names_in_file(corpus.names, keeps_inputs=keeps_inputs, outputs=outputs)
    types = [column.type for schema in (corpus, outputs) for column in schema]
    return pa.schema(list(zip(names, types, strict=True)))


def audit_unit(
    run: RunDirectory,
    unit: WorkUnit,
    schema: pa.Schema,
    expected_values: dict[str, Any],
    retried: frozenset[str] = frozenset(),
) -> UnitAudit:
    """Check one committed unit.

    Args:
        schema: from `expected_schema`.
        expected_values: the values that the columns `model` and `drafter` must have.
        retried: ids of the rows that were retried in another unit.
    """
    path = run.unit_path(unit.unit)
    try:
        usage, name = run.usage(unit.unit), run.dead_letters_name(unit.unit)
        with open_to_read(path) as file:
            table = read_table(file)
    except (PeagleError, OSError, pa.ArrowException) as error:
        message = error.message if isinstance(error, PeagleError) else str(error)
        return UnitAudit(findings=(Finding(kind="damaged", where=path.name, message=message),))
    if problem := _column_problem(plain_schema(table.schema), schema):
        finding = Finding(kind="schema", where=path.name, message=problem)
        return UnitAudit(findings=(finding,), usage=usage, dead_letters_name=name, num_rows=table.num_rows)
    letters, damage = _read_letters(run, unit, name)
    table = table.rename_columns(internal_names(table.schema))
    rows = table.select(["id", "model", "drafter", *_TOKEN_COLUMNS, *_DRAFT_COLUMNS]).to_pylist()
    ids, letter_ids = [row["id"] for row in rows], [letter["id"] for letter in letters]
    problems = [("usage", message) for message in _usage_problems(usage, rows, None if damage else len(letters))]
    if not damage:  # if dead letters are unreadable, failed rows would seem lost
        problems += list(_id_problems(unit, ids, letter_ids, retried))
    for column, value in expected_values.items():
        if others := {row[column] for row in rows} - {value}:
            problems.append(("row", f"column {column!r} has {min(map(str, others))!r}, but the run used {value!r}"))
    return UnitAudit(
        findings=(*damage, *(Finding(kind=kind, where=path.name, message=message) for kind, message in problems)),
        usage=usage,
        dead_letters_name=name,
        num_rows=table.num_rows,
        letter_ids=tuple(letter_ids),
    )


def _column_problem(actual: pa.Schema, expected: pa.Schema) -> str | None:
    if actual.names != expected.names:
        different = sorted(set(actual.names) ^ set(expected.names))
        return f"the columns differ from the plan: {', '.join(different) or 'different order'}"
    for name in expected.names:
        if actual.field(name).type != expected.field(name).type:
            return f"column {name!r} is {actual.field(name).type}, but {expected.field(name).type} in the plan"
    return None


def _read_letters(run: RunDirectory, unit: WorkUnit, name: str) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Return the unit's dead letters, or findings about their file."""
    if not name:
        return [], []
    try:
        letters = [json.loads(line) for line in (run.failed / name).read_bytes().splitlines()]
    except FileNotFoundError:
        message = f"the unit's dead letters are missing: failed/{name}"
        return [], [Finding(kind="missing", where=run.unit_path(unit.unit).name, message=message)]
    except (OSError, ValueError) as error:
        return [], [Finding(kind="damaged", where=name, message=f"not dead letters: {error}")]
    for number, letter in enumerate(letters, 1):
        problem = ""
        if not isinstance(letter, dict) or not set(letter) >= _LETTER_KEYS:
            problem = f"a dead letter must have {', '.join(sorted(_LETTER_KEYS))}"
        elif letter["unit"] != unit.unit:
            problem = f"unit is {letter['unit']!r}, but {unit.unit} in the plan"
        elif letter["attempt"] != unit.attempt:
            problem = f"attempt is {letter['attempt']!r}, but {unit.attempt} in the plan"
        if problem:
            return [], [Finding(kind="damaged", where=name, message=f"line {number}: {problem}")]
    return letters, []


def _id_problems(
    unit: WorkUnit, ids: Sequence[str], letter_ids: Sequence[str], retried: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Yield (kind, message) for ids not in exactly one row or dead letter, and for retried ids that have a row here."""
    planned = {unit.row_id(index) for index in range(unit.num_rows)}
    counts = Counter(ids) + Counter(letter_ids)
    if missing := planned - retried - counts.keys():
        yield "lost", f"{_first_ids(missing)}: planned, but in no row and no dead letter"
    if foreign := counts.keys() - planned:
        yield "foreign", f"{_first_ids(foreign)}: not in this unit"
    if repeated := {row_id for row_id, count in counts.items() if count > 1}:
        yield "doubled", f"{_first_ids(repeated)}: more than once"
    if answered_twice := retried.intersection(ids):
        yield "doubled", f"{_first_ids(answered_twice)}: committed, but also retried"


def _usage_problems(usage: UnitUsage, rows: Sequence[dict[str, Any]], num_letters: int | None) -> Iterator[str]:
    """Compare the usage in a file's footer with its rows and dead letters.

    `num_letters` is None if the dead letters cannot be read.
    """
    recorded = {
        "num_rows": usage.num_rows,
        "num_failed_rows": usage.num_failed_rows,
        **{name: getattr(usage, name) for name in _TOKEN_COLUMNS},
        **{name: getattr(usage.speculation, name) for name in _DRAFT_COLUMNS},
    }
    counted = {
        "num_rows": len(rows),
        "num_failed_rows": usage.num_failed_rows if num_letters is None else num_letters,
        **{name: sum(row[name] or 0 for row in rows) for name in (*_TOKEN_COLUMNS, *_DRAFT_COLUMNS)},
    }
    for name, value in recorded.items():
        if value != counted[name]:
            yield f"{name} is {value:,} in the footer, but {counted[name]:,} were counted"


def _first_ids(ids: Any) -> str:
    first = ", ".join(sorted(map(str, ids))[:_MAX_IDS_SHOWN])
    return first if len(ids) <= _MAX_IDS_SHOWN else f"{first}, ... ({len(ids):,} ids)"
