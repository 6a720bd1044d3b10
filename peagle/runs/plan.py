"""The plan of a run: the corpus, split once into deterministic work units. A unit is a range of rows of one file.

The plan is written before anything runs and never changes. A retry adds units: each retries the dead letters of one
unit, and from then on is responsible for these rows (`docs/decisions/0006-retry-units.md`).
"""

import io
import json
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from peagle.corpus.cutting import Cut, auto_cut, max_rows_affecting_cut
from peagle.corpus.extensions import plain_schema
from peagle.corpus.rows import Span, WorkEstimate
from peagle.corpus.scan import count_rows, find_files, scan
from peagle.parquet_table import read_table

_SMALL_UNITS, _NOTES = b"peagle.small_units", b"peagle.notes"  # metadata keys of the plan's file
_RETRY_SCHEMA = pa.schema([("unit", pa.int64()), ("supersedes", pa.int64()), ("rows", pa.list_(pa.int32()))])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkUnit:
    """Rows that are committed together."""

    unit: int
    first_id: int  # the number of the span's first row in the whole corpus
    span: Span
    rows: tuple[int, ...] | None = None  # indices of the span's rows that belong to the unit; None for all
    supersedes: int | None = None  # the unit whose dead letters this unit retries
    attempt: int = 1  # number of the attempt to generate these rows, starting with 1

    @property
    def num_rows(self) -> int:
        return self.span.num_rows if self.rows is None else len(self.rows)

    def without(self, rows: Container[int]) -> "WorkUnit":
        """Return a copy of the unit without these rows of the span."""
        remaining = range(self.span.num_rows) if self.rows is None else self.rows
        return replace(self, rows=tuple(row for row in remaining if row not in rows))

    @property
    def work(self) -> int:
        """The estimated work, by which units are ordered."""
        return self.span.work * self.num_rows // self.span.num_rows

    def row_id(self, index: int) -> str:
        """Return the id of the unit's row `index`: its number in the corpus, padded to sort."""
        return f"{self.first_id + (index if self.rows is None else self.rows[index]):09d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Unit `unit` retries `rows` of unit `supersedes`: all of that unit's dead letters."""

    unit: int
    supersedes: int
    rows: tuple[int, ...]  # as in `WorkUnit`


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All units of a run, with the corpus's schema and fingerprint."""

    units: tuple[WorkUnit, ...]  # units of the corpus in its order, then units of retries
    rows_per_unit: int
    schema: pa.Schema
    corpus_fingerprint: str
    small_units: tuple[int, ...] = ()  # sizes of the first units; all other units have `rows_per_unit` rows
    num_retries: int = 0  # attempts to retry dead letters, each with one or more units
    notes: tuple[str, ...] = ()  # input files that were skipped, with the reason

    @property
    def cut(self) -> Cut:
        return Cut(rows_per_unit=self.rows_per_unit, small=self.small_units)

    @property
    def num_rows(self) -> int:
        """Rows of the corpus in this run."""
        return sum(unit.num_rows for unit in self.units if unit.supersedes is None)

    @property
    def is_batch(self) -> bool:
        return self.units[0].span.format == "openai-batch"

    def with_retries(self, retries: Iterable[Retry]) -> "Plan":
        """Return the plan with the units of one more attempt to retry dead letters."""
        units = {unit.unit: unit for unit in self.units}
        for retry in retries:
            failed_unit = units[retry.supersedes]
            units[retry.unit] = replace(
                failed_unit,
                unit=retry.unit,
                rows=retry.rows,
                supersedes=failed_unit.unit,
                attempt=failed_unit.attempt + 1,
            )
        return replace(self, units=tuple(units.values()), num_retries=self.num_retries + 1)

    def retried_rows(self) -> dict[int, frozenset[int]]:
        """Return the indices of the rows that are retried, by the unit in which they failed."""
        retried: defaultdict[int, frozenset[int]] = defaultdict(frozenset)
        for unit in self.units:
            if unit.supersedes is not None:
                retried[unit.supersedes] |= frozenset(unit.rows or ())
        return dict(retried)

    def superseded(self, num_rows: Mapping[int, int]) -> frozenset[int]:
        """Return the committed units whose dead letters are all retried in other units.

        A unit whose output file was deleted runs again without the retried rows, so all its dead letters are new.

        Args:
            num_rows: for each committed unit, the sum of its output rows and dead letters.
        """
        retried, planned = self.retried_rows(), {unit.unit: unit.num_rows for unit in self.units}
        return frozenset(unit for unit, done in num_rows.items() if done != planned[unit] - len(retried[unit]))

    def remaining_units(self, committed: Container[int]) -> list[WorkUnit]:
        """Return the units that are not committed, without rows that are retried in another unit.

        A unit has such rows if its output file was deleted after the retry was planned.
        """
        retried = self.retried_rows()
        remaining = (unit for unit in self.units if unit.unit not in committed)
        return [unit.without(retried[unit.unit]) if unit.unit in retried else unit for unit in remaining]


class CorpusConfig(Protocol):
    """The options of `GenerateConfig` that determine how a corpus is split."""

    @property
    def input(self) -> str: ...

    @property
    def input_format(self) -> Any: ...

    @property
    def output(self) -> Any: ...

    @property
    def limit(self) -> int | None: ...

    @property
    def rows_per_unit(self) -> int | None: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def sampling_column(self) -> str | None: ...

    @property
    def max_num_seqs(self) -> int | None: ...

    @property
    def max_engines(self) -> int: ...


