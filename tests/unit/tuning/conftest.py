"""No waiting for counters; a home of each test's own."""

from pathlib import Path

import pytest
from config_only import measure_at_once


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measure_at_once(monkeypatch)
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
