import contextlib
import os

import pytest

from peagle.errors import CapacityError
from pipelines.cluster import ray
from pipelines.cluster.connection import connection


@pytest.fixture
def events(monkeypatch):
    """What is done to Ray."""
    done = []

    @contextlib.contextmanager
    def ray_cluster(**_):
        done.append("up")
        yield
        done.append("down")

    monkeypatch.setattr(ray, "ray_cluster", ray_cluster)
    monkeypatch.setattr("pipelines.cluster.connection.require_startable", lambda: done.append("could start"))
    monkeypatch.setattr(ray, "release_nodes", lambda: done.append("nodes released"))
    return done


def test_a_cluster_that_runs_is_joined_before_anything_is_decided(monkeypatch, events):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with connection() as cluster:
        cluster.prepare()
        assert events == ["up"]
        cluster.start()
    assert events == ["up", "nodes released", "down"]


def test_a_cluster_on_this_machine_is_started_only_when_it_is_needed(monkeypatch, events):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with connection() as cluster:
        cluster.prepare()
    assert events == ["could start"]
    with connection() as cluster:
        cluster.start()
        cluster.close()
        assert events == ["could start", "up", "nodes released", "down"]
    assert events == ["could start", "up", "nodes released", "down"]


def test_standard_error_is_in_the_log_until_the_connection_ends(monkeypatch, events, tmp_path, capfd):
    def fail(**_):
        os.write(2, b"of Ray\n")
        raise CapacityError("Ray did not start here")

    monkeypatch.setattr(ray, "ray_cluster", fail)
    log = tmp_path / "driver.log"
    with connection() as cluster:
        os.write(2, b"before\n")
        cluster.log_to(log)
        with pytest.raises(CapacityError):
            cluster.start()
    os.write(2, b"after\n")
    assert log.read_text() == "before\nof Ray\n"
    assert capfd.readouterr().err == "after\n"
