"""Do not wait for counters; use an empty PEAGLE_HOME."""

import pytest
from config_only import measure_at_once


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    measure_at_once(monkeypatch)
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
