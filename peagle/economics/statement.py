"""A statement: the charges of a period, grouped and added up exactly.

    attributed + loading + idle + lost = total, for each group; groups add up to the total

All amounts are rounded together by the method of largest remainders, so rounded parts add up to the rounded total.
Unknown amounts are None, never 0.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from peagle.economics.savings import Savings
from peagle.economics.spending import KINDS, Charge, Days, Spend, day_text
from peagle.economics.tags import tags_from_text
from peagle.economics.usage import COUNTS
from peagle.errors import ConfigError, did_you_mean

SCHEMA = 1
DIMENSIONS = ("key", "model", "drafter", "tag", "day", "run", "instance")
DIGITS = 9  # of a dollar, in data
_TAG_PREFIX = "tag:"


def dimensions(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of dimensions. `tag:NAME` is the value of one tag, `tag` all tags together.

    >>> dimensions("day,tag:team")
    ('day', 'tag:team')
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in DIMENSIONS and not (name.startswith(_TAG_PREFIX) and name != _TAG_PREFIX):
            raise ConfigError(f"unknown dimension {name!r}", hint=did_you_mean(name, [*DIMENSIONS, "tag:NAME"]))
        if names.count(name) > 1:
            raise ConfigError(f"the dimension {name} is repeated", hint="list it once")
    return names


def statement(charges: Iterable[Charge], by: Sequence[str], days: Days, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the spending of a period for JSON.

    Returns:
        `schema`, `currency`, `start` and `end` (inclusive; None if unbounded), `by`, `rows` (with their dimensions,
        counts, `usd`, `usd_per_million_tokens` and `saved` as in `Savings.to_dict`), `total` and `notes`.
    """
    groups: dict[tuple[str, ...], Spend] = {}
    by_drafter: dict[tuple[str, str], Savings] = {}
    for charge in charges:
        names = tuple(_value(charge, dimension) for dimension in by)
        groups[names] = groups.get(names, Spend()) + charge.spend
        drafted = (charge.drafter, charge.model)
        by_drafter[drafted] = by_drafter.get(drafted, Savings()) + charge.spend.savings
    ordered = sorted(groups.items())
    whole = sum((spend for _, spend in ordered), Spend())
    unpriced = [] if whole.is_priced else ["Some engines have no price in their ledger, so their cost is unknown."]
    return {
        "schema": SCHEMA,
        "currency": "USD",
        "start": None if days.first is None else day_text(days.first),
        "end": None if days.last is None else day_text(days.last),
        "by": list(by),
        **_rows(by, ordered, whole),
        "notes": [*notes, *unpriced, *_loss_notes(by_drafter)],
    }


def _loss_notes(by_drafter: Mapping[tuple[str, str], Savings]) -> Iterator[str]:
    for (drafter, model), savings in sorted(by_drafter.items()):
        if note := savings.loss_note(f"{drafter} for {model}"):
            yield note


def _value(charge: Charge, dimension: str) -> str:
    if dimension.startswith(_TAG_PREFIX):
        return tags_from_text(charge.tags).get(dimension.removeprefix(_TAG_PREFIX), "")
    if dimension == "tag":
        return ", ".join(f"{key}={value}" for key, value in tags_from_text(charge.tags).items())
    return day_text(charge.day) if dimension == "day" else str(getattr(charge, dimension))


def _rows(by: Sequence[str], groups: Sequence[tuple[tuple[str, ...], Spend]], whole: Spend) -> dict[str, Any]:
    amounts = rounded([_amounts(spend) for _, spend in groups], DIGITS)
    rows = [
        {**dict(zip(by, names, strict=True)), **_figures(spend, units)}
        for (names, spend), units in zip(groups, amounts, strict=True)
    ]
    return {"rows": rows, "total": _figures(whole, [sum(column) for column in zip(*amounts, strict=True)])}


def _amounts(spend: Spend) -> list[float]:
    return [getattr(spend, f"{kind}_usd") for kind in KINDS]


def _figures(spend: Spend, units: Sequence[int]) -> dict[str, Any]:
    usd = in_dollars(units or [0] * len(KINDS), DIGITS, is_priced=spend.is_priced)
    total, tokens = usd["total"], spend.num_output_tokens
    return {
        **{name: getattr(spend, name) for name in COUNTS},
        "usd": usd,
        "usd_per_million_tokens": 1e6 * total / tokens if total and tokens else None,
        "saved": spend.savings.to_dict(),
    }


def in_dollars(units: Sequence[int], digits: int, *, is_priced: bool) -> dict[str, float | None]:
    """Return amounts by kind, with `overhead` and `total`, from integer units of the last digit.

    Without a price for everything, only `attributed` is known.
    """
    attributed, loading, idle, lost = units
    kinds = {
        "attributed": attributed,
        "loading": loading,
        "idle": idle,
        "overhead": loading + idle,
        "lost": lost,
        "total": sum(units),
    }
    scale = 10**digits
    return {name: unit / scale if is_priced or name == "attributed" else None for name, unit in kinds.items()}


def rounded(amounts: Sequence[Sequence[float]], digits: int) -> list[list[int]]:
    """Round amounts to integer units of the last digit that add up to the rounded sum.

    The column sums are rounded first, then each column, so that many small rows do not change a column's sum.

    >>> rounded([[0.333, 0.333], [0.334, 1.0]], 2)
    [[34, 33], [33, 100]]
    """
    columns = [[amount * 10**digits for amount in column] for column in zip(*amounts, strict=True)]
    sums = [math.fsum(column) for column in columns]
    totals = _apportioned(sums, round(math.fsum(sums)))
    by_column = [_apportioned(column, total) for column, total in zip(columns, totals, strict=True)]
    return [list(row) for row in zip(*by_column, strict=True)]


def _apportioned(amounts: Sequence[float], total: int) -> list[int]:
    """Return integers near the amounts that add up to a total near their sum.

    Each is rounded down; the rest goes to the largest remainders.
    """
    units = [math.floor(amount) for amount in amounts]
    by_remainder = sorted(range(len(units)), key=lambda i: units[i] - amounts[i])
    for index in by_remainder[: total - sum(units)]:
        units[index] += 1
    return units


def shown(data: Mapping[str, Any], digits: int) -> dict[str, Any]:
    return _round_again(data, "usd", digits, 1.0)


def convert_currency(data: Mapping[str, Any], code: str, per_usd: float, digits: int = DIGITS) -> dict[str, Any]:
    """Return a statement with amounts in another currency, as `converted` alongside `usd`."""
    return {**_round_again(data, "converted", digits, per_usd), "currency_beside": code, "per_usd": per_usd}


def _round_again(data: Mapping[str, Any], name: str, digits: int, scale: float) -> dict[str, Any]:
    rows = data["rows"] or [data["total"]]
    units = rounded([[scale * (row["usd"][kind] or 0.0) for kind in KINDS] for row in rows], digits)
    whole = [sum(column) for column in zip(*units, strict=True)]

    def amended(row: Mapping[str, Any], own: Sequence[int]) -> dict[str, Any]:
        return {**row, name: in_dollars(own, digits, is_priced=row["usd"]["total"] is not None)}

    return {
        **data,
        "rows": [amended(row, own) for row, own in zip(data["rows"], units, strict=False)],
        "total": amended(data["total"], whole),
    }
