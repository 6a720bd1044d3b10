"""A statement: the charges of a period, grouped and added up exactly.

    attributed + loading + idle + lost = total, for each group; groups add up to the total

All amounts are rounded together by the method of largest remainders, so rounded parts add up to the rounded total.
Unknown amounts are None, never 0.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from peagle.economics.savings import Savings
from peagle.economics.spending import KINDS, Charge, Days, Spend, day_text
from peagle.economics.tags import tags_from_text
from peagle.economics.usage import WORK_COUNTS
from peagle.errors import ConfigError, did_you_mean

SCHEMA = 1
DIMENSIONS = ("key", "model", "drafter", "tag", "day", "run", "instance")
DIGITS = 9  # decimal places of dollars in JSON
_TAG_PREFIX = "tag:"


def parse_dimensions(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of dimensions. `tag:NAME` groups by one tag, `tag` by all tags together.

    >>> parse_dimensions("day,tag:team")
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

    Its `start` and `end` are inclusive days, and None if unbounded. Each row has its dimensions, counts, `usd`,
    `usd_per_million_tokens` and `saved` (`Savings.to_dict`).
    """
    groups: dict[tuple[str, ...], Spend] = {}
    by_drafter: dict[tuple[str, str], Savings] = {}
    for charge in charges:
        values = tuple(_value(charge, dimension) for dimension in by)
        groups[values] = groups.get(values, Spend()) + charge.spend
        drafter_and_model = (charge.drafter, charge.model)
        by_drafter[drafter_and_model] = by_drafter.get(drafter_and_model, Savings()) + charge.spend.savings
    ordered = sorted(groups.items())
    total = sum((spend for _, spend in ordered), Spend())
    unpriced = [] if total.is_priced else ["Some engines have no price in their ledger, so their cost is unknown."]
    losses = (savings.loss_note(f"{drafter} for {model}") for (drafter, model), savings in sorted(by_drafter.items()))
    multiples = round_to_last_digit([[getattr(spend, f"{kind}_usd") for kind in KINDS] for _, spend in ordered], DIGITS)
    return {
        "schema": SCHEMA,
        "currency": "USD",
        "start": None if days.first is None else day_text(days.first),
        "end": None if days.last is None else day_text(days.last),
        "by": list(by),
        "rows": [
            {**dict(zip(by, values, strict=True)), **_figures(spend, row)}
            for (values, spend), row in zip(ordered, multiples, strict=True)
        ],
        "total": _figures(total, [sum(column) for column in zip(*multiples, strict=True)]),
        "notes": [*notes, *unpriced, *filter(None, losses)],
    }


def _value(charge: Charge, dimension: str) -> str:
    if dimension.startswith(_TAG_PREFIX):
        return tags_from_text(charge.tags).get(dimension.removeprefix(_TAG_PREFIX), "")
    if dimension == "tag":
        return ", ".join(f"{key}={value}" for key, value in tags_from_text(charge.tags).items())
    return day_text(charge.day) if dimension == "day" else str(getattr(charge, dimension))


def _figures(spend: Spend, multiples: Sequence[int]) -> dict[str, Any]:
    usd = multiples_to_usd(multiples or [0] * len(KINDS), DIGITS, is_priced=spend.is_priced)
    total, tokens = usd["total"], spend.num_output_tokens
    return {
        **{name: getattr(spend, name) for name in WORK_COUNTS},
        "usd": usd,
        "usd_per_million_tokens": 1e6 * total / tokens if total and tokens else None,
        "saved": spend.savings.to_dict(),
    }


def multiples_to_usd(multiples: Sequence[int], digits: int, *, is_priced: bool) -> dict[str, float | None]:
    """Return amounts by kind, with `overhead` and `total`, from integer multiples of the last digit.

    If some engine time has no price, only `attributed` is known.
    """
    attributed, loading, idle, lost = multiples
    kinds = {
        "attributed": attributed,
        "loading": loading,
        "idle": idle,
        "overhead": loading + idle,
        "lost": lost,
        "total": sum(multiples),
    }
    scale = 10**digits
    return {name: value / scale if is_priced or name == "attributed" else None for name, value in kinds.items()}


def round_to_last_digit(amounts: Sequence[Sequence[float]], digits: int) -> list[list[int]]:
    """Round amounts to integer multiples of the last digit that add up to the rounded sum, by column and in total.

    >>> round_to_last_digit([[0.333, 0.333], [0.334, 1.0]], 2)
    [[34, 33], [33, 100]]
    """
    columns = [[amount * 10**digits for amount in column] for column in zip(*amounts, strict=True)]
    sums = [math.fsum(column) for column in columns]
    totals = _apportion(sums, round(math.fsum(sums)))
    by_column = [_apportion(column, total) for column, total in zip(columns, totals, strict=True)]
    return [list(row) for row in zip(*by_column, strict=True)]


def _apportion(amounts: Sequence[float], total: int) -> list[int]:
    """Round each amount down, and add the missing multiples to those with the largest remainders."""
    multiples = [math.floor(amount) for amount in amounts]
    by_remainder = sorted(range(len(multiples)), key=lambda i: multiples[i] - amounts[i])
    for index in by_remainder[: total - sum(multiples)]:
        multiples[index] += 1
    return multiples


def convert_currency(data: Mapping[str, Any], code: str, per_usd: float, digits: int = DIGITS) -> dict[str, Any]:
    """Return a statement that also has each amount in another currency, under the key `converted`."""
    return {**round_amounts(data, digits, "converted", per_usd), "currency_beside": code, "per_usd": per_usd}


def round_amounts(data: Mapping[str, Any], digits: int, name: str = "usd", scale: float = 1.0) -> dict[str, Any]:
    """Return a statement whose key `name` has the amounts, scaled and rounded to `digits`."""
    rows = data["rows"] or [data["total"]]
    multiples = round_to_last_digit([[scale * (row["usd"][kind] or 0.0) for kind in KINDS] for row in rows], digits)
    total = [sum(column) for column in zip(*multiples, strict=True)]

    def with_amounts(row: Mapping[str, Any], amounts: Sequence[int]) -> dict[str, Any]:
        return {**row, name: multiples_to_usd(amounts, digits, is_priced=row["usd"]["total"] is not None)}

    return {
        **data,
        "rows": [with_amounts(row, amounts) for row, amounts in zip(data["rows"], multiples, strict=False)],
        "total": with_amounts(data["total"], total),
    }
