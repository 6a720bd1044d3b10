"""Running totals of a ledger: requests by time, engine, key and model; spend of keys; token prices.

Each record is read once, by whichever thread reads next, and passed to the followers. Requests are summed in cells: one
for each minute, engine, key, model, drafter and set of tags (`RequestGroup`). Old cells are merged per hour or day, so
memory grows with time and keys, not with requests. From time to time the totals are saved atomically with the read
positions, from which the next process continues if the files still match:

    header    format, marks (read position per file with a checksum), spend, prices
    cells     one per line
    sha256    of everything before it
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from peagle.economics.ledger import RequestReader
from peagle.economics.tags import NO_TAGS
from peagle.economics.usage import RequestUsage, UnitUsage
from peagle.files import atomic_file
from peagle.speculation import SpeculationStats
from pipelines.online.budgets import Budgets

_DECAY = 0.98  # factor for the weight of earlier requests, applied at each new request


@dataclass(slots=True)
class TokenPrice:
    """The token prices of one model, estimated from recent requests. The latest 50 requests have most of the weight.

    A request costs its share of an engine's busy seconds, so it is cheaper the more requests run at the same time and
    the more drafts are accepted. Its maximum cost is the cost of running alone with one step per token.

        prefill     seconds until the first token, per uncached prompt token
        decode      seconds after the first token, per step; steps are the tokens of one choice minus accepted drafts

    Example: 100 prompt tokens in 0.2 s, then 40 more tokens of one choice in 2 s, 20 of them from drafts, on an engine
    that costs 0.01 USD per busy second. A prompt token costs 0.2 x 0.01 / 100 = 0.00002 USD, an output token 2 x 0.01
    / 20 = 0.001. If seven other requests ran at the same time, the request itself cost an eighth of that.
    """

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
        # Without the time of the first token, all time counts as decoding. This can only increase the price.
        prefill_s = min(request.ttft_s or 0.0, wall_s)
        num_undrafted = usage.num_output_tokens - usage.speculation.num_accepted_tokens
        steps = max(0.0, num_undrafted / request.num_choices - (request.ttft_s is not None))
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * _DECAY)
        self.num_requests += 1
        self.usd += request.usd
        self.busy_s += usage.busy_s
        if request.ttft_s is not None:
            self.prefill_s += prefill_s
            self.prompt_tokens += usage.num_prompt_tokens - usage.num_cached_tokens
        if steps:
            self.decode_s += wall_s - prefill_s
            self.steps += steps

    @property
    def is_known(self) -> bool:
        return self.num_requests > 0

    @property
    def usd_per_output_token(self) -> float:
        """The price, or 0 if unknown. If no request had a second token, the price is bounded by the prefill time."""
        if not self.busy_s:
            return 0.0
        step_s = self.decode_s / self.steps if self.steps else self.prefill_s / self.num_requests
        return step_s * self.usd / self.busy_s

    @property
    def usd_per_prompt_token(self) -> float:
        """At most the price of an output token, since a step computes many prompt tokens."""
        if not self.prompt_tokens:
            return self.usd_per_output_token
        return min(self.prefill_s / self.prompt_tokens * self.usd / self.busy_s, self.usd_per_output_token)

    def max_usd(self, *, prompt_tokens: int, output_tokens: int) -> float | None:
        """Return the maximum cost of a request in US dollars, or None if unknown."""
        if not self.is_known:
            return None
        return prompt_tokens * self.usd_per_prompt_token + output_tokens * self.usd_per_output_token

    def expected_usd(self, *, prompt_tokens: int, output_tokens: int) -> float | None:
        """Return the expected cost in US dollars while other requests run at the same time, or None if unknown."""
        alone_usd = self.max_usd(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        wall_s = self.prefill_s + self.decode_s
        return alone_usd and (alone_usd * min(self.busy_s / wall_s, 1.0) if wall_s else alone_usd)


MINUTE_S = 60
_HOUR, _DAY = 60, 1440  # minutes
_MERGED_BY_HOUR_AFTER, _MERGED_BY_DAY_AFTER = 2 * _DAY, 60 * _DAY


@dataclass(frozen=True, slots=True)
class RequestGroup:
    minute: int
    session_id: str
    key: str
    model: str
    drafter: str | None = None
    tags: str = NO_TAGS


@dataclass(slots=True)
class Sums:
    """Totals of the requests in one `RequestGroup`."""

    usage: UnitUsage
    num_requests: int = 0
    num_cut: int = 0  # requests with a disconnected client
    usd: float = 0.0
    request_s: float = 0.0  # total duration of the requests, without batches
    shares_s: float = 0.0  # the same requests' busy seconds

    def add(self, request: RequestUsage) -> None:
        if not request.is_batch:
            self.request_s += request.usage.finished_at - request.usage.started_at
            self.shares_s += request.usage.busy_s
        self.usage = self.usage + request.usage if self.num_requests else request.usage
        self.num_requests += request.usage.num_rows + request.usage.num_failed_rows  # 1 for a request, more for a batch
        self.num_cut += request.outcome == "cut"
        self.usd += request.usd

    def merge(self, other: "Sums") -> None:
        self.usage = self.usage + other.usage
        self.num_requests += other.num_requests
        self.num_cut += other.num_cut
        self.usd += other.usd
        self.request_s += other.request_s
        self.shares_s += other.shares_s


def coarsen(minute: int, now: int) -> int:
    """Return the start of the hour or day of an old minute, and a recent minute unchanged.

    >>> coarsen(100_000, 100_001), coarsen(100_000, 103_000), coarsen(100_000, 200_000)
    (100000, 99960, 99360)
    """
    age = now - minute
    if age < _MERGED_BY_HOUR_AFTER:
        return minute
    interval = _HOUR if age < _MERGED_BY_DAY_AFTER else _DAY
    return minute // interval * interval


def merge_old(cells: dict[RequestGroup, Sums], now: int) -> dict[RequestGroup, Sums]:
    result: dict[RequestGroup, Sums] = {}
    for cell, sums in cells.items():
        minute = coarsen(cell.minute, now)
        cell = cell if minute == cell.minute else replace(cell, minute=minute)
        if merged := result.get(cell):
            merged.merge(sums)
        else:
            result[cell] = sums
    return result


# The format's version, and the fields of each record.
_FORMAT = [4, *(list(kind.__slots__) for kind in (RequestGroup, Sums, UnitUsage, SpeculationStats, TokenPrice))]
_log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalsCheckpoint:
    """The contents of `Totals` and of `RequestReader.marks`."""

    marks: Mapping[str, tuple[int, str]]  # read position and checksum by file
    cells: dict[RequestGroup, Sums]
    spent_by_day: Mapping[str, Mapping[int, float]]  # US dollars by account and day number
    batches: set[str]  # ids of the batches in `spent_by_day`
    prices: Mapping[str, TokenPrice]


def write_checkpoint(path: Path, checkpoint: TotalsCheckpoint) -> None:
    header = {
        "format": _FORMAT,
        "marks": checkpoint.marks,
        "spent_by_day": checkpoint.spent_by_day,
        "batches": sorted(checkpoint.batches),
        "prices": {model: astuple(price) for model, price in checkpoint.prices.items()},
    }
    cells = ([astuple(cell), astuple(sums)] for cell, sums in checkpoint.cells.items())
    digest = hashlib.sha256()
    with atomic_file(path) as file:
        for values in itertools.chain([header], cells):
            line = json.dumps(values).encode() + b"\n"
            digest.update(line)
            file.write(line)
        file.write(json.dumps({"sha256": digest.hexdigest()}).encode() + b"\n")


def read_checkpoint(path: Path) -> TotalsCheckpoint | None:
    """Read a checkpoint, or return None if it is missing, damaged or of another format."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        _log.warning("%s cannot be used (%s); reading the whole ledger", path, error)
        return None


