"""Sums of a ledger's requests by minute, hour and day; token prices; a checkpoint of both.

A year of twenty keys needs some tens of thousands of sums, regardless of the number of requests.

The checkpoint file:

    head      version, marks (read position per file with a checksum), spend, prices
    cells     one per line
    sha256    of everything before it

It is written atomically and covers exactly the records before its marks. So it stays valid when records are appended,
and whichever of two processes writes it last. The reader checks whether the files still match.

A request costs its share of an engine's busy seconds, so it is cheaper the more requests run at the same time and the
more drafts are accepted. Its maximum cost is that of running alone with one step per token. It is estimated from recent
requests; the latest fifty have most of the weight.

    prefill     seconds until the first token, per uncached prompt token
    decode      seconds after it, per step: the tokens of one choice minus those from drafts

Example: 100 prompt tokens in 0.2 s, then 40 more tokens of one choice in 2 s, 20 of them from drafts, on an engine of
0.01 USD per busy second. A prompt token is 0.2 x 0.01 / 100 = 0.00002 USD, an output token 2 x 0.01 / 20 = 0.001. With
seven others at the same time the request itself cost an eighth of it.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from peagle.economics.tags import NO_TAGS
from peagle.economics.usage import RequestUsage, UnitUsage
from peagle.files import atomic_file
from peagle.speculation import SpeculationStats

_KEPT = 0.98  # decay per request


@dataclass(slots=True)
class TokenPrice:
    """The token prices of one model."""

    num_requests: float = 0.0
    usd: float = 0.0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    prompt_tokens: float = 0.0
    decode_s: float = 0.0
    steps: float = 0.0

    def update(self, request: RequestUsage) -> None:
        """Include an ended request. Requests without output and failed ones are ignored."""
        usage = request.usage
        if request.outcome == "failed" or not usage.num_output_tokens or not usage.busy_s:
            return
        wall_s = max(usage.finished_at - usage.started_at, usage.busy_s)
        # Without the time of the first token, all time counts as decoding, which only increases the price.
        prefill_s = min(request.ttft_s or 0.0, wall_s)
        num_made = usage.num_output_tokens - usage.speculation.num_accepted_tokens
        steps = max(0.0, num_made / request.num_choices - (request.ttft_s is not None))
        self._forget()
        self.num_requests += 1
        self.usd += request.usd
        self.busy_s += usage.busy_s
        if request.ttft_s is not None:
            self.prefill_s += prefill_s
            self.prompt_tokens += usage.num_prompt_tokens - usage.num_cached_tokens
        if steps:
            self.decode_s += wall_s - prefill_s
            self.steps += steps

    def _forget(self) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * _KEPT)

    @property
    def is_known(self) -> bool:
        return self.num_requests > 0

    @property
    def usd_per_output_token(self) -> float:
        """0 if unknown. If no request continued after its first token, that bounds a step."""
        if not self.busy_s:
            return 0.0
        step_s = self.decode_s / self.steps if self.steps else self.prefill_s / self.num_requests
        return step_s * self.usd / self.busy_s

    @property
    def usd_per_prompt_token(self) -> float:
        """At most an output token's price, since a step computes many prompt tokens."""
        if not self.prompt_tokens:
            return self.usd_per_output_token
        return min(self.prefill_s / self.prompt_tokens * self.usd / self.busy_s, self.usd_per_output_token)

    def of(self, *, prompt_tokens: int, output_tokens: int) -> float | None:
        """Return the maximum cost of a request in US dollars, or None if unknown."""
        if not self.is_known:
            return None
        return prompt_tokens * self.usd_per_prompt_token + output_tokens * self.usd_per_output_token

    def shared_price(self, *, prompt_tokens: int, output_tokens: int) -> float | None:
        """Return the expected cost in US dollars while other requests run at the same time, or None if unknown."""
        alone_usd, wall_s = (
            self.of(prompt_tokens=prompt_tokens, output_tokens=output_tokens),
            self.prefill_s + self.decode_s,
        )
        return alone_usd and (alone_usd * min(self.busy_s / wall_s, 1.0) if wall_s else alone_usd)


