"""The first answers of a run, for whoever has just made it: where they are, and what they look like."""

from itertools import islice

from pipelines.batch.export import read_units
from pipelines.batch.rundir import RunDirectory

_NUM_ANSWERS, _NUM_LINES, _NUM_COLUMNS = 2, 4, 100


def describe_answers(run: RunDirectory) -> str:
    """Where the answers of a run are, and the first two of them, each in a few lines; empty if there are none.

    Raises:
        PeagleError: a unit is damaged.
    """
    batches = read_units(run, sorted(run.committed()), frozenset({"id", "response"}))
    rows = list(
        islice((row for batch in batches for row in batch.slice(length=_NUM_ANSWERS).to_pylist()), _NUM_ANSWERS)
    )
    if not rows:
        return ""
    where = f"answers: {run.root / 'data'}, column response of unit-*.parquet; the first {len(rows)}:"
    return "\n".join([where, *(line for row in rows for line in _answer(row["id"], row["response"]))])


def _answer(row_id: str, text: str) -> list[str]:
    lines = text.strip("\n").splitlines()
    shown = [_printable(line)[:_NUM_COLUMNS] for line in lines[:_NUM_LINES]]
    return [
        f"  {_printable(str(row_id))}",
        *(f"  | {line}" for line in shown),
        *(["  | ..."] * (len(lines) > _NUM_LINES)),
    ]


def _printable(line: str) -> str:
    """A line without what a terminal would obey: a model may answer with escape sequences."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line.expandtabs(4))