def _read(lines: Iterator[bytes]) -> TotalsCheckpoint:
    digest = hashlib.sha256()
    first_line = next(lines, b"")
    digest.update(first_line)
    header = json.loads(first_line)
    if header["format"] != _FORMAT:
        raise ValueError("the format is different")
    cells: dict[RequestGroup, Sums] = {}
    for line in lines:
        record = json.loads(line)
        if isinstance(record, dict):
            if record["sha256"] != digest.hexdigest():
                raise ValueError("the file is damaged")
            return TotalsCheckpoint(
                marks={name: (position, checksum) for name, (position, checksum) in header["marks"].items()},
                cells=cells,
                spent_by_day={
                    account: {int(day): usd for day, usd in days.items()}
                    for account, days in header["spent_by_day"].items()
                },
                batches=set(header["batches"]),
                prices={model: TokenPrice(*values) for model, values in header["prices"].items()},
            )
        digest.update(line)
        cell, sums = _parse_cell(record)
        cells[cell] = sums
    raise ValueError("the file is truncated")


def _parse_cell(values: list[Any]) -> tuple[RequestGroup, Sums]:
    group, (usage, *other_sums) = values
    fields = dict(zip(UnitUsage.__slots__, usage, strict=True))
    drafts = dict(zip(SpeculationStats.__slots__, fields["speculation"], strict=True))
    for name in ("accepted_per_position", "verified_per_position"):
        drafts[name] = tuple(drafts[name])
    return RequestGroup(*group), Sums(UnitUsage(**fields | {"speculation": SpeculationStats(**drafts)}), *other_sums)


CHECKPOINT_NAME = "totals.jsonl"
# The totals are saved after this many new records, which take a second to read. If there are many cells, they are
# saved after one new record per four cells, so that writing takes about as long as reading.
_MIN_UNSAVED = 20_000
_CELLS_PER_RECORD = 4
_MAX_WAIT_S = 2.0


