"""Tests of an engine that spans several nodes: the leader and its followers, with fake Ray actors."""

import importlib
import queue
import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from peagle.engine.arguments import NodeRank
from peagle.engine.spec import EngineSpec
from peagle.errors import EngineError
from peagle.runs.directory import RunDirectory
from pipelines.batch import multinode
from pipelines.batch.multinode import Follower, Followers

WAIT_S = 20
RESOURCES_PER_NODE = {"CPU": 1.0}


def engine_run(run_dir="run"):
    return SimpleNamespace(
        directory=RunDirectory(run_dir),
        slot_group_name="group",
        spec=EngineSpec(model="m", tensor_parallel_size=3, num_nodes=3),
        placement=SimpleNamespace(num_engines_on_node=1, resources_per_node=RESOURCES_PER_NODE),
    )


class Cluster:
    """Two fake follower actors. `end_second_follower` ends one; `killed` counts kills of the leader's children."""

    def __init__(self, monkeypatch):
        self.joined, self.killed, self.all_followers = [], threading.Semaphore(0), []
        self._error, self._has_ended = None, threading.Event()
        actors = [SimpleNamespace(remote=self._start) for _ in range(2)]
        monkeypatch.setattr(multinode, "_follower_classes", lambda resources_per_node, count: actors[:count])
        monkeypatch.setattr(multinode, "_own_address", lambda: "10.0.0.1")
        monkeypatch.setattr(multinode, "_POLL_S", 0.01)
        monkeypatch.setattr("ray.wait", self._wait)
        monkeypatch.setattr("ray.get", self._get)
        monkeypatch.setattr("peagle.engine.vllm.kill_children", self.killed.release)

    def _start(self, run, session_id, number):
        def remote(leader):
            self.joined.append((number, leader))
            return number

        return SimpleNamespace(follow=SimpleNamespace(remote=remote))

    def start_followers(self):
        self.all_followers.append(Followers(engine_run(), "session"))
        return self.all_followers[-1]

    def join(self):
        """End the watching threads. After the test, they would call the real `ray.get` and connect to a Ray cluster."""
        self._has_ended.set()
        for followers in self.all_followers:
            followers.set_started(lambda _: None)
            for thread in threading.enumerate():
                if getattr(thread, "_target", None) == followers._watch:
                    thread.join(WAIT_S)

    def end_second_follower(self, error=None):
        self._error = error
        self._has_ended.set()

    def _wait(self, follows, num_returns):
        self._has_ended.wait(WAIT_S)
        return follows[1:], follows[:1]

    def _get(self, ended):
        assert ended == [2]
        if self._error is not None:
            raise self._error


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster(monkeypatch)
    yield cluster
    cluster.join()


def test_followers_get_the_leaders_address(cluster):
    followers = cluster.start_followers()
    assert followers.rank == NodeRank(number=0, host="10.0.0.1", leader=followers.rank.leader)
    assert cluster.joined == [(1, followers.rank.leader), (2, followers.rank.leader)]
    assert followers.rank.leader[0] == "10.0.0.1"
    assert 1024 <= followers.rank.leader[1] < 65536


@pytest.mark.parametrize(
    ("error", "message", "is_lost"),
    [
        (None, "the engine's ranks on node 2 ended", False),
        (ActorDiedError(), "the engine's ranks on node 2 ended: The actor died unexpectedly before", True),
        (EngineError("vLLM did not start: no memory"), "vLLM did not start: no memory", False),
    ],
)
def test_leader_learns_why_a_follower_ended(cluster, error, message, is_lost):
    errors = queue.Queue()
    followers = cluster.start_followers()
    followers.set_started(errors.put)
    assert followers.failure is None
    cluster.end_second_follower(error)
    assert errors.get(timeout=WAIT_S).startswith(message)
    assert followers.is_lost == is_lost


def test_start_is_aborted_when_a_follower_ends(cluster):
    followers = cluster.start_followers()
    cluster.end_second_follower(EngineError("vLLM did not start: no memory"))
    for _ in range(3):  # kills are repeated, because vLLM might not have started its processes yet
        assert cluster.killed.acquire(timeout=WAIT_S)
    assert followers.failure.message == "vLLM did not start: no memory"


def test_released_followers_do_not_end_the_engine(cluster):
    errors = []
    followers = cluster.start_followers()
    followers.set_started(errors.append)
    followers.release()
    watch = next(thread for thread in threading.enumerate() if getattr(thread, "_target", None) == followers._watch)
    cluster.end_second_follower()
    watch.join(WAIT_S)
    assert (watch.is_alive(), errors) == (False, [])


@pytest.mark.parametrize("is_restarted", [True, False])
def test_placement_group_is_on_other_nodes_and_replaced_after_a_restart(monkeypatch, is_restarted):
    removed = []
    context = SimpleNamespace(
        get_actor_id=lambda: "a1", get_node_id=lambda: "n1", was_current_actor_reconstructed=is_restarted
    )
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    # `import_module`, because `ray.util.placement_group` is also the name of a function.
    module = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(module, "get_placement_group", lambda name: f"group {name}")
    monkeypatch.setattr(module, "remove_placement_group", removed.append)
    monkeypatch.setattr(module, "placement_group", lambda bundles, **options: (bundles, options))
    bundles, options = multinode._placement_group(RESOURCES_PER_NODE, 2)
    assert removed == (["group peagle-a1"] if is_restarted else [])
    assert bundles == [RESOURCES_PER_NODE, RESOURCES_PER_NODE]
    assert (options["strategy"], options["name"]) == ("STRICT_SPREAD", "peagle-a1")
    assert options["bundle_label_selector"] == [{"ray.io/node-id": "!n1"}] * 2


def test_follower_claims_a_slot_and_reports_its_log(monkeypatch, tmp_path):
    follow_options, logs = {}, []

    def follow(spec, **options):
        follow_options.update(options)
        logs[0].write_text("(Worker_TP1 pid=7) ERROR 11-21 11:36:04 [core.py:1374] ValueError: no memory\n")
        raise EngineError("vLLM did not start: its worker ended")

    def redirect(log):
        log.parent.mkdir(parents=True)
        logs.append(log)

    monkeypatch.setattr(multinode, "redirect_output", redirect)
    monkeypatch.setattr(multinode, "claim_slot", lambda slot_group: 3)
    monkeypatch.setattr(multinode, "_own_address", lambda: "10.0.0.2")
    monkeypatch.setattr(multinode, "run_follower_ranks", follow)
    follower = Follower(engine_run(tmp_path), "session", 2)
    with pytest.raises(EngineError, match="vLLM did not start: ValueError: no memory"):
        follower.follow(("10.0.0.1", 4000))
    assert logs == [tmp_path / "logs" / "engine-session-node-2.log"]
    assert follow_options == {
        "engine_index": 3,
        "num_engines_on_node": 1,
        "node_rank": NodeRank(number=2, host="10.0.0.2", leader=("10.0.0.1", 4000)),
    }
