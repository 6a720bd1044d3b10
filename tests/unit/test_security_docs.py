"""Each promise of docs/security.md names existing tests."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_named_tests_exist():
    text = (ROOT / "docs" / "security.md").read_text()
    named_tests = set(re.findall(r"`(test_\w+)`", text))
    existing_tests = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        existing_tests |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    assert len(named_tests) > 20
    assert named_tests - existing_tests == set()


def test_every_promise_names_a_test():
    table = (ROOT / "docs" / "security.md").read_text().split("| promise | shown by |")[1].split("\n\n")[0]
    rows = table.splitlines()[2:]
    assert [row for row in rows if "`test_" not in row] == []
