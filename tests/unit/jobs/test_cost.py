import csv
import io
import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from jobs import cli
from tests.unit.economics.month import write_endpoint, write_nightly

DOCS = Path(__file__).parents[3] / "docs" / "cost.md"


@pytest.fixture
def peagle(tmp_path, monkeypatch, capsys):
    """`peagle` in the folder of the month that the docs work by hand; its output."""
    monkeypatch.chdir(tmp_path)
    write_endpoint(tmp_path / "runs" / "serve")
    write_nightly(tmp_path / "runs" / "nightly")

    def run(*argv, code=0):
        assert cli.run(argv) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return run


def blocks():
    """Commands of the docs with what they show below them."""
    text = DOCS.read_text(encoding="utf-8")
    return re.findall(r"^\$ peagle (cost .*)\n((?:(?!```).*\n)+)", text, re.MULTILINE)


def test_the_docs_work_the_month_by_hand():
    assert len(blocks()) >= 2


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block[0])
def test_the_month_of_the_docs_is_what_the_command_says_to_the_cent(peagle, block):
    command, shown = block
    assert peagle(*command.split()).rstrip() == shown.rstrip()


def test_every_format_has_the_same_whole(peagle):
    arguments = ("cost", "runs/*", "--month", "2026-11", "--by", "key,day")
    whole = Decimal("27.825639")
    result = json.loads(peagle(*arguments, "--format", "json"))
    assert result["total"]["usd"]["total"] == pytest.approx(float(whole), abs=1e-6)
    for form, column in (("csv", "total_usd"), ("focus", "BilledCost")):
        rows = csv.DictReader(io.StringIO(peagle(*arguments, "--format", form)))
        assert sum(Decimal(row[column]) for row in rows) == Decimal(f"{result['total']['usd']['total']:.9f}")
    assert "$27.83" in peagle(*arguments, "--format", "md")
    assert "$27.83" in peagle(*arguments, "--format", "html")


def test_months_add_up_to_all_time(peagle):
    def total(*period):
        text = peagle("cost", "runs/serve", "runs/nightly", *period, "--by", "", "--format", "json")
        return json.loads(text)["total"]["usd"]["total"]

    parts = [total("--month", "2026-11"), total("--month", "2026-12")]
    assert total() == pytest.approx(sum(parts), abs=2e-9)
    assert total("--to", "2026-11-30") == parts[0]
    assert total("--from", "2026-12-01") == parts[1]
    assert total("--month", "2026-10") == 0.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--month", "2026-13"], "the period"),
        (["--month", "2026-11", "--to", "2026-11-02"], "leave out --from and --to"),
        (["--from", "yesterday"], "the period"),
        (["--from", "2026-11-02", "--to", "2026-11-01"], "before it begins on 2026-11-02"),
        (["--by", "kye"], "did you mean key"),
    ],
)
def test_a_period_or_a_dimension_that_is_none_is_bad_usage(peagle, flags, message):
    assert message in peagle("cost", "runs/serve", *flags, code=2)
