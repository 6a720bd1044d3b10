import json

import pytest

from jobs import cli


def test_prices_have_date_and_source(capsys):
    assert cli.run(["prices", "H100"]) == 0
    output = capsys.readouterr().out
    line = next(line for line in output.splitlines() if line.startswith("p5.48xlarge") and "us-east-1" in line)
    assert "8 x H100" in line
    assert "55.0400" in line
    assert "2026-11-21" in line
    assert "[1] skypilot-org/skypilot-catalog" in output
    assert "L4" not in output


def test_prices_filter_and_full_table(capsys, tmp_path):
    assert cli.run(["prices", "c7a.large", "--json", str(tmp_path / "one.json")]) == 0
    assert cli.run(["prices", "--json", str(tmp_path / "all.json")]) == 0
    filtered, all_prices = (json.loads((tmp_path / name).read_text())["prices"] for name in ("one.json", "all.json"))
    assert {offer["instance_type"] for offer in filtered} == {"c7a.large"}
    assert len(all_prices) > 80


def test_prices_from_a_file_are_listed(capsys, tmp_path):
    csv_file = tmp_path / "own.csv"
    csv_file.write_text("instance_type,accelerator,accelerator_count,usd_per_hour_on_demand\nmine,B300,8,40\n")
    assert cli.run(["prices", "B300", "--prices", str(csv_file)]) == 0
    output = capsys.readouterr().out
    assert "mine" in output
    assert "own.csv" in output


@pytest.mark.parametrize(("name", "suggestion"), [("H1000", "H100"), ("p5.48xlrge", "p5.48xlarge")])
def test_unknown_name_suggests_the_nearest(capsys, name, suggestion):
    assert cli.run(["prices", name]) != 0
    assert f"did you mean {suggestion}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["prices", "--renew", "clone"], "--renew was removed: run `python benchmarks/prices/renew.py CLONE`"),
        (["cost", "runs", "--format", "md"], "'md' was removed: use --format table"),
        (["generate", "--market", "reserved"], "market: 'reserved' was removed: state the price"),
    ],
)
def test_error_for_a_removed_option_names_its_replacement(capsys, command, message):
    try:
        code = cli.run(command)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err
