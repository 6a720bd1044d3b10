"""Export a run's rows as Parquet, JSON lines, or OpenAI's output and error files; describe the first answers.

    OUT/export/FORMAT/output.*      the rows, in the order of the corpus
    OUT/export/FORMAT/errors.jsonl  the dead letters
    OUT/export/FORMAT/export.json   file sizes and counts; written last

Exports are made from the committed units, one batch of rows at a time.
"""

import contextlib
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, BinaryIO, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from peagle.corpus.extensions import plain_schema, to_values
from peagle.engine.interface import FAILED
from peagle.errors import ConfigError, PeagleError
from peagle.plain_json import has_non_finite, to_json
from peagle.requests.fields import CHAT_URL
from peagle.requests.openai import ANSWER_COLUMNS, error_line, output_line
from peagle.runs.directory import BATCH_ROWS, RunDirectory, read_rows
from peagle.runs.plan import Plan
from peagle.runs.report import retry_if_changed
from peagle.storage import StoragePath, atomic_file, make_folder, open_to_read, remove_temporaries, write_json

Format = Literal["parquet", "jsonl", "openai-batch"]
FORMATS: tuple[Format, ...] = get_args(Format)
_MAX_DURATION_S = 24 * 3600.0  # maximum duration of an export
_ROW_GROUP_ROWS = 65536


