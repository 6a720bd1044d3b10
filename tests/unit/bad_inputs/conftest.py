"""Compares docs/bad-inputs.md, which has a section for each test module in this folder, with the real results.

With WRITE_DOCS=1 (`make docs-bad-inputs`), the sections are written instead.
"""

import os
import re
import time
from pathlib import Path

import pytest
from devices import MACHINE

from peagle.tables import markdown

PAGE = Path(__file__).parents[3] / "docs" / "bad-inputs.md"
MAX_MESSAGE_LENGTH = 160  # characters that the page shows


@pytest.fixture(scope="module")
def machine():
    """Detect the same small machine everywhere, and fail if a Ray cluster starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.hardware.detect", lambda: MACHINE)
        patch.setattr("pipelines.cluster.ray.ray_cluster", lambda **_: pytest.fail("a cluster was started"))
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield MACHINE
    time.tzset()


@pytest.fixture(scope="session")
def format_message():
    """Return a function that formats the first line of a message as code, as the page shows it."""

    def format_first_line(message):
        line = message.splitlines()[0]
        return f"``{line if len(line) <= MAX_MESSAGE_LENGTH else line[: MAX_MESSAGE_LENGTH - 3] + '...'}``"

    return format_first_line


@pytest.fixture(scope="session")
def check_section():
    """Return a function that compares a section of the page with a table of these rows, or writes it."""

    def check(heading, rows):
        page = PAGE.read_text()
        section = f"## {heading}\n\n" + "\n".join(markdown(rows)) + "\n"
        pattern = re.compile(rf"## {re.escape(heading)}\n.*?(?=\n## |\Z)", re.DOTALL)
        assert pattern.search(page), f"{PAGE.name} has no section {heading!r}"
        updated = pattern.sub(lambda _: section, page)
        if os.environ.get("WRITE_DOCS"):
            PAGE.write_text(updated)
        assert PAGE.read_text() == updated, "docs/bad-inputs.md is out of date: make docs-bad-inputs"

    return check
