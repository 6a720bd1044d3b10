"""A run over time: output tokens, dollars, and the state of each engine, in a fixed number of time steps.

Only seconds with a live engine count; pauses are omitted. A heartbeat records how long an engine was in each state, but
not when. The timeline assumes: loading and compiling first, busy while running a unit that is later committed, lost
seconds at the end, and idle otherwise.
"""

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from peagle.economics.account import TotalsByUse, totals_by_period
from peagle.economics.prices import Price
from peagle.economics.usage import EngineSession, UnitUsage

NUM_STEPS = 120
MAX_ENGINES = 12  # states are shown for these; costs include all
_MIN_GAP = 1 / 240  # as a fraction of the run: shorter gaps between units are drawn as busy
_DECIMALS = 3  # of seconds and of tokens/s
Span = tuple[float, float]


@dataclass(slots=True)
class _SessionUnits:
    """The committed units of a session, 24 bytes each."""

    starts: "array[float]" = field(default_factory=lambda: array("d"))
    ends: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    busy_s: float = 0.0

    def end(self, session: EngineSession) -> float:
        return max(session.last_seen_at, max(self.ends, default=0.0))


class UnitTimes:
    """Records when committed units ran, and computes the timeline from these times."""

    def __init__(self) -> None:
        self._by_session: defaultdict[str, _SessionUnits] = defaultdict(_SessionUnits)

    def record(self, units: Iterable[UnitUsage]) -> Iterator[UnitUsage]:
        """Yield the same units, and record their times."""
        for unit in units:
            units_of_session = self._by_session[unit.session_id]
            units_of_session.starts.append(unit.started_at)
            units_of_session.ends.append(unit.finished_at)
            units_of_session.tokens.append(unit.num_output_tokens)
            units_of_session.busy_s += unit.busy_s
            yield unit

    def timeline(self, sessions: Sequence[EngineSession], price: Price) -> dict[str, Any] | None:
        """Return the run over time for JSON, or None before the first engine.

        `tokens_per_s` and `usd` (cumulative) have a value per step; `engines` are the first `MAX_ENGINES` of
        `num_engines`.
        """
        units = {session.session_id: self._by_session[session.session_id] for session in sessions}
        clock = _Clock((session.started_at, units[session.session_id].end(session)) for session in sessions)
        if not clock.total_s:
            return None
        step_s = clock.total_s / NUM_STEPS
        tokens, usd = [0.0] * NUM_STEPS, [0.0] * NUM_STEPS
        sessions_by_engine: defaultdict[int, list[tuple[EngineSession, TotalsByUse]]] = defaultdict(list)
        for session in sessions:
            session_units = units[session.session_id]
            for start, end, num_tokens in zip(
                session_units.starts, session_units.ends, session_units.tokens, strict=True
            ):
                _spread(tokens, clock.at(start) / step_s, clock.at(end) / step_s, num_tokens / step_s)
            (seconds,) = totals_by_period([session], [session_units.busy_s])
            cost = seconds.total * session.num_devices * price.usd_per_device_s
            end = session_units.end(session)
            _spread(usd, clock.at(session.started_at) / step_s, clock.at(end) / step_s, cost)
            sessions_by_engine[session.engine_index].append((session, seconds))
        shown_engines = sorted(sessions_by_engine)[:MAX_ENGINES]
        return {
            "started_at": clock.starts[0],
            "total_s": clock.total_s,
            "step_s": step_s,
            "tokens_per_s": [round(value, _DECIMALS) for value in tokens],
            "usd": list(accumulate(usd)),
            "pauses": clock.pauses(),
            "num_engines": len(sessions_by_engine),
            "engines": [self._engine_timeline(index, sessions_by_engine[index], clock) for index in shown_engines],
        }

    def _engine_timeline(
        self, index: int, sessions: Sequence[tuple[EngineSession, TotalsByUse]], clock: "_Clock"
    ) -> dict[str, Any]:
        spans = [
            (state, round(clock.at(start), _DECIMALS), round(clock.at(end), _DECIMALS))
            for session, seconds in sorted(sessions, key=lambda pair: pair[0].started_at)
            for state, (start, end) in self._states(session, seconds.lost, clock.total_s * _MIN_GAP)
        ]
        return {
            "engine": index,
            "num_starts": len(sessions),
            "seconds": asdict(sum((seconds for _, seconds in sessions), TotalsByUse())),
            "spans": [span for span in spans if span[2] > span[1]],
        }

    def _states(self, session: EngineSession, lost_s: float, min_gap_s: float) -> list[tuple[str, Span]]:
        units = self._by_session[session.session_id]
        loaded_at = session.started_at + session.load_s
        ready_at, end = loaded_at + session.compile_s, units.end(session)
        unit_spans = ((max(start, ready_at), stop) for start, stop in zip(units.starts, units.ends, strict=True))
        busy = merge_spans((span for span in unit_spans if span[1] > span[0]), min_gap_s)
        states = [("load", (session.started_at, loaded_at)), ("compile", (loaded_at, ready_at))]
        states += [("busy", span) for span in busy]
        for start, stop in reversed(_gaps(busy, ready_at, end)):
            lost_at = max(start, stop - lost_s)
            lost_s -= stop - lost_at
            states += [("lost", (lost_at, stop)), ("idle", (start, lost_at))]
        return sorted(states, key=lambda pair: pair[1])


class _Clock:
    """Converts Unix times to seconds of a run without its pauses."""

    def __init__(self, session_spans: Iterable[Span]) -> None:
        self._live_spans = merge_spans(session_spans, 0.0)
        self.starts = [start for start, _ in self._live_spans]
        self._live_s_before = list(accumulate((end - start for start, end in self._live_spans), initial=0.0))
        self.total_s = self._live_s_before[-1]

    def at(self, moment: float) -> float:
        index = max(bisect_right(self.starts, moment) - 1, 0)
        start, end = self._live_spans[index]
        return self._live_s_before[index] + min(max(moment, start), end) - start

    def pauses(self) -> list[dict[str, float]]:
        return [
            {"at_s": at_s, "lasted_s": start - end}
            for at_s, start, (_, end) in zip(self._live_s_before[1:], self.starts[1:], self._live_spans, strict=False)
        ]


def merge_spans(spans: Iterable[Span], gap: float) -> list[Span]:
    """Return sorted spans, joined if they overlap or are at most `gap` apart.

    >>> merge_spans([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)], 0.0)
    [(0.0, 3.0), (5.0, 6.0)]
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _gaps(spans: Sequence[Span], first: float, last: float) -> list[Span]:
    """Return the gaps between sorted spans, from `first` to `last`."""
    starts = [first, *(end for _, end in spans)]
    ends = [*(start for start, _ in spans), last]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if end > start]


def _spread(steps: list[float], start: float, end: float, amount: float) -> None:
    """Distribute an amount evenly over the steps from `start` to `end`, which may be fractions of steps."""
    first, last = (min(int(position), len(steps) - 1) for position in (start, end))
    if first == last:
        steps[first] += amount
        return
    for step in range(first, last + 1):
        steps[step] += amount * (min(end, step + 1) - max(start, step)) / (end - start)
