import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from jobs import cli
from peagle.economics.ledger import append_request
from pipelines.online.gateway.keys import find, read_keys
from tests.unit.pipelines.online.ledgers import make_request_usage

LAST_OF_DECEMBER = datetime(2026, 12, 31, 23, 59, tzinfo=UTC)


def test_keys_can_be_added_listed_and_revoked(tmp_path, capsys):
    path = str(tmp_path / "keys.json")
    assert cli.run(["serve", "keys", "add", "alice", "--keys", path, "--requests-per-min", "60"]) == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith("pk-")
    assert cli.run(["serve", "keys", "list", "--keys", path]) == 0
    assert capsys.readouterr().out.strip() == "alice  requests_per_min=60"
    assert cli.run(["serve", "keys", "add", "alice", "--keys", path]) == 2
    assert cli.run(["serve", "keys", "revoke", "alcie", "--keys", path]) == 2
    assert "did you mean alice?" in capsys.readouterr().err
    assert cli.run(["serve", "keys", "revoke", "alice", "--keys", path]) == 0
    assert json.loads((tmp_path / "keys.json").read_text()) == []


def test_concurrently_added_keys_are_all_kept(tmp_path):
    path = str(tmp_path / "keys.json")

    def add(number):
        return cli.run(["serve", "keys", "add", f"key{number}", "--keys", path])

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(add, range(24))) == {0}
    assert len(json.loads((tmp_path / "keys.json").read_text())) == 24


def test_key_expiry_is_listed(tmp_path, capsys, monkeypatch):
    path = str(tmp_path / "keys.json")

    def add(*arguments):
        return cli.run(["serve", "keys", "add", *arguments, "--keys", path])

    monkeypatch.setattr("jobs.serve_keys.time", SimpleNamespace(time=lambda: 1_800_000_000.0))
    assert add("a", "--expires-in-days", "0.5", "--max-parallel-requests", "4") == 0
    assert add("b", "--expires-at", "2027-02-01") == 0
    assert add("c", "--expires-at", "2027-02-01T12:00+01:00") == 0
    monkeypatch.setattr("pipelines.online.gateway.keys.time.time", lambda: 1_800_100_000.0)
    capsys.readouterr()
    assert cli.run(["serve", "keys", "list", "--keys", path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a  max_parallel_requests=4  expires_at=2027-01-15T20:00:00Z  expired",
        "b  expires_at=2027-02-01T00:00:00Z",
        "c  expires_at=2027-02-01T11:00:00Z",
    ]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--expires-in-days", "0", "not a valid expiry time"),
        ("--expires-in-days", "nan", "not a valid expiry time"),
        ("--expires-in-days", "inf", "not a valid expiry time"),
        ("--expires-at", "2020-01-01", "not a valid expiry time"),
        ("--expires-at", "tomorrow", "not a valid time"),
        ("--max-parallel-requests", "0", "max_parallel_requests"),
    ],
)
def test_invalid_expiry_is_refused(tmp_path, capsys, flag, value, message):
    path = tmp_path / "keys.json"
    assert cli.run(["serve", "keys", "add", "alice", "--keys", str(path), flag, value]) == 2
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_expiry_options_exclude_each_other(tmp_path):
    with pytest.raises(SystemExit):
        cli.run(["serve", "keys", "add", "a", "--expires-in-days", "1", "--expires-at", "2099-01-01"])


def test_tags_of_keys_are_stored_and_listed(tmp_path, capsys):
    path = str(tmp_path / "keys.json")
    flags = ["--tag", "team=search", "--tag", "project=x", "--request-tag", "run"]
    assert cli.run(["serve", "keys", "add", "alice", *flags, "--keys", path]) == 0
    (record,) = json.loads((tmp_path / "keys.json").read_text())
    assert (record["tags"], record["request_tags"]) == ({"team": "search", "project": "x"}, ["run"])
    capsys.readouterr()
    assert cli.run(["serve", "keys", "list", "--keys", path]) == 0
    assert capsys.readouterr().out.strip() == "alice  request_tags=('run',)  tag team=search  tag project=x"
    assert cli.run(["serve", "keys", "add", "bob", "--tag", "team", "--keys", path]) == 2
    assert "not KEY=VALUE" in capsys.readouterr().err


def test_set_changes_limits_and_rotate_replaces_the_key(tmp_path, capsys):
    file = tmp_path / "keys.json"

    def keys(*arguments, code=0):
        assert cli.run(["serve", "keys", *arguments, "--keys", str(file)]) == code
        return capsys.readouterr()

    old_key = keys("add", "alice", "--budget-usd", "5", "--requests-per-min", "60", "--operator").out.strip()
    (before,) = json.loads(file.read_text())
    listed = keys("set", "alice", "--budget-usd", "20", "--without", "requests-per-min", "--without", "operator").out
    assert listed.strip() == "alice  budget_usd=20.0"
    new_key = keys("rotate", "alice").out.strip()
    (after,) = read_keys(file)
    assert (find(old_key, [after]), find(new_key, [after])) == (None, after)
    assert (after.budget_usd, after.requests_per_min, after.is_operator) == (20.0, None, False)
    assert after.created_at == before["created_at"]  # so earlier spending of the key still counts
    assert "did you mean alice" in keys("rotate", "alcie", code=2).err
    assert "budget_usd" in keys("set", "alice", "--budget-usd", "-1", code=2).err
    assert read_keys(file) == (after,)


def test_list_shows_spending(tmp_path, capsys, monkeypatch):
    file = str(tmp_path / "keys.json")
    monkeypatch.setattr("peagle.economics.spending.datetime", SimpleNamespace(now=lambda zone: LAST_OF_DECEMBER))
    for name, *flags in (("alice", "--budget-usd", "5", "--every", "month"), ("bob", "--budget-usd", "5"), ("carol",)):
        assert cli.run(["serve", "keys", "add", name, *flags, "--keys", file]) == 0
    (tmp_path / "ledger").mkdir()
    for record in read_keys(tmp_path / "keys.json"):
        for month, day, usd in ((11, 30, 3.0), (12, 1, 1.5)):
            finished_at = datetime(2026, month, day, 12, tzinfo=UTC).timestamp()
            request = make_request_usage(
                f"{record.name}-{month}", account=record.account, usd=usd, started_at=1.0, finished_at=finished_at
            )
            append_request(tmp_path / "ledger", request)
    capsys.readouterr()
    assert cli.run(["serve", "keys", "list", "--keys", file, "--state", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "alice  budget_usd=5.0  budget_every=month  spent_usd=1.5  left_usd=3.5  used=0.3  reset=2027-01-01",
        "bob  budget_usd=5.0  spent_usd=4.5  left_usd=0.5  used=0.9  alert=0.8",
        "carol  spent_usd=4.5",
    ]
    assert cli.run(["serve", "keys", "list", "--keys", file, "--state", str(tmp_path / "no")]) == 2
