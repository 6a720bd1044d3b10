"""An engine with ranks on several nodes: what vLLM is told on each.

The first node leads: requests go to it, and there vLLM schedules. The others follow until their ranks end
(`vllm_internals.follow`). It does not know how nodes are found or started.
"""

from dataclasses import dataclass
from typing import Any


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
