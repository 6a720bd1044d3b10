"""Start the engine that a spec describes on this node, inside this process.

It knows the node and vLLM; it resolves no names (the spec holds folders or hub ids) and knows nothing of Ray.
"""

import os

from peagle.engine.arguments import engine_args
from peagle.engine.environment import environment
from peagle.engine.spec import EngineSpec
from peagle.engine.vllm_engine import VllmEngine, has_request_metrics, has_synthetic_acceptance
from peagle.errors import ConfigError
from peagle.hardware import Hardware


def start_engine(
    spec: EngineSpec, hardware: Hardware, *, engine_index: int = 0, num_engines_on_node: int = 1
) -> VllmEngine:
    """Start vLLM, with the variables in this process's environment that it must start with.

    Raises:
        EngineError: vLLM does not start.
        ConfigError: the hardware cannot run the spec.
    """
    os.environ |= environment(spec, hardware, engine_index=engine_index, num_engines_on_node=num_engines_on_node)
    if spec.drafter and spec.drafter.synthetic_rates and not has_synthetic_acceptance():
        raise ConfigError("this vLLM cannot accept drafts by lot", hint="vLLM 0.24 and later can; or leave it out")
    arguments = engine_args(
        spec, hardware, num_engines_on_node=num_engines_on_node, request_metrics=has_request_metrics()
    )
    return VllmEngine(arguments)
