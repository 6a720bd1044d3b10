import contextlib
import os

import pytest

from peagle.errors import CapacityError
from pipelines.cluster import ray
from pipelines.cluster.connection import connection


@pytest.fixture
def events(monkeypatch):
    """The calls to Ray, in order."""
    calls = []

    @contextlib.contextmanager
    def ray_cluster(**_):
        calls.append("up")
        yield
        calls.append("down")

    monkeypatch.setattr(ray, "ray_cluster", ray_cluster)
    monkeypatch.setattr("pipelines.cluster.connection.require_startable", lambda: calls.append("start checked"))
    monkeypatch.setattr(ray, "release_nodes", lambda: calls.append("nodes released"))
    return calls


def test_remote_cluster_is_joined_first(monkeypatch, events):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with connection() as cluster:
        cluster.prepare()
        assert events == ["up"]
        cluster.start()
    assert events == ["up", "nodes released", "down"]


def test_local_cluster_is_started_when_needed(monkeypatch, events):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with connection() as cluster:
        cluster.prepare()
    assert events == ["start checked"]
    with connection() as cluster:
        cluster.start()
        cluster.close()
        assert events == ["start checked", "up", "nodes released", "down"]
    assert events == ["start checked", "up", "nodes released", "down"]


def test_standard_error_is_logged_while_connected(monkeypatch, events, tmp_path, capfd):
    def fail(**_):
        os.write(2, b"from Ray\n")
        raise CapacityError("Ray did not start here")

    monkeypatch.setattr(ray, "ray_cluster", fail)
    log = tmp_path / "driver.log"
    with connection() as cluster:
        os.write(2, b"before\n")
        cluster.log_to(log)
        with pytest.raises(CapacityError):
            cluster.start()
    os.write(2, b"after\n")
    assert log.read_text() == "before\nfrom Ray\n"
    assert capfd.readouterr().err == "after\n"
