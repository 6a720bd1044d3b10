import pytest


@pytest.fixture(autouse=True)
def peagle_home(tmp_path, monkeypatch):
    """An empty PEAGLE_HOME, without the developer's cards and targets."""
    home = tmp_path / "home"
    monkeypatch.setenv("PEAGLE_HOME", str(home))
    return home
