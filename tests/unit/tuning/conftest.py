"""No waiting for counters; a home of each test's own."""

import pytest
from config_only import measure_at_once


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    measure_at_once(monkeypatch)
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
