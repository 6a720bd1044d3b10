"""Budgets of tags and of an endpoint, and what bulk runs spend from the budgets of their tags.

    ledger/budgets.json    the budgets, written by `peagle serve budgets`
    ledger/draw-ID.json    the spending of a bulk run by day; each update replaces it

A tag's budget covers requests, batches and bulk runs with that tag. The endpoint's budget covers all the time of its
engines, and its batches.
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

from peagle.economics.ledger import valid_records
from peagle.economics.spending import DAY_S, day_number, day_of, day_text
from peagle.economics.tags import parse_tags, tags_from_text
from peagle.economics.usage import EngineSession
from peagle.errors import ConfigError
from peagle.files import locked_for_update, write_atomic, write_json
from peagle.records import read_list, validate_record

Every = Literal["day", "week", "month"]
UsdByDay = dict[str, dict[int, float]]
"""USD by account and UTC day, counted from 1970-01-01."""
ENDPOINT = "endpoint"  # the name of an endpoint's budget
ENDPOINT_ACCOUNT = "*"  # no key or tag has this name
BUDGETS_NAME = "budgets.json"
_SILENT_S = 300.0  # a run without an update for this long is assumed to have crashed, and reserves nothing


class SharedBudget(BaseModel):
    """A stored budget. Its name is a tag (KEY=VALUE) or `ENDPOINT`."""

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
        return ENDPOINT_ACCOUNT if self.name == ENDPOINT else self.name

    def describe_budget(self) -> str:
        if self.name == ENDPOINT:
            return "the budget of this endpoint"  # without the amount, which not every key may see
        every = f" a {self.budget_every}" if self.budget_every else ""
        return f"the budget of ${self.budget_usd:g}{every} for {self.name}"


def period_of(every: Every, day: date) -> tuple[date, date]:
    """Return the first day of the period that contains `day`, and that of the next period. Weeks start on Monday.

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
    """Return the budget accounts of tags, which are given as JSON.

    >>> tag_accounts('{"project": "x", "team": "search"}')
    ('project=x', 'team=search')
    """
    return tuple(f"{key}={value}" for key, value in tags_from_text(tags).items())


# --- the budgets


def read_budgets(path: Path) -> tuple[SharedBudget, ...]:
    values = read_list(path, "budgets", hint="create the file with `peagle serve budgets set`")
    return tuple(validate_record(SharedBudget, value, where=f"budgets {path}") for value in values)


@contextlib.contextmanager
def edit_budgets(path: Path) -> Iterator[dict[str, SharedBudget]]:
    """Lock a budgets file, yield its budgets by name, and write them afterwards."""
    try:
        with locked_for_update(path):
            budgets = {budget.name: budget for budget in read_budgets(path)}
            yield budgets
            write_json(path, [budget.model_dump() for budget in budgets.values()])
    except OSError as error:
        raise ConfigError(f"budgets {path}: cannot be written: {error}") from error


# --- spending of bulk runs and engines


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSpending:
    """The spending of a bulk run from the budgets of its tags.

    `usd_by_day` is the cost of the run by UTC day, `held_usd` the reserved cost of the remaining work,
    and `at` the time of the update.
    """

    run: str
    tags: str
    usd_by_day: Mapping[int, float] = field(default_factory=dict)
    held_usd: float = 0.0
    at: float = 0.0

    @classmethod
    def from_json(cls, data: bytes) -> "TagSpending":
        values = json.loads(data)
        if not isinstance(values, dict) or not isinstance(values.get("usd_by_day"), dict):
            raise ValueError("not the spending of a run")
        days = {day_number(date.fromisoformat(day)): float(usd) for day, usd in values.pop("usd_by_day").items()}
        return cls(**values, usd_by_day=days)


def write_tag_spending(ledger: Path, spending: TagSpending) -> None:
    days = {day_text(day): usd for day, usd in spending.usd_by_day.items()}
    write_atomic(ledger / f"draw-{spending.run}.json", json.dumps({**asdict(spending), "usd_by_day": days}).encode())


def read_tag_spending(ledger: Path) -> list[TagSpending]:
    return [
        spending
        for path in sorted(ledger.glob("draw-*.json"))
        for spending in valid_records(path, [path.read_bytes()], TagSpending.from_json)
    ]


def sum_tag_spending(runs: Iterable[TagSpending], now: float | None = None) -> tuple[UsdByDay, dict[str, float]]:
    """Return the spend of runs by account and day, and their reservations by account.

    Runs without a recent update reserve nothing.
    """
    moment = time.time() if now is None else now
    spent, held = UsdByDay(), defaultdict[str, float](float)
    for spending in runs:
        for account in tag_accounts(spending.tags):
            days = spent.setdefault(account, {})
            for day, usd in spending.usd_by_day.items():
                days[day] = days.get(day, 0.0) + usd
            if spending.at >= moment - _SILENT_S:
                held[account] += spending.held_usd
    return spent, dict(held)


def engines_usd(sessions: Iterable[EngineSession]) -> dict[int, float]:
    """Return the cost of engine time by UTC day. Engines without a price count as 0."""
    by_day = defaultdict[int, float](float)
    for session in sessions:
        usd_per_s = session.num_devices * session.usd_per_device_s
        for day in range(day_of(session.started_at), day_of(session.last_seen_at) + 1):
            seconds = min(session.last_seen_at, (day + 1) * DAY_S) - max(session.started_at, day * DAY_S)
            by_day[day] += seconds * usd_per_s
    return dict(by_day)