MINUTE_S = 60
_HOUR, _DAY = 60, 1440  # minutes
_BY_THE_HOUR_AFTER, _BY_THE_DAY_AFTER = 2 * _DAY, 60 * _DAY


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Which requests were added up."""

    minute: int
    session_id: str
    key: str
    model: str
    drafter: str | None = None
    tags: str = NO_TAGS


@dataclass(slots=True)
class Sums:
    """Requests of one engine process together."""

    usage: UnitUsage
    num_requests: int = 0
    num_cut: int = 0
    usd: float = 0.0
    request_s: float = 0.0
    shares_s: float = 0.0

    def add(self, request: RequestUsage) -> None:
        """One more; the first only counts, since `usage` began with it."""
        if not request.is_batch:
            self.request_s += request.usage.finished_at - request.usage.started_at
            self.shares_s += request.usage.busy_s
        self.usage = self.usage + request.usage if self.num_requests else request.usage
        self.num_requests += request.usage.num_rows + request.usage.num_failed_rows  # one, but of a batch
        self.num_cut += request.outcome == "cut"
        self.usd += request.usd

    def merge(self, other: "Sums") -> None:
        """Add sums of the same engine process."""
        self.usage = self.usage + other.usage
        self.num_requests += other.num_requests
        self.num_cut += other.num_cut
        self.usd += other.usd
        self.request_s += other.request_s
        self.shares_s += other.shares_s


def coarsen(minute: int, now: int) -> int:
    """Return the minute to which an old minute is rounded.

    >>> coarsen(100_000, 100_001), coarsen(100_000, 103_000), coarsen(100_000, 200_000)
    (100000, 99960, 99360)
    """
    age = now - minute
    if age < _BY_THE_HOUR_AFTER:
        return minute
    step = _HOUR if age < _BY_THE_DAY_AFTER else _DAY
    return minute // step * step


def merge_old(cells: dict[RequestGroup, Sums], now: int) -> dict[RequestGroup, Sums]:
    """Return the sums with old ones merged by hour or day."""
    kept: dict[RequestGroup, Sums] = {}
    for cell, sums in cells.items():
        minute = coarsen(cell.minute, now)
        cell = cell if minute == cell.minute else replace(cell, minute=minute)
        if there := kept.get(cell):
            there.merge(sums)
        else:
            kept[cell] = sums
    return kept


_VERSION = 3
_log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalsCheckpoint:
    """The contents of `Totals` and of `RequestReader.marks`."""

    marks: Mapping[str, tuple[int, str]]
    cells: dict[RequestGroup, Sums]
    spent_by_day: Mapping[str, Mapping[int, float]]
    batches: set[str]
    prices: Mapping[str, TokenPrice]


def write_checkpoint(path: Path, checkpoint: TotalsCheckpoint) -> None:
    """Replace the file.

    Raises:
        OSError: it cannot be written.
    """
    digest = hashlib.sha256()
    with atomic_file(path) as file:
        for line in _lines(checkpoint):
            digest.update(line)
            file.write(line)
        file.write(json.dumps({"sha256": digest.hexdigest()}).encode() + b"\n")


def read_checkpoint(path: Path) -> TotalsCheckpoint | None:
    """Read a checkpoint, or return None if it is missing, damaged or of another version."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        _log.warning("%s: cannot be used; reading the whole ledger: %s", path, error)
        return None


def _lines(checkpoint: TotalsCheckpoint) -> Iterator[bytes]:
    head = {
        "version": _VERSION,
        "marks": checkpoint.marks,
        "spent_by_day": checkpoint.spent_by_day,
        "batches": sorted(checkpoint.batches),
        "prices": {model: astuple(price) for model, price in checkpoint.prices.items()},
    }
    yield json.dumps(head).encode() + b"\n"
    for cell, sums in checkpoint.cells.items():
        yield json.dumps(_row(cell, sums)).encode() + b"\n"


def _read(lines: Iterator[bytes]) -> TotalsCheckpoint:
    digest = hashlib.sha256()
    first = next(lines, b"")
    digest.update(first)
    head = json.loads(first)
    if head["version"] != _VERSION:
        raise ValueError(f"its version is {head['version']!r}")
    cells: dict[RequestGroup, Sums] = {}
    for line in lines:
        row = json.loads(line)
        if isinstance(row, dict):
            if row["sha256"] != digest.hexdigest():
                raise ValueError("it is damaged")
            return TotalsCheckpoint(
                marks={name: (position, mark) for name, (position, mark) in head["marks"].items()},
                cells=cells,
                spent_by_day={
                    account: {int(day): usd for day, usd in days.items()}
                    for account, days in head["spent_by_day"].items()
                },
                batches=set(head["batches"]),
                prices={model: TokenPrice(*values) for model, values in head["prices"].items()},
            )
        digest.update(line)
        cell, sums = _from_row(row)
        cells[cell] = sums
    raise ValueError("it ends early")


def _row(cell: RequestGroup, sums: Sums) -> list[Any]:
    usage = sums.usage
    speculation = usage.speculation
    return [
        [cell.minute, cell.session_id, cell.key, cell.model, cell.drafter, cell.tags],
        [sums.num_requests, sums.num_cut, sums.usd, sums.request_s, sums.shares_s],
        [usage.num_rows, usage.num_failed_rows, usage.num_prompt_tokens, usage.num_cached_tokens],
        [usage.num_output_tokens, usage.busy_s, usage.started_at, usage.finished_at, speculation.num_lookup_tokens],
        [speculation.num_drafts, speculation.num_draft_tokens, *speculation.accepted_per_position],
    ]


def _from_row(row: list[Any]) -> tuple[RequestGroup, Sums]:
    names, counts, rows, made, drafts = row
    cell = RequestGroup(*names)
    usage = UnitUsage(
        session_id=cell.session_id,
        num_rows=rows[0],
        num_failed_rows=rows[1],
        num_prompt_tokens=rows[2],
        num_cached_tokens=rows[3],
        num_output_tokens=made[0],
        busy_s=made[1],
        started_at=made[2],
        finished_at=made[3],
        speculation=SpeculationStats(
            num_drafts=drafts[0],
            num_draft_tokens=drafts[1],
            accepted_per_position=tuple(drafts[2:]),
            num_lookup_tokens=made[4],
        ),
    )
    return cell, Sums(usage, *counts)
