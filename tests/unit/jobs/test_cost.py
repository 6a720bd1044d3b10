import csv
import io
import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from jobs import cli
from tests.unit.economics.month import write_endpoint, write_nightly

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "worked-month.md"


@pytest.fixture
def peagle(tmp_path, monkeypatch, capsys):
    """Return a function that runs `peagle` in the folder of the docs' example month, and returns the output."""
    monkeypatch.chdir(tmp_path)
    write_endpoint(tmp_path / "runs" / "serve")
    write_nightly(tmp_path / "runs" / "nightly")

    def run(*argv, code=0):
        assert cli.run(argv) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return run


def documented_commands():
    """Return the commands in the docs with their outputs."""
    text = DOCS.read_text(encoding="utf-8")
    return re.findall(r"^\$ peagle (cost .*)\n((?:(?!```).*\n)+)", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "expected"), documented_commands(), ids=[command for command, _ in documented_commands()]
)
def test_docs_match_cost_command(peagle, command, expected):
    assert peagle(*command.split()).rstrip() == expected.rstrip()


def test_docs_match_savings(peagle):
    saved = json.loads(peagle("cost", "runs/serve", "--format", "json"))["total"]["saved"]
    by_drafter = saved["speculation"]
    computed = (
        saved["generation_usd"], saved["prompt_usd"], by_drafter["without_usd"], by_drafter["error_usd"],
        by_drafter["usd"],
    )  # fmt: skip
    text = DOCS.read_text(encoding="utf-8").partition("## What was saved")[2]
    documented = re.findall(r"^\|.*\| (\d+\.\d{6}) \|$", text, re.MULTILINE)[1:]
    assert [f"{usd:.6f}" for usd in computed] == documented


def test_formats_have_the_same_total(peagle):
    arguments = ("cost", "runs/*", "--month", "2026-11", "--by", "key,day")
    result = json.loads(peagle(*arguments, "--format", "json"))
    assert result["total"]["usd"]["total"] == pytest.approx(27.825639, abs=1e-6)
    for output_format, column in (("csv", "total_usd"), ("focus", "BilledCost")):
        rows = csv.DictReader(io.StringIO(peagle(*arguments, "--format", output_format)))
        assert sum(Decimal(row[column]) for row in rows) == Decimal(f"{result['total']['usd']['total']:.9f}")
    assert "$27.83" in peagle(*arguments, "--format", "html")


HARDWARE = {"hardware": {"description": "1 x H100"}, "precision": "fp8 weights"}  # of a benchmark


def test_benchmark_can_be_the_baseline_of_savings(peagle):
    cells = [
        {"method": "none", "k": 0, "concurrency": 1, "output_tokens_per_s": 250.0, "step_s": 0.004},
        {"method": "peagle", "k": 4, "concurrency": 1, "output_tokens_per_s": 500.0, "step_s": 0.0025, "spread": 0.1},
    ]
    setups = [{"head": None, "method": "none", "k": 0}, {"head": "head", "method": "peagle", "k": 4}]
    report = {"model": "gpt-oss-20b", "cells": cells, "setups": setups, **HARDWARE}
    Path("bench.json").write_text(json.dumps(report), encoding="utf-8")
    arguments = ("cost", "runs/serve", "--by", "key", "--format", "json")
    result = json.loads(peagle(*arguments, "--baseline", "bench.json"))
    saved = result["total"]["saved"]
    assert saved["sources"] == ["bench.json (1 x H100; fp8 weights)"]
    # Generation took 1,600 s for alice and 750 s for bob. Without the drafter: 2,000,000 and 900,000 steps of 4 ms.
    assert saved["generation_usd"] == pytest.approx(2350 * 6.88 / 3600)
    assert saved["speculation"]["without_usd"] == pytest.approx(11_600 * 6.88 / 3600)
    assert saved["speculation"]["error_usd"] is None, "one of the two cells has no `spread`"
    by_key = {row["key"]: row["saved"]["speculation"]["usd"] for row in result["rows"]}
    assert by_key == {"": None, "alice": pytest.approx(6400 * 6.88 / 3600), "bob": pytest.approx(2850 * 6.88 / 3600)}


def test_drafter_that_loses_money_is_reported(peagle):
    cells = [
        {"method": "none", "k": 0, "concurrency": 1, "output_tokens_per_s": 1000.0, "step_s": 0.001, "spread": 0.02},
        {"method": "peagle", "k": 4, "concurrency": 1, "output_tokens_per_s": 500.0, "step_s": 0.005, "spread": 0.02},
    ]
    setups = [{"head": "head", "method": "peagle", "k": 4}]
    report = {"model": "m", "cells": cells, "setups": setups, **HARDWARE}
    Path("bench.json").write_text(json.dumps(report), encoding="utf-8")
    text = peagle("cost", "runs/serve", "--baseline", "bench.json")
    assert "! Speculation loses money: generation with head for gpt-oss-20b cost $3.44 more than without" in text
    assert "where 5.00 breaks even" in text
    text = peagle("cost", "runs/*", "--baseline", "bench.json")
    assert "! 1 run with other hardware or precision than the baseline: runs/nightly" in text


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
        (["--month", "2026-13"], "invalid period"),
        (["--month", "2026-11", "--to", "2026-11-02"], "cannot be combined with --from"),
        (["--from", "yesterday"], "invalid period"),
        (["--from", "2026-11-02", "--to", "2026-11-01"], "is before the start 2026-11-02"),
        (["--by", "kye"], "did you mean key"),
    ],
)
def test_invalid_period_or_dimension_is_refused(peagle, flags, message):
    assert message in peagle("cost", "runs/serve", *flags, code=2)


def test_costs_are_converted_at_the_given_rate(peagle):
    arguments = ("cost", "runs/serve", "--month", "2026-11", "--currency", "EUR", "--rate", "0.5")
    text = peagle(*arguments)
    assert "13.76 EUR" in text
    assert "Converted at 0.5 EUR per dollar on all days." in text
    assert ",EUR," in peagle(*arguments, "--format", "focus")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--currency", "EUR"], "must be set together"),
        (["--rate", "2"], "must be set together"),
        (["--currency", "euro", "--rate", "2"], "not a currency code"),
        (["--currency", "EUR", "--rate", "0"], "positive"),
        (["--currency", "EUR", "--rate", "nan"], "positive"),
    ],
)
def test_invalid_currency_or_rate_is_refused(peagle, flags, reason):
    assert reason in peagle("cost", "runs/serve", *flags, code=2)


def test_nodes_usd_per_hour_is_overhead(peagle):
    arguments = ("cost", "runs/serve", "runs/nightly", "--format", "json", "--nodes-usd-per-hour", "0.5")
    rows = {row["run"]: row["usd"] for row in json.loads(peagle(*arguments))["rows"]}
    nodes = rows["head and CPU nodes"]
    assert nodes["overhead"] == nodes["total"] == 0.5 * (4 + 10)  # the endpoint ran for 4 h, the bulk run for 10 h
    assert "positive" in peagle(*arguments[:-1], "-1", code=2)