@dataclass(frozen=True, kw_only=True)
class Export:
    """The files and counts of an export."""

    format: str
    folder: str
    num_units: int  # exported units
    commits: str  # digest of the commits of these units, which changes if a unit is committed again
    num_rows: int
    num_failed_rows: int
    files: dict[str, int]  # sizes in bytes by name
    # For each column, the number of rows in which NaN or infinity was replaced by null, since JSON has neither.
    num_nulls: dict[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Return a line of text, and another for each column that lost values."""
        failed = f", {self.num_failed_rows} dead letters" if self.num_failed_rows else ""
        notes = [
            f"note: column {name!r}: NaN or infinity became null in {num:,} rows, because JSON has neither; "
            "parquet keeps them"
            for name, num in self.num_nulls.items()
        ]
        return "\n".join([f"{self.num_rows} rows{failed} as {self.format}: {self.folder}", *notes])


def export(run: RunDirectory, output_format: Format, *, partial: bool = False, force: bool = True) -> Export:
    """Export the committed units of a run. Exports can be repeated, and each file is written atomically.

    Args:
        partial: allow the export of an unfinished run.
        force: write the export even if an existing one is up to date.
    """
    return retry_if_changed(run, lambda: _export(run, output_format, partial=partial, force=force))


def _export(run: RunDirectory, output_format: Format, *, partial: bool, force: bool) -> Export:
    run_id, units, plan = run.manifest()["run_id"], sorted(run.committed()), run.plan()
    if len(units) < (num_planned := len(plan.units)) and not partial:
        raise ConfigError(
            f"{run}: {len(units)} of {num_planned} units are committed",
            hint="repeat the run's command to finish it, or export the committed rows with --partial",
        )
    folder = run.root / "export" / output_format
    commits = _commits_digest(run, units)
    if not force and (existing := _existing_export(folder)) is not None and existing.commits == commits:
        return existing
    try:
        make_folder(folder)
        remove_temporaries(folder, older_than_s=_MAX_DURATION_S)  # another process may be exporting
        (folder / "export.json").unlink(missing_ok=True)
        return _write(run, run_id, _group_with_retries(plan, units), commits, output_format, folder)
    except OSError as error:
        raise PeagleError(f"export {folder}: cannot be written: {error}") from error


def _commits_digest(run: RunDirectory, units: list[int]) -> str:
    """Return a digest of when, and by which engine process, each unit was committed."""
    run.read_ahead(units)
    digest = hashlib.sha256()
    for unit in units:
        usage = run.usage(unit)
        digest.update(f"{unit} {usage.session_id} {usage.finished_at!r}\n".encode())
    return digest.hexdigest()


def _group_with_retries(plan: Plan, committed: list[int]) -> list[list[int]]:
    """Return the committed units in the order of the corpus, each in a group with its retries."""
    first_attempt: dict[int, int] = {}
    for planned in plan.units:
        retried = planned.supersedes
        first_attempt[planned.unit] = planned.unit if retried is None else first_attempt[retried]
    unit_groups: defaultdict[int, list[int]] = defaultdict(list)
    for unit in committed:
        unit_groups[first_attempt[unit]].append(unit)
    return [unit_groups[unit] for unit in sorted(unit_groups)]


def _write(
    run: RunDirectory,
    run_id: str,
    unit_groups: list[list[int]],
    commits: str,
    output_format: Format,
    folder: StoragePath,
) -> Export:
    formatter = _OpenAiFormatter(run, run_id) if output_format == "openai-batch" else _JsonFormatter()
    output = folder / ("output.parquet" if output_format == "parquet" else "output.jsonl")
    errors = folder / "errors.jsonl"
    with atomic_file(output) as file:
        write_rows = _write_parquet if output_format == "parquet" else _write_jsonl
        num_rows = write_rows(run, unit_groups, file, formatter)
    num_failed_rows = 0
    with atomic_file(errors) as file:
        for dead_letter in run.dead_letters():
            file.write(_json_line(formatter.format_dead_letter(dead_letter)))
            num_failed_rows += 1
    result = Export(
        format=output_format,
        folder=str(folder),
        num_units=sum(map(len, unit_groups)),
        commits=commits,
        num_rows=num_rows,
        num_failed_rows=num_failed_rows,
        files={path.name: path.stat().st_size for path in (output, errors)},
        num_nulls=dict(formatter.num_nulls),
    )
    write_json(folder / "export.json", asdict(result))
    return result


def _existing_export(folder: StoragePath) -> Export | None:
    """Return the stored export if its files have the recorded sizes, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        existing = Export(**{**json.loads((folder / "export.json").read_bytes()), "folder": str(folder)})
        if all((folder / name).stat().st_size == size for name, size in existing.files.items()):
            return existing
    return None


class _JsonFormatter:
    """Formats rows and dead letters as JSON lines. `columns` are the columns to read; None means all."""

    columns: frozenset[str] | None = None

    def __init__(self) -> None:
        self.num_nulls: Counter[str] = Counter()

    def to_bytes(self, row: dict[str, Any], unit_finished_at: int) -> bytes:
        line = self.format_row(row, unit_finished_at)
        try:
            return _json_line(line, non_finite="refuse")
        except ValueError:
            self.num_nulls.update(name for name, value in row.items() if has_non_finite(value))
            return _json_line(line)

    def format_row(self, row: dict[str, Any], unit_finished_at: int) -> dict[str, Any]:
        return row

    def format_dead_letter(self, dead_letter: dict[str, Any]) -> dict[str, Any]:
        return dead_letter


class _OpenAiFormatter(_JsonFormatter):
    """Formats rows and dead letters in OpenAI's batch format. Without a column `custom_id`, row ids are used."""

    columns = ANSWER_COLUMNS | {"custom_id", "url"}

    def __init__(self, run: RunDirectory, run_id: str) -> None:
        super().__init__()
        self._run_id = run_id
        plan, manifest = run.plan(), run.manifest()
        self._is_openai_batch = plan.is_batch
        self._paths = {unit.unit: unit.span.path for unit in plan.units}
        self._is_chat = bool(manifest["fingerprint"]["prompts"]["chat"])
        # Runs of older versions have no served_name.
        self._served_name = {} if manifest.get("served_name") is None else {"model": manifest["served_name"]}

    def format_row(self, row: dict[str, Any], unit_finished_at: int) -> dict[str, Any]:
        is_chat = row["url"] == CHAT_URL if self._is_openai_batch else self._is_chat
        custom_id = row.get("custom_id")
        return output_line(
            row | self._served_name,
            custom_id=row["id"] if custom_id is None else str(custom_id),
            is_chat=is_chat,
            created=unit_finished_at,
            run_id=self._run_id,
        )

    def format_dead_letter(self, dead_letter: dict[str, Any]) -> dict[str, Any]:
        row = dead_letter["row"]
        # Clients read this message: show the name of the file, not its path on the server.
        path = self._paths[dead_letter["unit"]]
        dead_letter = {**dead_letter, "message": dead_letter["message"].replace(path, path.rpartition("/")[-1])}
        if dead_letter["reason"] == FAILED and self._served_name:
            dead_letter["message"] = "the engine failed on this request; the request can be retried"
        custom_id = row.get("custom_id") if isinstance(row, dict) else None
        if custom_id is None and not self._is_openai_batch:
            custom_id = dead_letter["id"]  # in an OpenAI batch, a row id could be another request's custom_id
        return error_line(dead_letter, custom_id=None if custom_id is None else str(custom_id), run_id=self._run_id)


def _write_jsonl(run: RunDirectory, unit_groups: list[list[int]], file: BinaryIO, formatter: _JsonFormatter) -> int:
    """Write the rows, and return their number."""
    num_rows = 0
    for unit_group in unit_groups:
        finished_at = int(max(run.usage(unit).finished_at for unit in unit_group))
        for batch in _batches(run, unit_group, formatter.columns, as_stored=formatter.columns is None):
            file.write(b"".join(formatter.to_bytes(row, finished_at) for row in to_values(batch)))
            num_rows += batch.num_rows
    return num_rows


def _write_parquet(run: RunDirectory, unit_groups: list[list[int]], file: BinaryIO, formatter: _JsonFormatter) -> int:
    """Write the rows, and return their number."""
    num_rows = 0
    schema = pa.schema([])
    if unit_groups:
        with open_to_read(run.unit_path(unit_groups[0][0])) as unit_file:
            schema = plain_schema(pq.read_schema(unit_file).remove_metadata())
    # A single unit would be too small for a row group.
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        pending: list[pa.RecordBatch] = []
        for batch in (b for unit_group in unit_groups for b in _batches(run, unit_group, None, as_stored=True)):
            pending.append(batch)
            num_rows += batch.num_rows
            if sum(b.num_rows for b in pending) >= _ROW_GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(pending, schema))
                pending.clear()
        if pending:
            writer.write_table(pa.Table.from_batches(pending, schema))
    return num_rows


