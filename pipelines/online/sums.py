"""A ledger's requests by minute, hour and day, their prices, a checkpoint.

`/v1/cost` is made of them.

It knows records alone. So a year of twenty keys is some tens of thousands of sums, however many requests it had.

The file of a checkpoint:

    head      version, marks (how far each file was read, and by what that place is known again), spending, prices
    cells     a line each
    sha256    of all before it

A checkpoint is written whole or not at all, and holds exactly the lines before its marks. So it stays true whatever is
appended meanwhile, and whichever of two processes writes it last. Whether the files are still those is for the reader
to check.

A request pays for its share of an engine's busy seconds, so the same request costs the less the more there are beside
it, and the more of its drafts are accepted. What it costs alone, with a step for each token, is the most. That is
learned here from what requests took; the newest fifty make most of it.

    prefill     seconds until the first token, over the prompt tokens that were not cached
    decode      seconds after it, over the steps: the tokens of one choice less those that drafts brought

Worked by hand: 100 prompt tokens in 0.2 s, then 40 more tokens of one choice in 2 s, 20 of them from drafts, on an
engine of 0.01 USD a busy second. A prompt token is 0.2 x 0.01 / 100 = 0.00002 USD, an output token 2 x 0.01 / 20 =
0.001. Beside seven others the request itself paid an eighth of it.
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

_KEPT = 0.98  # of what is known, with each request


@dataclass(slots=True)
class TokenPrice:
    """The price of one model's tokens, on the engines that it has."""

    num_requests: float = 0.0
    usd: float = 0.0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    prompt_tokens: float = 0.0
    decode_s: float = 0.0
    steps: float = 0.0

    def learn(self, request: RequestUsage) -> None:
        """Another request has ended; one that made nothing, or failed, says nothing."""
        usage = request.usage
        if request.outcome == "failed" or not usage.num_output_tokens or not usage.busy_s:
            return
        wall_s = max(usage.finished_at - usage.started_at, usage.busy_s)
        # Where nobody saw the first token, all of the time counts as decoding: that makes tokens dearer, not cheaper.
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
        """Whether a request has ended that says something."""
        return self.num_requests > 0

    @property
    def usd_per_output_token(self) -> float:
        """0 where nothing is known.

        Where no request went on after its first token, that bounds a step.
        """
        if not self.busy_s:
            return 0.0
        step_s = self.decode_s / self.steps if self.steps else self.prefill_s / self.num_requests
        return step_s * self.usd / self.busy_s

    @property
    def usd_per_prompt_token(self) -> float:
        """No more than an output token's: a step computes many prompt tokens at once."""
        if not self.prompt_tokens:
            return self.usd_per_output_token
        return min(self.prefill_s / self.prompt_tokens * self.usd / self.busy_s, self.usd_per_output_token)

    def of(self, *, prompt_tokens: int, output_tokens: int) -> float | None:
        """The most US dollars that a request costs at this price.

        None where there is none yet.
        """
        if not self.is_known:
            return None
        return prompt_tokens * self.usd_per_prompt_token + output_tokens * self.usd_per_output_token

    def beside_others(self, *, prompt_tokens: int, output_tokens: int) -> float | None:
        """US dollars of tokens beside as many requests as there were, as those have paid.

        None where there is no price yet.
        """
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
        """Those of `other` too, which are of the same process."""
        self.usage = self.usage + other.usage
        self.num_requests += other.num_requests
        self.num_cut += other.num_cut
        self.usd += other.usd
        self.request_s += other.request_s
        self.shares_s += other.shares_s


def coarse(minute: int, now: int) -> int:
    """The minute under which one is kept that is as long ago as that.

    >>> coarse(100_000, 100_001), coarse(100_000, 103_000), coarse(100_000, 200_000)
    (100000, 99960, 99360)
    """
    age = now - minute
    if age < _BY_THE_HOUR_AFTER:
        return minute
    step = _HOUR if age < _BY_THE_DAY_AFTER else _DAY
    return minute // step * step


def merged(cells: dict[RequestGroup, Sums], now: int) -> dict[RequestGroup, Sums]:
    """The same sums, fewer where they are long ago."""
    kept: dict[RequestGroup, Sums] = {}
    for cell, sums in cells.items():
        minute = coarse(cell.minute, now)
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
    """Read the checkpoint's file.

    None where there is none, or one that is damaged or of another version.
    """
    try:
        with path.open("rb") as file:
            return _read(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        _log.warning("%s: it cannot be used, and the whole ledger is read: %s", path, error)
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
