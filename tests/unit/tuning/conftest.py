"""Do not wait for counters; use an empty PEAGLE_HOME."""

import pytest
from config_only import skip_waiting


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    skip_waiting(monkeypatch)
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
