"""An engine with ranks on several nodes: each node's arguments and followers.

The first node leads: requests go to it, and there vLLM schedules. The others follow until their ranks end. It knows
vLLM; it does not know how nodes are found or started.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peagle.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRank:
    """A node's place in an engine.

    Attributes:
        number: 0 leads.
        host: the address of this node, under which the others reach it.
        leader: the leader's address, and a port that is free there: the ranks meet at it.
    """

    number: int
    host: str
    leader: tuple[str, int]

    def arguments(self, num_nodes: int) -> dict[str, Any]:
        """Additions to `engine_args`.

        vLLM 0.29's Ray executor knows no CPUs, so each node starts its own ranks.
        """
        address, port = self.leader
        return {
            "distributed_executor_backend": "mp",
            "nnodes": num_nodes,
            "node_rank": self.number,
            "master_addr": address,
            "master_port": port,
        }

    def environment(self) -> dict[str, str]:
        """Additions to `environment`.

        vLLM would guess the address by a route to the internet.
        """
        return {"VLLM_HOST_IP": self.host}


def follow(arguments: Mapping[str, Any]) -> None:
    """Compute this node's ranks until one of them ends.

    They may not notice that the leader has ended.

    It is what `vllm serve --headless` does.

    Raises:
        EngineError: they do not start.
    """
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    try:
        config = AsyncEngineArgs(**arguments).create_engine_config(
            usage_context=UsageContext.ENGINE_CONTEXT, headless=True
        )
        executor = MultiprocExecutor(config, monitor_workers=False)
    except Exception as error:  # vLLM raises whatever its parts raise
        raise EngineError(f"vLLM did not start: {error}") from error
    executor.start_worker_monitor(inline=True)
