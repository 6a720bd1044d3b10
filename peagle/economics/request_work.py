"""The work of an endpoint's ledger by day, read in bulk.

A month may have a million lines. They are parsed and added up as columns; a piece of a file in which a line is none of
ours is read line by line as `RequestReader` reads it, and that line is left out.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from peagle.economics.ledger import REQUEST_FILES, readable
from peagle.economics.spending import DAY_S, Spend, Whose, day_of
from peagle.economics.tags import NO_TAGS, tags_from_text
from peagle.economics.usage import VERSION, RequestUsage
from peagle.storage import Place, open_to_read

if TYPE_CHECKING:
    import pyarrow as pa

_PIECE_BYTES = 16 * 1024 * 1024
_GROUP = ("day", "session_id", "key", "model", "drafter", "tags")
_COUNTS = ("num_rows", "num_failed_rows", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens")


def read_work(folder: Place) -> Mapping[Whose, Spend]:
    """The work of all requests and batches of a ledger.

    Raises:
        OSError: a file cannot be read.
    """
    found: defaultdict[Whose, Spend] = defaultdict(Spend)
    for path in sorted(folder.glob(REQUEST_FILES), key=lambda path: path.name):
        with open_to_read(path) as file:
            for piece in _pieces(file):
                for whose, work in _of_piece(path, piece):
                    found[whose] += work
    return found


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Whole lines of a file, some megabytes at a time; a torn last one is left out."""
    rest = b""
    while data := file.read(_PIECE_BYTES):
        lines, end, rest = (rest + data).rpartition(b"\n")
        if end:
            yield lines + end


def _of_piece(path: Place, piece: bytes) -> list[tuple[Whose, Spend]]:
    import pyarrow as pa

    try:
        found = list(_sums(_columns(piece)))
    except (pa.ArrowException, ValueError):
        requests = readable(path, piece.split(b"\n")[:-1], RequestUsage.from_json)
        found = [_of_request(request) for request in requests]
    return found


def _of_request(request: RequestUsage) -> tuple[Whose, Spend]:
    usage = request.usage
    whose = Whose(
        day_of(usage.finished_at), usage.session_id, request.key, request.model, request.drafter, request.tags
    )
    return whose, Spend.of(usage, request.usd)


def _columns(piece: bytes) -> "pa.Table":
    """The lines as columns, those of `usage` beside the others.

    Raises:
        ArrowException, ValueError: a line is no record of a request.
    """
    import pyarrow as pa
    from pyarrow import json

    options = json.ParseOptions(explicit_schema=_schema(), unexpected_field_behavior="error")
    table = json.read_json(pa.py_buffer(piece), parse_options=options)
    usage = table.column("usage").combine_chunks()
    for name in ("session_id", "started_at", "finished_at", "busy_s", *_COUNTS):
        table = table.append_column(name, usage.field(name))
    _require_believable(table)
    return table


def _require_believable(table: "pa.Table") -> None:
    import pyarrow.compute as pc

    needed = (
        "version",
        "request_id",
        "key",
        "model",
        "usd",
        "session_id",
        "started_at",
        "finished_at",
        "busy_s",
        *_COUNTS,
    )
    if any(table.column(name).null_count for name in needed):
        raise ValueError("a field is missing")
    least = {name: pc.min(table.column(name)).as_py() for name in ("usd", "busy_s", "started_at", *_COUNTS)}
    checks = (
        pc.all(pc.equal(table.column("version"), VERSION)),
        pc.all(pc.is_finite(table.column("usd"))),
        pc.all(pc.less_equal(table.column("started_at"), table.column("finished_at"))),
        pc.all(pc.less_equal(table.column("num_cached_tokens"), table.column("num_prompt_tokens"))),
    )
    if not all(check.as_py() for check in checks) or min(least.values()) < 0:
        raise ValueError("a field has a value that it cannot have")
    for text in pc.unique(table.column("tags")).to_pylist():
        tags_from_text(NO_TAGS if text is None else text)


def _sums(table: "pa.Table") -> Iterator[tuple[Whose, Spend]]:
    import pyarrow.compute as pc

    days = pc.cast(pc.floor(pc.divide(table.column("finished_at"), float(DAY_S))), "int64")
    table = table.append_column("day", days)
    sums = table.group_by(list(_GROUP), use_threads=False).aggregate([(name, "sum") for name in (*_COUNTS, "usd")])
    for row in sums.to_pylist():
        whose = Whose(**{name: row[name] for name in _GROUP} | {"tags": row["tags"] or NO_TAGS})
        yield (
            whose,
            Spend(
                attributed_usd=row["usd_sum"],
                num_requests=row["num_rows_sum"] + row["num_failed_rows_sum"],
                num_prompt_tokens=row["num_prompt_tokens_sum"],
                num_cached_tokens=row["num_cached_tokens_sum"],
                num_output_tokens=row["num_output_tokens_sum"],
            ),
        )


def _schema() -> "pa.Schema":
    """All fields of a line, as `RequestUsage.to_json` writes them."""
    import pyarrow as pa

    def struct(**types: Any) -> Any:
        return pa.struct(list(types.items()))

    text, number, whole = pa.string(), pa.float64(), pa.int64()
    usage = struct(
        version=whole,
        session_id=text,
        **dict.fromkeys(_COUNTS, whole),
        busy_s=number,
        speculation=struct(num_drafts=whole, num_draft_tokens=whole, accepted_per_position=pa.list_(whole)),
        started_at=number,
        finished_at=number,
    )
    top = struct(
        version=whole,
        request_id=text,
        key=text,
        model=text,
        drafter=text,
        outcome=text,
        ttft_s=number,
        usd=number,
        usage=usage,
        num_choices=whole,
        account=text,
        tags=text,
    )
    return pa.schema(list(top))
