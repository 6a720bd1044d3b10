import pytest

from peagle.economics.spending import Charge, Days, Spend
from peagle.economics.statement import convert_currency, parse_dimensions, round_amounts, round_to_last_digit, statement
from peagle.errors import ConfigError


def charge(usd, **changes):
    spend = Spend(attributed_usd=usd, num_output_tokens=10)
    values = {"day": 0, "run": "r", "market": "", "usd_per_device_s": 0.01, "model": "m", "key": "k", "spend": spend}
    return Charge(**values | changes)


def test_thirds_of_a_cent_add_up():
    result = statement([charge(1 / 3, key=key) for key in "abc"], ("key",), Days())
    assert [row["usd"]["total"] for row in result["rows"]] == [0.333333334, 0.333333333, 0.333333333]
    cents = round_amounts(result, 2)
    assert [row["usd"]["total"] for row in cents["rows"]] == [0.34, 0.33, 0.33]
    assert cents["total"]["usd"]["total"] == 1.0


@pytest.mark.parametrize("digits", [0, 2, 9])
def test_rounding_keeps_the_sum(digits):
    amounts = [[0.1 * number + 0.005, 1 / (number + 1), 0.0] for number in range(50)]
    units_by_row = round_to_last_digit(amounts, digits)
    scale = 10**digits
    assert sum(map(sum, units_by_row)) == round(sum(map(sum, amounts)) * scale)
    assert all(
        abs(unit - amount * scale) < 1 + 1e-6
        for units, row in zip(units_by_row, amounts, strict=True)
        for unit, amount in zip(units, row, strict=True)
    )


def test_groups_by_tags():
    charges = [
        charge(1.0, tags='{"team": "a"}'), charge(2.0, tags='{"project": "x", "team": "a"}'), charge(4.0),
    ]  # fmt: skip
    by_team = {row["tag:team"]: row["usd"]["total"] for row in statement(charges, ("tag:team",), Days())["rows"]}
    assert by_team == {"": 4.0, "a": 3.0}
    by_tags = {row["tag"]: row["usd"]["total"] for row in statement(charges, ("tag",), Days())["rows"]}
    assert by_tags == {"": 4.0, "project=x, team=a": 2.0, "team=a": 1.0}


@pytest.mark.parametrize(
    ("text", "message"), [("kye", "did you mean key"), ("key,key", "is repeated"), ("tag:", "unknown dimension 'tag:'")]
)
def test_invalid_dimensions_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_dimensions(text)


def test_converted_amounts_add_up():
    result = statement([charge(1 / 3, key=key) for key in "abc"], ("key",), Days())
    converted = convert_currency(result, "EUR", 0.86, digits=2)
    assert [row["converted"]["total"] for row in converted["rows"]] == [0.29, 0.29, 0.28]
    assert converted["total"]["converted"]["total"] == converted["per_usd"] == 0.86
    assert converted["currency_beside"] == "EUR"
    assert [row["usd"] for row in converted["rows"]] == [row["usd"] for row in result["rows"]]
