import inspect
from dataclasses import replace

import pytest
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import DeploymentSchema

from peagle.engine.spec import EngineSpec
from peagle.errors import ConfigError
from peagle.hardware import Hardware
from pipelines.online.config import ServedModelKeys
from pipelines.online.serve.deployment import RequestCounts, Sizes, check_parsers, deployment_config, make_llm_config
from pipelines.online.serve.routing import PrefixRouter

CPU = Hardware(platform="cpu", memory_gib=16, free_memory_gib=12, num_cpus=2)


def sizes(max_replicas=1, queued=8):
    return Sizes(
        counts=RequestCounts(target=5.6, admitted=9, queued=queued),
        min_replicas=0,
        max_replicas=max_replicas,
        upscale_delay_s=10,
        downscale_delay_s=300,
        drain_s=60,
        stream_interval_ms=50,
        stream_pieces_per_s=40,
        num_cpus=1.0,
    )


def options(max_replicas=1, queued=8, on_gpu=False, **spec):
    return deployment_config(EngineSpec(model="m", **spec), sizes(max_replicas, queued), on_gpu=on_gpu)


def test_generation_config_of_the_model_is_ignored():
    config = make_llm_config("m", EngineSpec(model="m"), CPU, sizes(), num_engines_on_node=1, parsers={})
    assert config.engine_kwargs["generation_config"] == "vllm"


@pytest.mark.parametrize(("lends", "policy"), [(False, None), (True, "priority")])
def test_lending_engine_schedules_by_priority(lends, policy):
    lending = replace(sizes(), lends=lends)
    config = make_llm_config("m", EngineSpec(model="m"), CPU, lending, num_engines_on_node=1, parsers={})
    assert config.engine_kwargs.get("scheduling_policy") == policy


def test_grammar_backend_is_fixed():
    """If this fails, vLLM issue 43920 is fixed."""
    from vllm.config import StructuredOutputsConfig
    from vllm.v1.structured_output import StructuredOutputManager

    first = inspect.getsource(StructuredOutputManager.grammar_init).partition("if self.backend is None:")[2]
    assert "backend = request.sampling_params.structured_outputs._backend" in first

    config = make_llm_config("m", EngineSpec(model="m"), CPU, sizes(), num_engines_on_node=1, parsers={})
    assert StructuredOutputsConfig(**config.engine_kwargs["structured_outputs_config"]).backend == "xgrammar"


@pytest.mark.parametrize("max_replicas", [1, 3])
def test_serve_accepts_the_options(max_replicas):
    schema = DeploymentSchema(name="m", **options(max_replicas))
    assert schema.autoscaling_config["target_ongoing_requests"] == 5.6


def test_scaling_to_zero_starts_with_one():
    scaling = options()["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["initial_replicas"]) == (0, 1)


def test_prefix_router_needs_several_engines():
    assert "request_router_config" not in options()
    assert "request_router_config" not in options(3, enable_prefix_caching=False)
    router = options(3)["request_router_config"]
    assert RequestRouterConfig(**router).get_request_router_class() is PrefixRouter
    assert router["request_router_kwargs"]["most_ahead"] == 2


def test_cpu_engine_uses_only_its_bundle():
    assert options()["ray_actor_options"] == {"num_cpus": 0}
    assert options(queued=0)["max_queued_requests"] == 1


def test_parser_arguments():
    keys = ServedModelKeys(tool_call_parser="hermes", reasoning_parser="qwen3")
    assert keys.parsers == {
        "enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3",
    }  # fmt: skip
    check_parsers(keys.parsers)
    assert ServedModelKeys().parsers == {}


@pytest.mark.parametrize("key", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parser_is_refused(key):
    with pytest.raises(ConfigError, match=f"{key} 'hermess': vLLM does not have this parser") as info:
        check_parsers(ServedModelKeys(**{key: "hermess"}).parsers)
    assert "qwen3" in info.value.hint


def test_rays_defaults_that_we_replace():
    """If this fails, Ray has changed the defaults that we replace."""
    from ray.llm._internal.serve import constants

    assert constants.DEFAULT_MAX_ONGOING_REQUESTS == constants.DEFAULT_MAX_TARGET_ONGOING_REQUESTS == 10**9
    assert constants.MODEL_RESPONSE_BATCH_TIMEOUT_MS == 50
