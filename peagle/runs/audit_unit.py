"""Audit one committed unit: rows, dead letters, usage; and the unchanged input.

It reads the unit's two files and holds their rows; it knows no other unit, and generates nothing.

The check of the input reads the whole corpus again, as planning did, and keeps nothing of it.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from peagle.corpus.extensions import plain_schema
from peagle.corpus.files import SourceFile, discover
from peagle.corpus.rows import WorkEstimate
from peagle.corpus.scan import find, scan
from peagle.economics.usage import UnitUsage
from peagle.errors import InputError, PeagleError
from peagle.parquet_table import read_table
from peagle.runs.directory import RunDirectory
from peagle.runs.plan import Plan, WorkUnit
from peagle.runs.rows import OUTPUT_SCHEMA, output_names
from peagle.storage import open_to_read

_LETTER_KEYS = {"id", "unit", "attempt", "reason", "message", "row"}
_COUNTED = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens")
_DRAFTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_READ = ("id", "model", "drafter", *_COUNTED, *_DRAFTED)
_SHOWN_IDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault: its kind, its file, and a sentence."""

    kind: str
    where: str
    message: str

    def to_dict(self) -> dict[str, str]:
        """Ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitAudit:
    """A committed unit as it was found.

    `letter_ids` are of the rows that failed in it, retried or not.
    """

    findings: tuple[Finding, ...]
    usage: UnitUsage | None = None
    letters_name: str = ""
    num_rows: int = 0
    letter_ids: tuple[str, ...] = ()


def expected_schema(corpus: pa.Schema) -> pa.Schema:
    """The columns of every unit.

    The corpus's under their names in the output, then the output's own.
    """
    names = output_names(corpus.names)
    return pa.schema([pa.field(names[column.name], column.type) for column in corpus] + list(OUTPUT_SCHEMA))


def audit_unit(
    run: RunDirectory,
    unit: WorkUnit,
    schema: pa.Schema,
    answered_by: dict[str, Any],
    taken: frozenset[str] = frozenset(),
) -> UnitAudit:
    """Check one unit that is committed.

    Args:
        schema: as `expected_schema` says.
        answered_by: the values that the columns `model` and `drafter` must have.
        taken: ids of its rows for which retries answer.
    """
    path = run.unit_path(unit.unit)
    try:
        usage, name = run.usage(unit.unit), run.letters_name(unit.unit)
        with open_to_read(path) as file:
            table = read_table(file)
    except (PeagleError, OSError, pa.ArrowException) as error:
        message = error.message if isinstance(error, PeagleError) else str(error)
        return UnitAudit(findings=(Finding(kind="damaged", where=path.name, message=message),))
    wrong = _wrong_columns(plain_schema(table.schema), schema)
    if wrong:
        finding = Finding(kind="schema", where=path.name, message=wrong)
        return UnitAudit(findings=(finding,), usage=usage, letters_name=name, num_rows=table.num_rows)
    letters, damage = _letters(run, unit, name)
    rows = table.select(list(_READ)).to_pylist()
    ids, letter_ids = [row["id"] for row in rows], [letter["id"] for letter in letters]
    found = [("usage", message) for message in _wrong_usage(usage, rows, None if damage else len(letters))]
    if not damage:  # else every row with a letter would be missing
        found += list(_wrong_ids(unit, ids, letter_ids, taken))
    found += [("row", message) for message in _wrong_answers(rows, answered_by)]
    findings = [Finding(kind=kind, where=path.name, message=message) for kind, message in found]
    return UnitAudit(
        findings=(*damage, *findings),
        usage=usage,
        letters_name=name,
        num_rows=table.num_rows,
        letter_ids=tuple(letter_ids),
    )


def _wrong_columns(found: pa.Schema, expected: pa.Schema) -> str | None:
    if found.names != expected.names:
        unlike = sorted(set(found.names) ^ set(expected.names))
        return f"its columns are not those of the plan: {', '.join(unlike) or 'they stand in another order'}"
    for name in expected.names:
        if found.field(name).type != expected.field(name).type:
            return f"column {name!r} is {found.field(name).type}, and {expected.field(name).type} in the plan"
    return None


def _letters(run: RunDirectory, unit: WorkUnit, name: str) -> tuple[list[dict[str, Any]], list[Finding]]:
    """The unit's dead letters that can be read, and what is wrong with the file."""
    if not name:
        return [], []
    try:
        lines = (run.failed / name).read_bytes().splitlines()
        letters = [json.loads(line) for line in lines]
    except FileNotFoundError:
        message = f"its dead letters are not there: failed/{name}"
        return [], [Finding(kind="missing", where=run.unit_path(unit.unit).name, message=message)]
    except (OSError, ValueError) as error:
        return [], [Finding(kind="damaged", where=name, message=f"not dead letters: {error}")]
    for number, letter in enumerate(letters, 1):
        if wrong := _wrong_letter(letter, unit):
            return [], [Finding(kind="damaged", where=name, message=f"line {number}: {wrong}")]
    return letters, []


