import time

import pytest

from jobs import cli
from peagle.economics.ledger import append_request
from tests.unit.pipelines.online.ledgers import make_request_usage


@pytest.fixture
def budgets(tmp_path):
    """Return a function that runs `peagle serve budgets` and returns the exit code."""
    return lambda *arguments: cli.run(["serve", "budgets", *arguments, "--state", str(tmp_path)])


def test_set_list_and_remove_budgets(tmp_path, budgets, capsys):
    assert budgets("list") == 2, "the state folder has no ledger yet"
    assert budgets("set", "team=search", "--budget-usd", "5", "--every", "month") == 0
    assert budgets("set", "endpoint", "--budget-usd", "20") == 0
    now = time.time()
    append_request(
        tmp_path / "ledger", make_request_usage(usd=4, tags='{"team": "search"}', started_at=1.0, finished_at=now)
    )
    capsys.readouterr()
    assert budgets("list") == 0
    search, endpoint = capsys.readouterr().out.splitlines()
    assert search.startswith(
        "team=search  budget_usd=5.0  budget_every=month  spent_usd=4.0  left_usd=1.0  used=0.8  alert=0.8  reset="
    )
    assert endpoint == "endpoint  budget_usd=20.0  spent_usd=0.0  left_usd=20.0  used=0.0"
    assert budgets("remove", "team=serch") == 2
    assert "did you mean team=search?" in capsys.readouterr().err
    assert budgets("remove", "team=search") == 0
    assert budgets("remove", "endpoint") == 0
    capsys.readouterr()
    assert (budgets("list"), capsys.readouterr().out) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [("set",), ("set", "team=search"), ("set", "search", "--budget-usd", "5"), ("set", "a=b", "--budget-usd", "-1"),
     ("list", "--every", "day"), ("remove",)],
)  # fmt: skip
def test_invalid_arguments_are_refused(budgets, arguments):
    assert budgets(*arguments) == 2
