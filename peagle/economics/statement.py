"""A statement: charges of a period, grouped and added up to the last digit.

    attributed + loading + idle + lost = total, of each group; the groups' amounts are the whole's

Amounts are rounded once, all together: to whole units of the last digit, so that the whole is right and its parts add
up to it (the method of largest remainders). What is not known is None, never 0.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from peagle.economics.gain import Gain
from peagle.economics.spending import KINDS, Charge, Days, Spend, day_text
from peagle.economics.tags import tags_from_text
from peagle.economics.work import COUNTS
from peagle.errors import ConfigError, did_you_mean

SCHEMA = 1
DIMENSIONS = ("key", "model", "drafter", "tag", "day", "run", "instance")
DIGITS = 9  # of a dollar, in data
_OF_A_TAG = "tag:"


def dimensions(text: str) -> tuple[str, ...]:
    """The dimensions of a list with commas.

    `tag:NAME` is the value of one tag, and `tag` all tags together.

    Raises:
        ConfigError: there is no such dimension, or one is there twice.

    >>> dimensions("day,tag:team")
    ('day', 'tag:team')
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in DIMENSIONS and not (name.startswith(_OF_A_TAG) and name != _OF_A_TAG):
            raise ConfigError(f"spending has no {name!r}", hint=did_you_mean(name, [*DIMENSIONS, "tag:NAME"]))
        if names.count(name) > 1:
            raise ConfigError(f"{name} is given twice", hint="name each dimension once")
    return names


def statement(charges: Iterable[Charge], by: Sequence[str], days: Days, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The spending of a period, ready for JSON.

    Args:
        by: dimensions, as `dimensions` gives them; none is the total alone.
        days: that the charges are of.
        notes: sentences that a reader should not miss.

    Returns:
        `schema`, `currency`, `start` and `end` (the last day; both None without bounds), `by`, `rows` (each with its
        dimensions, counts, `usd`, `usd_per_million_tokens`, and `saved` as `Gain.to_dict` has it), `total` (the same of
        all) and `notes`.
    """
    groups: dict[tuple[str, ...], Spend] = {}
    by_drafter: dict[tuple[str, str], Gain] = {}
    for charge in charges:
        names = tuple(_name(charge, dimension) for dimension in by)
        groups[names] = groups.get(names, Spend()) + charge.spend
        drafted = (charge.drafter, charge.model)
        by_drafter[drafted] = by_drafter.get(drafted, Gain()) + charge.spend.gain
    found = sorted(groups.items())
    whole = sum((spend for _, spend in found), Spend())
    unpriced = [] if whole.is_priced else ["Some engines have no price in their ledger: their cost is unknown."]
    return {
        "schema": SCHEMA,
        "currency": "USD",
        "start": None if days.first is None else day_text(days.first),
        "end": None if days.last is None else day_text(days.last),
        "by": list(by),
        **_rows(by, found, whole),
        "notes": [*notes, *unpriced, *_losses(by_drafter)],
    }


def _losses(by_drafter: Mapping[tuple[str, str], Gain]) -> Iterator[str]:
    """A sentence for each drafter that costs more than it saves."""
    for (drafter, model), gain in sorted(by_drafter.items()):
        if note := gain.loss_note(f"{drafter} for {model}"):
            yield note


def _name(charge: Charge, dimension: str) -> str:
    if dimension.startswith(_OF_A_TAG):
        return tags_from_text(charge.tags).get(dimension.removeprefix(_OF_A_TAG), "")
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
        "saved": spend.gain.to_dict(),
    }


def in_dollars(units: Sequence[int], digits: int, *, is_priced: bool) -> dict[str, float | None]:
    """Amounts by kind, with `overhead` and `total`, of whole units of the last digit.

    Where something has no price, only what was attributed is known.
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
    """Amounts in whole units of the last digit; they add up to the rounded sum.

    First the sums of the columns are rounded, then each column, so that many small rows do not move a column's sum.

    >>> rounded([[0.333, 0.333], [0.334, 1.0]], 2)
    [[34, 33], [33, 100]]
    """
    columns = [[amount * 10**digits for amount in column] for column in zip(*amounts, strict=True)]
    sums = [math.fsum(column) for column in columns]
    totals = _apportioned(sums, round(math.fsum(sums)))
    by_column = [_apportioned(column, total) for column, total in zip(columns, totals, strict=True)]
    return [list(row) for row in zip(*by_column, strict=True)]


def _apportioned(amounts: Sequence[float], total: int) -> list[int]:
    """Whole numbers near the amounts that add up to a total near their sum.

    Each is rounded down; what is then missing goes to the largest remainders.
    """
    units = [math.floor(amount) for amount in amounts]
    by_remainder = sorted(range(len(units)), key=lambda i: units[i] - amounts[i])
    for index in by_remainder[: total - sum(units)]:
        units[index] += 1
    return units


def shown(one: Mapping[str, Any], digits: int) -> dict[str, Any]:
    """A statement with its amounts rounded to fewer digits, all together again."""
    return _again(one, "usd", digits, 1.0)


def in_currency(one: Mapping[str, Any], code: str, per_usd: float, digits: int = DIGITS) -> dict[str, Any]:
    """A statement with its amounts in another currency beside the dollars.

    They are `converted` beside each `usd`, and add up too.

    Args:
        code: of ISO 4217.
        per_usd: of that currency for a dollar, at all days.
    """
    return {**_again(one, "converted", digits, per_usd), "currency_beside": code, "per_usd": per_usd}


def _again(one: Mapping[str, Any], name: str, digits: int, scale: float) -> dict[str, Any]:
    rows = one["rows"] or [one["total"]]
    units = rounded([[scale * (row["usd"][kind] or 0.0) for kind in KINDS] for row in rows], digits)
    whole = [sum(column) for column in zip(*units, strict=True)]

    def amended(row: Mapping[str, Any], own: Sequence[int]) -> dict[str, Any]:
        return {**row, name: in_dollars(own, digits, is_priced=row["usd"]["total"] is not None)}

    return {
        **one,
        "rows": [amended(row, own) for row, own in zip(one["rows"], units, strict=False)],
        "total": amended(one["total"], whole),
    }