def _wrong_letter(letter: Any, unit: WorkUnit) -> str | None:
    if not isinstance(letter, dict) or not set(letter) >= _LETTER_KEYS:
        return f"a dead letter has {', '.join(sorted(_LETTER_KEYS))}"
    for key, value in (("unit", unit.unit), ("attempt", unit.attempt)):
        if letter[key] != value:
            return f"its {key} is {letter[key]!r}, and {value} in the plan"
    return None


def _wrong_ids(
    unit: WorkUnit, ids: Sequence[str], letter_ids: Sequence[str], taken: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Check that each planned id is in exactly one row or dead letter.

    An id that a retry answers for is in no row.
    """
    planned = {unit.row_id(index) for index in range(unit.num_rows)}
    counts = Counter(ids) + Counter(letter_ids)
    if missing := planned - taken - counts.keys():
        yield "lost", f"{_some(missing)}: planned, and in no row and no dead letter"
    if foreign := counts.keys() - planned:
        yield "foreign", f"{_some(foreign)}: not of this unit"
    if doubled := {row_id for row_id, count in counts.items() if count > 1}:
        yield "doubled", f"{_some(doubled)}: there more than once"
    if answered_twice := taken.intersection(ids):
        yield "doubled", f"{_some(answered_twice)}: a row, and taken up again by a retry"


def _wrong_usage(usage: UnitUsage, rows: Sequence[dict[str, Any]], num_letters: int | None) -> Iterator[str]:
    """Check the file's footer against the sum of its rows.

    `num_letters` is None where they cannot be read.
    """
    drafts = usage.speculation
    stated = {
        "num_rows": usage.num_rows,
        "num_failed_rows": usage.num_failed_rows,
        **{name: getattr(usage, name) for name in _COUNTED},
        **{name: getattr(drafts, name) for name in _DRAFTED},
    }
    counted = {
        "num_rows": len(rows),
        "num_failed_rows": usage.num_failed_rows if num_letters is None else num_letters,
        **{name: sum(row[name] or 0 for row in rows) for name in (*_COUNTED, *_DRAFTED)},
    }
    for name, value in stated.items():
        if value != counted[name]:
            yield f"{name} is {value:,} in the footer, and {counted[name]:,} in the rows"


def _wrong_answers(rows: Sequence[dict[str, Any]], answered_by: dict[str, Any]) -> Iterator[str]:
    for name, value in answered_by.items():
        if others := {row[name] for row in rows} - {value}:
            yield f"column {name!r} says {min(map(str, others))!r}, and the run is of {value!r}"


def _some(ids: Any) -> str:
    """A few of the ids, and how many there are."""
    first = ", ".join(sorted(map(str, ids))[:_SHOWN_IDS])
    return first if len(ids) <= _SHOWN_IDS else f"{first}, ... ({len(ids):,} ids)"


def input_findings(plan: Plan, manifest: dict[str, Any]) -> tuple[list[Finding], list[str]]:
    """Faults of the input, and notes.

    Files that are no longer there are a note.
    """
    formats = {unit.span.path: unit.span.format for unit in plan.units}
    files: list[SourceFile] = []
    for path, kind in formats.items():
        try:
            files += discover(path, kind)
        except InputError as error:
            if "://" in path or not Path(path).exists():
                return [], [f"the input was not compared: {error.message}"]
            return [Finding(kind="input", where=path, message=error.message)], []
    limit = manifest["fingerprint"]["corpus"]["limit"]
    wrong = _differs(files, plan, limit)
    # A file without a row is part of the fingerprint and of no unit: only the corpus as it was named has it.
    if wrong is None or _named_corpus_is_same(plan, manifest["config"], limit):
        return [], []
    return [Finding(kind="input", where=", ".join(formats), message=wrong)], []


def _differs(files: list[SourceFile], plan: Plan, limit: int | None) -> str | None:
    try:
        _, _, fingerprint = scan(files, plan.cut, limit, WorkEstimate(), like=plan.corpus_fingerprint)
    except InputError as error:
        return error.message
    return None if fingerprint == plan.corpus_fingerprint else "the input is not what it was when the run was planned"


def _named_corpus_is_same(plan: Plan, config: dict[str, Any], limit: int | None) -> bool:
    try:
        files = find(config["input"], config["input_format"], outside=config["output"], announce=lambda note: None)
        return _differs(files, plan, limit) is None
    except InputError:
        return False
