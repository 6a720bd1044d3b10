"""One short run of `make chaos`: a node, an engine and the driver are killed; then the audit."""

import pytest

from peagle import hardware
from tests.chaos.driver import Job
from tests.chaos.play import Player
from tests.chaos.ray_nodes import RayNodes
from tests.chaos.schedule import Kill

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


def test_run_survives_kills_of_node_engine_and_driver(tmp_path):
    flags = ("--engines", "2", "--rows-per-unit", "4", "--max-num-seqs", "4")
    job = Job(folder=tmp_path / "job", num_rows=120, is_fake=True, flags=(*flags, "--heartbeat-s", "0.5"))
    kills = [Kill(kind=kind, after_units=1, wait_s=0.5, pick=0.0) for kind in ("node", "engine", "driver")]
    with RayNodes(2, max(2, hardware.detect().num_cpus), tmp_path / "ray") as nodes:
        played = Player(job, kills, nodes, limit_s=200, say=print).play()
    assert played.problems == []
    assert [kill.kind for kill in played.kills] == ["node", "engine", "driver"]
    assert played.audit.num_rows == job.num_rows
    assert [attempt.exit_code for attempt in played.attempts] == [-9, 0]
