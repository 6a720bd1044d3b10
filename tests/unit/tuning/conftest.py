"""Tests of tuning skip waiting times and use an empty PEAGLE_HOME."""

import pytest
from config_only import skip_waiting


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch, tmp_path):
    skip_waiting(monkeypatch)
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
