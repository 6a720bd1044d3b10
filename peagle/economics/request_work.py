"""Read the work of requests from an endpoint's ledger, added up by day, engine session, key, model, drafter and tags.

A month may have a million lines, so lines are parsed and added up as columns. A part of a file with an invalid line is
parsed line by line, as in `RequestReader`, and the invalid line is skipped.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from peagle.economics.ledger import REQUESTS, Segment, segments, valid_records
from peagle.economics.spending import DAY_S, SpendingGroup, day_of
from peagle.economics.tags import NO_TAGS, tags_from_text
from peagle.economics.usage import UNIT_COUNTS, VERSION, RequestUsage, Work
from peagle.storage import StoragePath, open_to_read

if TYPE_CHECKING:
    import pyarrow as pa

_PIECE_BYTES = 16 * 1024 * 1024
_GROUP_FIELDS = ("day", "session_id", "key", "model", "drafter", "tags")
# Fields of `Work`. The first two counts, rows and failed rows, are added up as `num_requests`.
_SUMMED_FIELDS = (*UNIT_COUNTS[2:], "num_drafts", "num_accepted_tokens", "busy_s", "request_s", "usd")


def read_request_totals(folder: StoragePath) -> Mapping[SpendingGroup, Work]:
    """Return the work of all requests and batches of a ledger."""
    total: defaultdict[SpendingGroup, Work] = defaultdict(Work)
    for group, work in RequestTotalsReader(folder).new():
        total[group] += work
    return total


class RequestTotalsReader:
    def __init__(self, folder: StoragePath) -> None:
        self._folder = folder
        self._offsets: defaultdict[str, int] = defaultdict(int)

    def new(self) -> Iterator[tuple[SpendingGroup, Work]]:
        """Yield totals of the records since the last call. A group may be yielded several times."""
        is_complete = False
        while not is_complete:
            is_complete = True
            for contiguous in self._unread():
                try:
                    yield from self._read(contiguous)
                except FileNotFoundError:  # compaction moved the segments
                    is_complete = False

    def _unread(self) -> list[list[Segment]]:
        """Return the segments to read. Segments that are contiguous in a file are in one list."""
        segment_lists: list[list[Segment]] = []
        for segment in sorted(segments(self._folder, REQUESTS), key=lambda segment: (segment.path.name, segment.begin)):
            offset = self._offsets[segment.name]
            if segment.size is not None and offset >= segment.size:
                continue
            last = segment_lists[-1][-1] if segment_lists else segment
            is_contiguous = (
                last.size is not None and last.path == segment.path and last.begin + last.size == segment.begin
            )
            if is_contiguous and not offset:
                segment_lists[-1].append(segment)
            else:
                segment_lists.append([segment])
        return segment_lists

    def _read(self, contiguous: list[Segment]) -> Iterator[tuple[SpendingGroup, Work]]:
        first, last = contiguous[0], contiguous[-1]
        begin = first.begin + self._offsets[first.name]
        with open_to_read(first.path) as file:
            file.seek(begin)
            for piece in _pieces(file, None if last.size is None else last.begin + last.size - begin):
                self._advance(contiguous, len(piece))
                yield from _parse_piece(first.path, piece)

    def _advance(self, contiguous: list[Segment], num_bytes: int) -> None:
        for segment in contiguous:
            num_segment_bytes = num_bytes
            if segment.size is not None:
                num_segment_bytes = min(num_bytes, segment.size - self._offsets[segment.name])
            self._offsets[segment.name] += num_segment_bytes
            num_bytes -= num_segment_bytes


def _pieces(file: BinaryIO, num_bytes: int | None) -> Iterator[bytes]:
    """Yield whole lines of a file, some megabytes at a time, without a torn last line."""
    partial_line, remaining = b"", math.inf if num_bytes is None else num_bytes
    while data := file.read(int(min(_PIECE_BYTES, remaining))):
        remaining -= len(data)
        lines, newline, partial_line = (partial_line + data).rpartition(b"\n")
        if newline:
            yield lines + newline


def _parse_piece(path: StoragePath, piece: bytes) -> list[tuple[SpendingGroup, Work]]:
    import pyarrow as pa

    try:
        return list(_sum_by_group(_parse_columns(piece)))
    except (pa.ArrowException, ValueError):
        requests = valid_records(path, piece.split(b"\n")[:-1], RequestUsage.from_json)
        return [_work_of(request) for request in requests]


def _work_of(request: RequestUsage) -> tuple[SpendingGroup, Work]:
    usage = request.usage
    group = SpendingGroup(
        day_of(usage.finished_at), usage.session_id, request.key, request.model, request.drafter, request.tags
    )
    return group, Work.of(usage, request.usd, request_s=usage.finished_at - usage.started_at)


def _parse_columns(piece: bytes) -> "pa.Table":
    import pyarrow as pa
    from pyarrow import json

    options = json.ParseOptions(explicit_schema=_schema(), unexpected_field_behavior="error")
    table = json.read_json(pa.py_buffer(piece), parse_options=options)
    usage = table.column("usage").combine_chunks()
    for name in ("session_id", "started_at", "finished_at", "busy_s", *UNIT_COUNTS):
        table = table.append_column(name, usage.field(name))
    speculation = usage.field("speculation")
    table = table.append_column("num_drafts", speculation.field("num_drafts"))
    table = table.append_column("num_accepted_tokens", _sums_of_lists(speculation.field("accepted_per_position")))
    _require_valid(table)
    return table


def _sums_of_lists(lists: "pa.ListArray") -> "pa.Array":
    import numpy as np
    import pyarrow as pa

    cumulative = np.concatenate([[0], np.cumsum(lists.values.to_numpy(zero_copy_only=False))]).astype(np.int64)
    ends = lists.offsets.to_numpy()
    return pa.array(cumulative[ends[1:]] - cumulative[ends[:-1]])


def _require_valid(table: "pa.Table") -> None:
    import pyarrow.compute as pc

    numbers = ("usd", "busy_s", "started_at", "num_drafts", *UNIT_COUNTS)
    required = ("version", "request_id", "key", "model", "session_id", "finished_at", *numbers)
    if any(table.column(name).null_count for name in required):
        raise ValueError("a field is missing")
    checks = (
        pc.all(pc.equal(table.column("version"), VERSION)),
        pc.all(pc.is_finite(table.column("usd"))),
        pc.all(pc.less_equal(table.column("started_at"), table.column("finished_at"))),
        pc.all(pc.less_equal(table.column("num_cached_tokens"), table.column("num_prompt_tokens"))),
    )
    if not all(check.as_py() for check in checks) or any(pc.min(table.column(name)).as_py() < 0 for name in numbers):
        raise ValueError("a field has an invalid value")
    for tags in pc.unique(table.column("tags")).to_pylist():
        tags_from_text(NO_TAGS if tags is None else tags)  # raises ValueError if they are invalid


def _sum_by_group(table: "pa.Table") -> Iterator[tuple[SpendingGroup, Work]]:
    import pyarrow.compute as pc

    finished_at = table.column("finished_at")
    table = table.append_column("day", pc.cast(pc.floor(pc.divide(finished_at, float(DAY_S))), "int64"))
    table = table.append_column("request_s", pc.subtract(finished_at, table.column("started_at")))
    sums = table.group_by(list(_GROUP_FIELDS), use_threads=False).aggregate(
        [(name, "sum") for name in (*UNIT_COUNTS[:2], *_SUMMED_FIELDS)]
    )
    for row in sums.to_pylist():
        group = SpendingGroup(**{name: row[name] for name in _GROUP_FIELDS} | {"tags": row["tags"] or NO_TAGS})
        num_requests = row["num_rows_sum"] + row["num_failed_rows_sum"]
        yield group, Work(num_requests=num_requests, **{name: row[f"{name}_sum"] for name in _SUMMED_FIELDS})


def _schema() -> "pa.Schema":
    """Return the fields that `RequestUsage.to_json` writes."""
    import pyarrow as pa

    def struct(types: dict[str, Any]) -> Any:
        return pa.struct(list(types.items()))

    text, number, integer = pa.string(), pa.float64(), pa.int64()
    speculation = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_lookup_tokens", "num_dropped_tokens"), integer)
    per_position = dict.fromkeys(("accepted_per_position", "verified_per_position"), pa.list_(integer))
    usage = {
        **dict.fromkeys(("version", *UNIT_COUNTS), integer),
        "session_id": text,
        **dict.fromkeys(("busy_s", "started_at", "finished_at"), number),
        "speculation": struct(speculation | per_position),
    }
    request = {
        **dict.fromkeys(("version", "num_choices"), integer),
        **dict.fromkeys(("request_id", "key", "model", "drafter", "outcome", "account", "tags"), text),
        **dict.fromkeys(("ttft_s", "usd"), number),
        "usage": struct(usage),
    }
    return pa.schema(list(request.items()))
