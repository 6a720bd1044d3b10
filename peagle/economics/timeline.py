"""A run over time: output tokens, dollars, and the state of each engine, in a fixed number of steps.

Only seconds with a live engine count; pauses are omitted. A heartbeat records how long an engine was in each state, but
not when. The timeline assumes: loading and compiling first, busy while a unit is running that is committed later, lost
seconds at the end, and idle otherwise.
"""

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from peagle.economics.account import Shares, shares_by_period
from peagle.economics.prices import Price
from peagle.economics.usage import EngineSession, UnitUsage

NUM_STEPS = 120
MAX_ENGINES = 12  # states are shown for these; costs include all
_SHORTEST = 1 / 240  # of the run; shorter pauses between units are ignored
_DIGITS = 3  # of a second
Span = tuple[float, float]


@dataclass(slots=True)
class _SessionUnits:
    """The committed units of a session, 24 bytes each."""

    starts: "array[float]" = field(default_factory=lambda: array("d"))
    ends: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    busy_s: float = 0.0


class UnitTimes:
    def __init__(self) -> None:
        self._by_session: defaultdict[str, _SessionUnits] = defaultdict(_SessionUnits)

    def keep(self, units: Iterable[UnitUsage]) -> Iterator[UnitUsage]:
        for unit in units:
            kept = self._by_session[unit.session_id]
            kept.starts.append(unit.started_at)
            kept.ends.append(unit.finished_at)
            kept.tokens.append(unit.num_output_tokens)
            kept.busy_s += unit.busy_s
            yield unit

    def timeline(self, sessions: Sequence[EngineSession], price: Price) -> dict[str, Any] | None:
        """Return the run over time for JSON, or None before the first engine.

        Returns:
            `started_at` (Unix seconds), `total_s`, `step_s`, `tokens_per_s` and `usd` (cumulative) at the end of each
            step, `pauses` (`at_s`, `lasted_s`), `num_engines`, and `engines` for the first `MAX_ENGINES` (`engine`,
            `num_starts`, `seconds` by state, `spans` of state, start and end).
        """
        lives = {one.session_id: (one.started_at, self._end(one)) for one in sessions}
        clock, seconds = _Clock(lives.values()), {one.session_id: self._seconds(one) for one in sessions}
        if not clock.total_s:
            return None
        step_s = clock.total_s / NUM_STEPS
        tokens, usd = [0.0] * NUM_STEPS, [0.0] * NUM_STEPS
        lanes: defaultdict[int, list[EngineSession]] = defaultdict(list)
        for one in sessions:
            kept, life = self._by_session[one.session_id], lives[one.session_id]
            for start, end, count in zip(kept.starts, kept.ends, kept.tokens, strict=True):
                _spread(tokens, clock.at(start) / step_s, clock.at(end) / step_s, count / step_s)
            paid = seconds[one.session_id].total * one.num_devices * price.usd_per_device_s
            _spread(usd, clock.at(life[0]) / step_s, clock.at(life[1]) / step_s, paid)
            lanes[one.engine_index].append(one)
        return {
            "started_at": clock.began_at,
            "total_s": clock.total_s,
            "step_s": step_s,
            "tokens_per_s": [round(value, _DIGITS) for value in tokens],
            "usd": list(accumulate(usd)),
            "pauses": clock.pauses(),
            "num_engines": len(lanes),
            "engines": [self._lane(index, lanes[index], clock, seconds) for index in sorted(lanes)[:MAX_ENGINES]],
        }

    def _end(self, session: EngineSession) -> float:
        return max(session.last_seen_at, max(self._by_session[session.session_id].ends, default=0.0))

    def _seconds(self, session: EngineSession) -> Shares:
        (seconds,) = shares_by_period([session], [self._by_session[session.session_id].busy_s])
        return seconds

    def _lane(
        self, index: int, sessions: Sequence[EngineSession], clock: "_Clock", seconds: Mapping[str, Shares]
    ) -> dict[str, Any]:
        spans = [
            (state, round(clock.at(start), _DIGITS), round(clock.at(end), _DIGITS))
            for one in sorted(sessions, key=lambda one: one.started_at)
            for state, (start, end) in self._states(one, seconds[one.session_id].lost, clock.total_s * _SHORTEST)
        ]
        return {
            "engine": index,
            "num_starts": len(sessions),
            "seconds": asdict(sum((seconds[one.session_id] for one in sessions), Shares())),
            "spans": [span for span in spans if span[2] > span[1]],
        }

    def _states(self, session: EngineSession, lost_s: float, shortest_s: float) -> list[tuple[str, Span]]:
        kept = self._by_session[session.session_id]
        loaded = session.started_at + session.load_s
        up, end = loaded + session.compile_s, self._end(session)
        open_units = ((max(start, up), stop) for start, stop in zip(kept.starts, kept.ends, strict=True))
        busy = merged((span for span in open_units if span[1] > span[0]), shortest_s)
        rest = list[tuple[str, Span]]()
        for start, stop in reversed(_between(busy, up, end)):
            cut = max(start, stop - lost_s)
            lost_s -= stop - cut
            rest += [("lost", (cut, stop)), ("idle", (start, cut))]
        found = [("load", (session.started_at, loaded)), ("compile", (loaded, up)), *(("busy", span) for span in busy)]
        return sorted([*found, *rest], key=lambda one: one[1])


class _Clock:
    def __init__(self, lives: Iterable[Span]) -> None:
        self._lives = merged(lives, 0.0)
        self._starts = [start for start, _ in self._lives]
        self._before = list(accumulate((end - start for start, end in self._lives), initial=0.0))
        self.total_s = self._before[-1]

    @property
    def began_at(self) -> float:
        return self._starts[0]

    def at(self, moment: float) -> float:
        index = max(bisect_right(self._starts, moment) - 1, 0)
        start, end = self._lives[index]
        return self._before[index] + min(max(moment, start), end) - start

    def pauses(self) -> list[dict[str, float]]:
        ends = self._lives[:-1]
        return [
            {"at_s": at_s, "lasted_s": start - end}
            for at_s, start, (_, end) in zip(self._before[1:], self._starts[1:], ends, strict=False)
        ]


def merged(spans: Iterable[Span], gap: float) -> list[Span]:
    """Return sorted spans, joined if they overlap or are at most `gap` apart.

    >>> merged([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)], 0.0)
    [(0.0, 3.0), (5.0, 6.0)]
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _between(spans: Sequence[Span], first: float, last: float) -> list[Span]:
    """Return the gaps between sorted spans, from `first` to `last`."""
    starts = [first, *(end for _, end in spans)]
    ends = [*(start for start, _ in spans), last]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if end > start]


def _spread(steps: list[float], start: float, end: float, amount: float) -> None:
    """Add an amount evenly to the steps between `start` and `end`."""
    first, last = (min(int(place), len(steps) - 1) for place in (start, end))
    if first == last:
        steps[first] += amount
        return
    for step in range(first, last + 1):
        steps[step] += amount * (min(end, step + 1) - max(start, step)) / (end - start)
