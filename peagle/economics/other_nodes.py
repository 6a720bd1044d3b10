"""The cost of cluster nodes without engines: head and CPU nodes.

They are not in any ledger. They are charged at a price that the user states, while any engine is live.
"""

from collections.abc import Iterable, Iterator

from peagle.economics.spending import DAY_S, Charge, Days, Spend, day_of
from peagle.economics.tags import NO_TAGS
from peagle.economics.timeline import merged
from peagle.economics.usage import EngineSession

NAME = "head and CPU nodes"


def node_charges(sessions: Iterable[EngineSession], days: Days, usd_per_hour: float) -> Iterator[Charge]:
    """Yield the charges by day of the hours with a live engine.

    Args:
        sessions: of all ledgers; overlapping lives count once.
        usd_per_hour: all nodes together.
    """
    for begin, end in merged(((session.started_at, session.last_seen_at) for session in sessions), gap=0.0):
        yield from _charges(begin, end, days, usd_per_hour)


def _charges(begin: float, end: float, days: Days, usd_per_hour: float) -> Iterator[Charge]:
    while begin < end:
        day = day_of(begin)
        midnight = min((day + 1.0) * DAY_S, end)
        if day in days:
            yield Charge(
                day=day,
                run=NAME,
                instance="",
                provider="",
                region="",
                market="fixed",
                usd_per_device_s=usd_per_hour / 3600,
                model="",
                drafter="",
                key="",
                tags=NO_TAGS,
                spend=Spend(idle_usd=(midnight - begin) * usd_per_hour / 3600),
            )
        begin = midnight