def _batches(
    run: RunDirectory, unit_group: list[int], columns: frozenset[str] | None, *, as_stored: bool
) -> Iterator[pa.RecordBatch]:
    """Yield rows in the order of the corpus. A unit is merged with its retries in memory."""
    batches = read_units(run, unit_group, columns, as_stored=as_stored)
    if len(unit_group) == 1:
        yield from batches
    elif unsorted_batches := list(batches):
        ids = [batch for unit in unit_group for batch in read_rows(run.unit_path(unit), frozenset({"id"}))]
        indices = pc.sort_indices(pa.Table.from_batches(ids)["id"])
        yield from pa.Table.from_batches(unsorted_batches).take(indices).to_batches(BATCH_ROWS)


def batches_in_order(
    run: RunDirectory, columns: frozenset[str] | None = None, *, as_stored: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yield the committed rows in the order of the corpus.

    Args:
        columns: the columns to read; None means all.
        as_stored: use the column names in the unit files instead of the internal ones.

    Raises:
        PeagleError: a unit is damaged.
    """
    for unit_group in _group_with_retries(run.plan(), sorted(run.committed())):
        yield from _batches(run, unit_group, columns, as_stored=as_stored)


def read_units(
    run: RunDirectory, units: Iterable[int], columns: frozenset[str] | None, *, as_stored: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of committed units, with all columns if `columns` is None."""
    for path in map(run.unit_path, units):
        yield from read_rows(path, columns, as_stored=as_stored)


def _json_line(value: dict[str, Any], non_finite: Literal["null", "refuse"] = "null") -> bytes:
    return to_json(value, non_finite=non_finite).encode(errors="backslashreplace") + b"\n"


_MAX_ANSWERS, _MAX_LINES, _MAX_LINE_CHARS = 2, 4, 100


def describe_answers(run: RunDirectory) -> str:
    """Return the location of a run's answers and a few lines of the first two; an empty string without answers."""
    batches = read_units(run, sorted(run.committed()), frozenset({"id", "response"}))
    answers = (row for batch in batches for row in batch.slice(length=_MAX_ANSWERS).to_pylist())
    rows = list(islice(answers, _MAX_ANSWERS))
    if not rows:
        return ""
    output_lines = [f"answers: {run.root / 'data'}, column response of unit-*.parquet; the first {len(rows)}:"]
    for row in rows:
        lines = row["response"].strip("\n").splitlines()
        output_lines.append(f"  {printable(str(row['id']))}")
        output_lines += [f"  | {printable(line)[:_MAX_LINE_CHARS]}" for line in lines[:_MAX_LINES]]
        if len(lines) > _MAX_LINES:
            output_lines.append("  | ...")
    return "\n".join(output_lines)


def printable(line: str) -> str:
    # A model may answer with terminal escape sequences.
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line.expandtabs(4))
