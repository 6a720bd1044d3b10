"""Place, start and watch the ranks of an engine that are on other nodes.

The engine's actor (`worker.py`) is the leader. It starts a follower, also an actor, on every other node. They all end
together: Ray ends the followers when the leader's process ends, and the leader ends when a follower ends. vLLM's
arguments are in `peagle/engine/arguments.py`.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from peagle.engine.arguments import NodeRank
from peagle.errors import EngineError, PeagleError
from peagle.ports import free_port
from peagle.private import restrict_new_files
from peagle.runs.logs import copy_log
from pipelines.batch.resolve import ResolvedRun
from pipelines.cluster.failures import to_peagle_error
from pipelines.cluster.node import claim_slot, redirect_output, run_follower_ranks

_POLL_S = 1.0
_REPORT_INTERVAL_S = 60.0
_NODE_ID = "ray.io/node-id"
_LOGS_HINT = "the run's logs/ folder has a log of each node"


class Follower:
    """The ranks of an engine on one node other than the leader's.

    Args:
        session_id: session id of the engine, used in the log's name.
        number: number of the node within the engine, from 1.
    """

    def __init__(self, run: ResolvedRun, session_id: str, number: int) -> None:
        restrict_new_files()
        self._run, self._number = run, number
        self._log = run.directory.logs / f"engine-{session_id}-node-{number}.log"
        redirect_output(self._log)
        self._slot = claim_slot(run.slot_group_name)

    def follow(self, leader: tuple[str, int]) -> None:
        """Run the ranks until they end.

        Raises:
            EngineError: the ranks do not start.
        """
        from peagle.engine.vllm_internals import with_root_cause

        with copy_log(self._run.directory.root, self._log, self._log.name):
            try:
                run_follower_ranks(
                    self._run.spec,
                    engine_index=self._slot,
                    num_engines_on_node=self._run.placement.num_engines_on_node,
                    node_rank=NodeRank(number=self._number, host=_own_address(), leader=leader),
                )
            except EngineError as error:
                raise with_root_cause(error, self._log.read_text(errors="replace")) from error


class Followers:
    """The followers of the engine that this actor leads. The constructor starts them.

    If a follower ends while the engine starts, the start is aborted, because vLLM would wait for the follower.

    Attributes:
        rank: rank of this node.
        failure: why a follower ended (the first one that did); None while all followers are running.
        is_lost: whether that follower ended without an error, because its process or node is gone.
    """

    def __init__(self, run: ResolvedRun, session_id: str) -> None:
        self.failure: PeagleError | None = None
        self.is_lost = False
        self._die: Callable[[str], object] = lambda _: None
        self._has_started = threading.Event()
        actors = _follower_classes(run.placement.resources_per_node, run.spec.num_nodes - 1)
        leader = (_own_address(), free_port(""))
        self.rank = NodeRank(number=0, host=leader[0], leader=leader)
        # Ray ends an actor that nothing references.
        self._followers = [actor.remote(run, session_id, number) for number, actor in enumerate(actors, 1)]
        self._follow_calls = [follower.follow.remote(leader) for follower in self._followers]
        threading.Thread(target=self._watch, daemon=True).start()

    def set_started(self, die: Callable[[str], object]) -> None:
        """Record that the engine has started. From now on, `die` is called with the reason if a follower ends."""
        self._die = die
        self._has_started.set()

    def release(self) -> None:
        """Ignore the end of followers from now on, because the engine shuts down normally."""
        self._die = lambda _: None

    def _watch(self) -> None:
        from peagle.engine.vllm import kill_children

        self.failure = self._wait_for_end()
        while not self._has_started.wait(_POLL_S):
            kill_children()
        self._die(self.failure.message)

    def _wait_for_end(self) -> PeagleError:
        """Wait until a follower ends, and return why."""
        import ray

        ended, _ = ray.wait(self._follow_calls, num_returns=1)
        message = f"the engine's ranks on node {self._follow_calls.index(ended[0]) + 1} ended"
        try:
            ray.get(ended)
        except Exception as error:  # raised by the follower, or by Ray if the follower's process or node is gone
            self.is_lost = isinstance(error, ray.exceptions.RayActorError)
            return to_peagle_error(error, message, hint=_LOGS_HINT, otherwise=EngineError)
        return EngineError(message, hint=_LOGS_HINT)


def _follower_classes(resources_per_node: Mapping[str, float], count: int) -> list[Any]:
    """Wait for room on `count` other nodes, and return a `Follower` actor class for each."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = _placement_group(resources_per_node, count)
    while not group.wait(_REPORT_INTERVAL_S):
        sys.stderr.write(f"peagle: waiting for {count} other node(s) with {dict(resources_per_node)} free on each\n")
    return [
        ray.remote(Follower).options(
            num_cpus=resources_per_node["CPU"],
            num_gpus=resources_per_node.get("GPU"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        for index in range(count)
    ]


def _placement_group(resources_per_node: Mapping[str, float], count: int) -> Any:
    """Return a placement group on nodes other than this one. It ends with this actor."""
    import ray
    from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group

    context = ray.get_runtime_context()
    name = f"peagle-{context.get_actor_id()}"
    if context.was_current_actor_reconstructed:  # Ray 2.60 keeps the group of a process that it replaces
        with contextlib.suppress(ValueError):  # the replaced process had no group yet
            remove_placement_group(get_placement_group(name))
    return placement_group(
        [dict(resources_per_node)] * count,
        strategy="STRICT_SPREAD",
        name=name,
        bundle_label_selector=[{_NODE_ID: f"!{context.get_node_id()}"}] * count,
    )


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