class LedgerFollower(Protocol):
    """Receives the records of a ledger."""

    def on_attach(self, totals: "Totals") -> None:
        """Called once before the first record. `totals` already contains all earlier records."""

    def on_ledger_record(self, request: RequestUsage) -> None:
        """Receive a new record, after it was added to the totals."""


class Totals:
    """The totals of a ledger. Read them inside `snapshot`, or as a follower."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = RequestReader(folder)
        self.cells: dict[RequestGroup, Sums] = {}
        self.budgets = Budgets()
        self.prices: dict[str, TokenPrice] = {}
        self._is_read = False
        self._newest_minute = 0
        self._num_unsaved = 0
        self._checkpoint = folder / CHECKPOINT_NAME
        self._lock = threading.RLock()
        self._followers: list[LedgerFollower] = []
        # Followers to attach. They are separate, so that `add_follower` never waits for a long read.
        self._new_followers: list[LedgerFollower] = []
        self._has_tried_checkpoint = False
        self._thread: threading.Thread | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the ledger was read to its end once, and all followers are attached."""
        return self._is_read and not self._new_followers

    def add_follower(self, follower: LedgerFollower) -> None:
        """Add a follower, which is attached when the ledger is read next."""
        self._new_followers.append(follower)

    def catch_up(self) -> None:
        """Read all new records."""
        with self._lock:
            if not self._has_tried_checkpoint:
                self._restore()
            self._attach_followers()
            for request in self._reader.iter_new():
                self._attach_followers()
                self._add(request)
                for follower in self._followers:
                    follower.on_ledger_record(request)
                self._save_if_due()
            self._is_read = True

    def read_in_background(self) -> None:
        """Start a thread that reads new records, unless one is running."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read_until_success, daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read new records, and lock the totals until the end of the `with`."""
        with self._lock:
            self.catch_up()
            yield

    async def wait_until_loaded(self) -> bool:
        """Wait up to two seconds for the first read. Returns whether it is complete."""
        give_up_at = time.monotonic() + _MAX_WAIT_S
        while not self.is_loaded and time.monotonic() < give_up_at:
            self.read_in_background()
            await asyncio.sleep(0.02)
        return self.is_loaded

    def recent(self, since: float) -> Iterator[RequestUsage]:
        """Yield records of requests that ended after a Unix time."""
        return self._reader.reread_since(since)

    def _read_until_success(self) -> None:
        while True:
            try:
                self.catch_up()
                return
            except Exception:  # the thread must survive: keys with a budget wait for it
                _log.exception("%s: cannot read the ledger; requests of keys with a budget must wait", self.folder)
                time.sleep(5.0)

    def _restore(self) -> None:
        self._has_tried_checkpoint = True
        checkpoint = read_checkpoint(self._checkpoint)
        if checkpoint is None:
            return
        if not self._reader.resume(checkpoint.marks):
            _log.warning("%s does not match the ledger's files; reading the whole ledger", self._checkpoint)
            return
        self.cells = checkpoint.cells
        self._newest_minute = max((cell.minute for cell in self.cells), default=0)
        self.budgets.restore(checkpoint.spent_by_day, checkpoint.batches)
        self.prices.update(checkpoint.prices)

    def _save_if_due(self) -> None:
        """Save the totals if due, even in the middle of a read. If saving fails, the next process must read more."""
        if self._num_unsaved < max(_MIN_UNSAVED, len(self.cells) // _CELLS_PER_RECORD):
            return
        self._num_unsaved = 0
        self.cells = merge_old(self.cells, self._newest_minute)
        try:
            write_checkpoint(
                self._checkpoint,
                TotalsCheckpoint(
                    marks=self._reader.marks(),
                    cells=self.cells,
                    spent_by_day=self.budgets.ledger_by_day,
                    batches=self.budgets.ledger_batches,
                    prices=self.prices,
                ),
            )
        except OSError as error:
            _log.error("%s: cannot be written; the next start takes longer: %s", self._checkpoint, error)

    def _attach_followers(self) -> None:
        while self._new_followers:
            follower = self._new_followers.pop(0)
            follower.on_attach(self)
            self._followers.append(follower)

    def _add(self, request: RequestUsage) -> None:
        minute = int(request.usage.finished_at // MINUTE_S)
        cell = RequestGroup(minute, request.usage.session_id, request.key, request.model, request.drafter, request.tags)
        self.cells.setdefault(cell, Sums(request.usage)).add(request)
        self._newest_minute = max(minute, self._newest_minute)
        self.budgets.on_ledger_record(request)
        self._num_unsaved += 1
        if not request.is_batch:
            price = self.prices.get(request.model) or TokenPrice()
            price.update(request)
            if price.is_known:
                self.prices[request.model] = price


@functools.cache
def totals_of(folder: Path) -> Totals:
    """Return the totals of a ledger, one instance per process.

    Ray creates the gate and the other parts of the ingress from pickled arguments, so the parts can only share an
    object through this function.
    """
    return Totals(folder)
