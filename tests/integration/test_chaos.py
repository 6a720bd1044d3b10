"""Short versions of `make chaos`: kills of a node, an engine and the driver, and drivers that pause."""

import pytest

from peagle import hardware
from tests.chaos import pauses
from tests.chaos.driver import Job
from tests.chaos.play import Player
from tests.chaos.ray_nodes import RayNodes
from tests.chaos.schedule import Kill

pytestmark = pytest.mark.timeout(300)


@pytest.mark.soak
def test_run_is_complete_after_kills_of_node_engine_and_driver(tmp_path):
    flags = ("--engines", "2", "--rows-per-unit", "4", "--max-num-seqs", "4")
    job = Job(folder=tmp_path / "job", num_rows=120, is_fake=True, flags=(*flags, "--heartbeat-s", "0.5"))
    kills = [Kill(kind=kind, after_units=1, wait_s=0.5, pick=0.0) for kind in ("node", "engine", "driver")]
    with RayNodes(2, max(2, hardware.detect().num_cpus), tmp_path / "ray") as nodes:
        played = Player(job, kills, nodes, limit_s=200, say=print).play()
    assert played.problems == []
    assert [kill.kind for kill in played.kills] == ["node", "engine", "driver"]
    assert played.audit.num_rows == job.num_rows
    assert [attempt.exit_code for attempt in played.attempts] == [-9, 0]


@pytest.mark.parametrize(
    ("scene", "every"),
    [
        ("start", 32),
        pytest.param("continue", 40, marks=pytest.mark.soak),
        pytest.param("retry", 40, marks=pytest.mark.soak),
        pytest.param("retry-alone", 38, marks=pytest.mark.soak),
        pytest.param("finish", 16, marks=pytest.mark.soak),
    ],
)
def test_resumed_driver_does_not_disturb_its_replacement(tmp_path, scene, every):
    result = pauses.run(scene, tmp_path / "plays", ["--every", str(every), "--crossed", "1"])
    assert result["problems"] == []
    assert all(plays["num_plays"] for plays in result["plays"])
    assert all(plays["steps"] for plays in result["plays"])
