"""Start the engine that a spec describes on this node, inside this process; or this node's part of one.

It knows the node and vLLM; it resolves no names (the spec holds folders or hub ids) and knows nothing of Ray.
"""

import os
from typing import Any

from peagle.engine import vllm_plugin
from peagle.engine.arguments import engine_args
from peagle.engine.environment import set_environment
from peagle.engine.ranks import NodeRank, follow
from peagle.engine.spec import EngineSpec
from peagle.engine.vllm_engine import VllmEngine, has_request_metrics, has_synthetic_acceptance
from peagle.errors import ConfigError
from peagle.hardware import Hardware


def start_engine(
    spec: EngineSpec,
    hardware: Hardware,
    *,
    engine_index: int = 0,
    num_engines_on_node: int = 1,
    node_rank: NodeRank | None = None,
) -> VllmEngine:
    """Start vLLM, with the variables in this process's environment that it must start with.

    Args:
        node_rank: the leader's, of an engine on several nodes; it starts when the others follow.

    Raises:
        EngineError: vLLM does not start.
        ConfigError: the hardware cannot run the spec.
    """
    return VllmEngine(_prepare(spec, hardware, engine_index, num_engines_on_node, node_rank))


def follow_engine(
    spec: EngineSpec, hardware: Hardware, *, engine_index: int, num_engines_on_node: int, node_rank: NodeRank
) -> None:
    """Compute this node's ranks of an engine that another node leads, as `follow` says."""
    follow(_prepare(spec, hardware, engine_index, num_engines_on_node, node_rank))


def _prepare(
    spec: EngineSpec, hardware: Hardware, engine_index: int, num_engines_on_node: int, node_rank: NodeRank | None
) -> dict[str, Any]:
    """Set the environment, and make vLLM's arguments."""
    assert (node_rank is not None) == (spec.num_nodes > 1), "each node of several has its rank"
    set_environment(spec, hardware, engine_index=engine_index, num_engines_on_node=num_engines_on_node)
    if spec.drafter and spec.drafter.synthetic_rates and not has_synthetic_acceptance():
        raise ConfigError("this vLLM cannot accept drafts by lot", hint="vLLM 0.24 and later can; or leave it out")
    if spec.drafter and hardware.platform == "cpu":
        vllm_plugin.require()
    arguments = engine_args(
        spec, hardware, num_engines_on_node=num_engines_on_node, request_metrics=has_request_metrics()
    )
    if node_rank is None:
        return arguments
    os.environ |= node_rank.environment()
    return arguments | node_rank.arguments(spec.num_nodes)