def make_plan(
    config: CorpusConfig, cut: Cut | None = None, *, max_num_seqs: int = 8, earlier_fingerprint: str | None = None
) -> Plan:
    """Split a corpus into units.

    Args:
        cut: how an earlier plan was split; None for the configured `rows_per_unit`, or automatic sizes.
        max_num_seqs: used if the configuration does not set it.
        earlier_fingerprint: a fingerprint to compare with; the new one uses the same version of the algorithm.
    """
    notes: list[str] = []
    files = find_files(config.input, config.input_format, exclude=str(config.output), announce=notes.append)
    if cut is None and config.rows_per_unit is not None:
        cut = Cut(rows_per_unit=config.rows_per_unit)
    if cut is None:
        max_rows_to_count = max_rows_affecting_cut(config.max_engines)
        num_rows = count_rows(files, min(config.limit or max_rows_to_count, max_rows_to_count))
        cut = auto_cut(num_rows, config.max_engines, config.max_num_seqs or max_num_seqs)
    estimate = WorkEstimate(max_tokens=config.max_tokens, column=config.sampling_column or "sampling")
    spans, schema, fingerprint = scan(files, cut, config.limit, estimate, earlier_fingerprint=earlier_fingerprint)
    first_ids = accumulate((span.num_rows for span in spans), initial=0)
    return Plan(
        units=tuple(WorkUnit(unit=unit, first_id=next(first_ids), span=span) for unit, span in enumerate(spans)),
        rows_per_unit=cut.rows_per_unit,
        small_units=cut.small,
        schema=schema,
        corpus_fingerprint=fingerprint,
        notes=tuple(notes),
    )


def plan_to_bytes(plan: Plan) -> bytes:
    """Return the contents of the plan's file: a row per unit; schema and fingerprint are metadata."""
    columns = {name: [getattr(unit, name) for unit in plan.units] for name in ("unit", "first_id")}
    columns |= {field.name: [getattr(unit.span, field.name) for unit in plan.units] for field in fields(Span)}
    metadata = {
        b"peagle.schema": plan.schema.serialize().to_pybytes(),
        b"peagle.corpus": plan.corpus_fingerprint.encode(),
        b"peagle.rows_per_unit": str(plan.rows_per_unit).encode(),
        _SMALL_UNITS: json.dumps(plan.small_units).encode(),
        _NOTES: json.dumps(plan.notes).encode(),
    }
    return _to_parquet(pa.table(columns).replace_schema_metadata(metadata))


def plan_from_bytes(data: bytes) -> Plan:
    table = read_table(io.BytesIO(data))
    metadata = table.schema.metadata
    units = []
    for batch in table.to_batches(16_384):
        for row in batch.to_pylist():
            unit, first_id = row.pop("unit"), row.pop("first_id")
            # A plan may have millions of units with the same few paths and formats.
            span_values: dict[str, Any] = {
                key: sys.intern(value) if isinstance(value, str) else value for key, value in row.items()
            }
            units.append(WorkUnit(unit=unit, first_id=first_id, span=Span(**span_values)))
    return Plan(
        units=tuple(units),
        rows_per_unit=int(metadata[b"peagle.rows_per_unit"]),
        schema=plain_schema(pa.ipc.read_schema(pa.py_buffer(metadata[b"peagle.schema"]))),
        corpus_fingerprint=metadata[b"peagle.corpus"].decode(),
        small_units=tuple(json.loads(metadata.get(_SMALL_UNITS, b"[]"))),  # missing in older plans, like notes
        notes=tuple(json.loads(metadata.get(_NOTES, b"[]"))),
    )


def retries_to_bytes(retries: Iterable[Retry]) -> bytes:
    """Return `plan-N.parquet`: a row per retry."""
    return _to_parquet(pa.Table.from_pylist([asdict(retry) for retry in retries], _RETRY_SCHEMA))


def retries_from_bytes(data: bytes) -> list[Retry]:
    rows = read_table(io.BytesIO(data)).to_pylist()
    return [Retry(unit=row["unit"], supersedes=row["supersedes"], rows=tuple(row["rows"])) for row in rows]


def unit_to_json(unit: WorkUnit) -> str:
    """Return a unit as Ray Data transports it."""
    return json.dumps(asdict(unit))


def unit_from_json(text: str) -> WorkUnit:
    values = json.loads(text)
    rows = values["rows"]
    return WorkUnit(**{**values, "span": Span(**values["span"]), "rows": None if rows is None else tuple(rows)})


def _to_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


_CHUNK_DIVISOR = 512  # a chunk has at most 1/512 of the remaining units, so the last units are submitted one by one
_MAX_CHUNK = 256  # units


def longest_first(units: Sequence[WorkUnit]) -> list[WorkUnit]:
    """Sort units by work, largest first. Units within the same power of two stay in the order of the corpus.

    A compressed file or a Parquet row group can only be read forward. In this order, it is read only once per power of
    two, instead of once per unit.
    """
    return sorted(units, key=lambda unit: (-unit.work.bit_length(), unit.unit))


def chunks(units: Sequence[WorkUnit]) -> list[Sequence[WorkUnit]]:
    """Split the units into chunks to prepare in parallel. The last chunks are single units, to keep their order.

    >>> [len(chunk) for chunk in chunks(range(2048))][:3]
    [4, 3, 3]
    """
    unit_chunks, start = [], 0
    while start < len(units):
        size = max(1, min(_MAX_CHUNK, (len(units) - start) // _CHUNK_DIVISOR))
        unit_chunks.append(units[start : start + size])
        start += size
    return unit_chunks
