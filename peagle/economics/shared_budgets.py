"""Budgets of tags and of a whole endpoint, and the draws of bulk runs on them.

    ledger/budgets.json    the budgets; `peagle serve budgets` writes it
    ledger/draw-ID.json    a bulk run's spending on its tags, by day; each look of the run replaces it

A tag's budget pays for whatever has the tag: requests, batches, bulk runs that draw on it. The endpoint's pays for
all seconds of its engines and for its batches. It knows files and sums; who is refused is for others.
"""

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from peagle.economics.ledger import readable
from peagle.economics.spending import DAY_S, day_number, day_of, day_text
from peagle.economics.tags import parse_tags, tags_from_text
from peagle.economics.usage import EngineSession
from peagle.errors import ConfigError
from peagle.files import changing, write_atomic, write_json
from peagle.records import read_list, record_of

Every = Literal["day", "week", "month"]
ByDay = dict[str, dict[int, float]]
"""USD by account and UTC day, counted from 1970-01-01."""
ENDPOINT = "endpoint"
"""The name of the budget of a whole endpoint."""
ENDPOINT_ACCOUNT = "*"  # no key and no tag has it
BUDGETS_NAME = "budgets.json"
_DRAWS = "draw-*.json"
_SILENT_S = 300.0  # a run that has said nothing for so long was killed, and holds nothing


class SharedBudget(BaseModel):
    """A budget as it is stored.

    Attributes:
        name: a tag as KEY=VALUE, or `ENDPOINT`.
        budget_every: the period for which it is; null is all time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    budget_usd: float = Field(gt=0)
    budget_every: Every | None = None

    @field_validator("name")
    @classmethod
    def _is_a_tag_or_the_endpoint(cls, name: str) -> str:
        if name == ENDPOINT:
            return name
        ((key, value),) = parse_tags([name]).items()
        return f"{key}={value}"

    @property
    def account(self) -> str:
        """The account that its spending has among those of keys."""
        return ENDPOINT_ACCOUNT if self.name == ENDPOINT else self.name

    def describe_budget(self) -> str:
        """Itself in words, for whoever it stops."""
        if self.name == ENDPOINT:
            return "the budget of this endpoint"  # its amount is not for every key
        every = f" a {self.budget_every}" if self.budget_every else ""
        return f"the budget of ${self.budget_usd:g}{every} of {self.name}"


def period_of(every: Every, day: date) -> tuple[date, date]:
    """The first days of the period that a day is in and of the next one.

    Weeks begin on Monday.

    >>> period_of("month", date(2026, 12, 31))
    (datetime.date(2026, 12, 1), datetime.date(2027, 1, 1))
    """
    if every == "month":
        first = day.replace(day=1)
        return first, (first + timedelta(days=31)).replace(day=1)
    first = day - timedelta(days=day.weekday() if every == "week" else 0)
    return first, first + timedelta(days=7 if every == "week" else 1)


@lru_cache(maxsize=1024)
def tag_accounts(tags: str) -> tuple[str, ...]:
    """The accounts of tags in the form of a record.

    >>> tag_accounts('{"project": "x", "team": "search"}')
    ('project=x', 'team=search')
    """
    return tuple(f"{key}={value}" for key, value in tags_from_text(tags).items())


# --- the budgets


def read_budgets(path: Path) -> tuple[SharedBudget, ...]:
    """The budgets of a file; none where it does not exist.

    Raises:
        ConfigError: it is no file of budgets.
    """
    values = read_list(path, "budgets", hint="`peagle serve budgets set` writes such files")
    return tuple(record_of(SharedBudget, value, where=f"budgets {path}") for value in values)


@contextlib.contextmanager
def changing_budgets(path: Path) -> Iterator[dict[str, SharedBudget]]:
    """The budgets of a file by name, to change.

    As they are at the end of the `with`, they are written. Whoever else changes it waits.

    Raises:
        ConfigError: as `read_budgets`, or it cannot be written.
    """
    try:
        with changing(path):
            budgets = {budget.name: budget for budget in read_budgets(path)}
            yield budgets
            write_json(path, [budget.model_dump() for budget in budgets.values()])
    except OSError as error:
        raise ConfigError(f"budgets {path}: cannot be written: {error}") from error


# --- what is spent on them beside requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A bulk run's spending on its tags.

    Attributes:
        tags: as a record has them.
        usd_by_day: all that the run has cost, by the UTC days on which it was noticed.
        held_usd: what its end may cost.
        at: Unix time of the run's look.
    """

    run: str
    tags: str
    usd_by_day: Mapping[int, float] = field(default_factory=dict)
    held_usd: float = 0.0
    at: float = 0.0

    @classmethod
    def from_json(cls, data: bytes) -> "Draw":
        """The inverse of what `write_draw` writes.

        Raises:
            ValueError, TypeError: it is no such record.
        """
        values = json.loads(data)
        if not isinstance(values, dict) or not isinstance(values.get("usd_by_day"), dict):
            raise ValueError("it is no draw of a run")
        days = {day_number(date.fromisoformat(day)): float(usd) for day, usd in values.pop("usd_by_day").items()}
        return cls(**values, usd_by_day=days)


def write_draw(ledger: Path, draw: Draw) -> None:
    """Replace the run's draw.

    Raises:
        OSError: it cannot be written.
    """
    days = {day_text(day): usd for day, usd in draw.usd_by_day.items()}
    write_atomic(ledger / f"draw-{draw.run}.json", json.dumps({**asdict(draw), "usd_by_day": days}).encode())


def read_draws(ledger: Path) -> list[Draw]:
    """The draws of all runs; a damaged one is logged and left out."""
    return [
        draw for path in sorted(ledger.glob(_DRAWS)) for draw in readable(path, [path.read_bytes()], Draw.from_json)
    ]


def drawn(draws: Iterable[Draw], now: float | None = None) -> tuple[ByDay, dict[str, float]]:
    """The dollars that runs have spent, by account and day, and that they hold.

    A run that is not at work holds nothing.

    Args:
        now: Unix time.
    """
    moment = time.time() if now is None else now
    spent, held = ByDay(), defaultdict[str, float](float)
    for draw in draws:
        for account in tag_accounts(draw.tags):
            days = spent.setdefault(account, {})
            for day, usd in draw.usd_by_day.items():
                days[day] = days.get(day, 0.0) + usd
            if draw.at >= moment - _SILENT_S:
                held[account] += draw.held_usd
    return spent, dict(held)


def engines_usd(sessions: Iterable[EngineSession]) -> dict[int, float]:
    """The dollars of all seconds of engines, by UTC day.

    Nothing of those without a price.
    """
    by_day = defaultdict[int, float](float)
    for session in sessions:
        usd_per_s = session.num_devices * session.usd_per_device_s
        for day in range(day_of(session.started_at), day_of(session.last_seen_at) + 1):
            seconds = min(session.last_seen_at, (day + 1) * DAY_S) - max(session.started_at, day * DAY_S)
            by_day[day] += seconds * usd_per_s
    return dict(by_day)
