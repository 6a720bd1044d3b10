import pytest


@pytest.fixture(autouse=True)
def peagle_home(tmp_path, monkeypatch):
    """A home of each test's own, so that a developer's cards and targets do not matter."""
    home = tmp_path / "home"
    monkeypatch.setenv("PEAGLE_HOME", str(home))
    return home
