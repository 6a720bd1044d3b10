import csv
import io
from decimal import Decimal

from peagle.economics.report.spending import csv_statement, text_statement
from peagle.economics.spending import Charge, Days, Spend
from peagle.economics.statement import convert_currency, statement


def a_statement(*, is_priced=True, scale=1.0):
    own = {
        "day": 20_000, "run": "r", "instance": "i", "provider": "", "region": "", "market": "",
        "usd_per_device_s": 0.01, "model": "m", "drafter": "none", "tags": "{}",
    }  # fmt: skip
    work = Spend(attributed_usd=scale * 2 / 3, num_requests=2, num_output_tokens=1_000_000)
    overhead = Spend(loading_usd=scale / 3, idle_usd=scale / 7, lost_usd=scale / 9, is_priced=is_priced)
    charges = [
        Charge(key="alice|<b>", spend=work, **own), Charge(key="bob", spend=work, **own),
        Charge(key="", spend=overhead, **own),
    ]  # fmt: skip
    return statement(charges, ("key", "day"), Days(20_000, 20_001), ["A note."])


def test_a_table_has_a_line_for_each_group_and_says_where_the_money_went():
    lines = text_statement(a_statement()).splitlines()
    assert lines[0] == "Spending from 2024-10-04 to 2024-10-05, both included (UTC)"
    heads = "key day requests output tokens attributed loading idle lost total per million tokens"
    assert lines[2].split() == heads.split()
    assert lines[3].split()[:2] == ["-", "2024-10-04"]
    assert " ".join(lines[5].split()) == "bob 2024-10-04 2 1.00 M $0.66 $0.00 $0.00 $0.00 $0.66 $0.667"
    assert lines[8].split() == ["attributed", "$1.33"]
    assert " ".join(lines[9].split()) == "overhead (loading $0.34, idle $0.14) $0.48"
    assert lines[11].split() == ["total", "$1.92"]
    assert lines[-1] == "! A note."


def test_what_is_unknown_is_called_so_and_is_neither_nothing_nor_infinite():
    for text in (form(a_statement(is_priced=False)) for form in (text_statement, csv_statement)):
        assert "unknown" in text
        assert "inf" not in text
        assert "nan" not in text


def test_sums_below_a_dollar_have_more_digits():
    assert "$0.000019" in text_statement(a_statement(scale=1e-5))


def test_lines_of_csv_add_up_to_the_last_digit():
    one = a_statement()
    rows = list(csv.DictReader(io.StringIO(csv_statement(one))))
    assert [row["key"] for row in rows] == ["", "alice|<b>", "bob"]
    assert sum(Decimal(row["total_usd"]) for row in rows) == Decimal(f"{one['total']['usd']['total']:.9f}")
    kinds = ("attributed_usd", "loading_usd", "idle_usd", "lost_usd")
    assert all(sum(Decimal(row[kind]) for kind in kinds) == Decimal(row["total_usd"]) for row in rows)


def test_another_currency_stands_beside_the_dollars_and_adds_up_too():
    both = convert_currency(a_statement(), "EUR", 0.86)
    rows, total = csv.DictReader(io.StringIO(csv_statement(both))), both["total"]["converted"]["total"]
    assert sum(Decimal(row["total_eur"]) for row in rows) == Decimal(f"{total:.9f}")
    text = text_statement(both)
    assert "total, EUR" in text
    assert f"{total:.2f} EUR" in text
    assert "EUR" not in text_statement(a_statement())
