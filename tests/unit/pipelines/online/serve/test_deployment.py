import inspect
import math

import pytest
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import DeploymentSchema

from peagle.economics.usage import EngineFacts
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.hardware import Hardware
from pipelines.cluster.placement import Placement
from pipelines.online.config import ServedModelOptions
from pipelines.online.serve.deployment import (
    ReplicaJob,
    RequestCounts,
    decode_slots,
    deployment_config,
    make_llm_config,
    pieces_per_s,
    request_counts,
    target_ongoing_requests,
)
from pipelines.online.serve.routing import PrefixRouter

CPU = Hardware(platform="cpu", memory_gib=16, free_memory_gib=12, num_cpus=2)


PLACEMENT = Placement(num_cpus=1.0, num_gpus=0, num_devices=2, device="vcpu", num_engines_on_node=1)
FACTS = EngineFacts(model="m", drafter=None, num_devices=2, device="vcpu", usd_per_device_s=0.01)


def make_job(max_replicas=1, queued=8, lends=False, **spec_fields):
    return ReplicaJob(
        app_id="app", state="state", options=ServedModelOptions(name="m", min_replicas=0, max_replicas=max_replicas),
        spec=EngineSpec(model="m", **spec_fields), engine=FACTS, placement=PLACEMENT,
        counts=RequestCounts(target=5.6, admitted=9, queued=queued), lends=lends,
    )  # fmt: skip


def llm_config(**changes):
    replica_job = make_job(**changes)
    return make_llm_config(replica_job, replica_job.spec, CPU)


def deployment_options(max_replicas=1, queued=8, **spec_fields):
    return deployment_config(make_job(max_replicas, queued, **spec_fields), on_gpu=False)


def test_generation_config_of_the_model_is_ignored():
    assert llm_config().engine_kwargs["generation_config"] == "vllm"


@pytest.mark.parametrize(("lends", "policy"), [(False, None), (True, "priority")])
def test_lending_engine_schedules_by_priority(lends, policy):
    assert llm_config(lends=lends).engine_kwargs.get("scheduling_policy") == policy


def test_grammar_backend_is_always_xgrammar():
    """If the first assertion fails, vLLM issue 43920 is fixed: the first request no longer chooses the backend."""
    from vllm.config import StructuredOutputsConfig
    from vllm.v1.structured_output import StructuredOutputManager

    first_request = inspect.getsource(StructuredOutputManager.grammar_init).partition("if self.backend is None:")[2]
    assert "backend = request.sampling_params.structured_outputs._backend" in first_request
    assert StructuredOutputsConfig(**llm_config().engine_kwargs["structured_outputs_config"]).backend == "xgrammar"


@pytest.mark.parametrize("max_replicas", [1, 3])
def test_ray_serve_accepts_the_deployment_options(max_replicas):
    schema = DeploymentSchema(name="m", **deployment_options(max_replicas))
    assert schema.autoscaling_config["target_ongoing_requests"] == 5.6


def test_scaling_to_zero_starts_with_one():
    scaling = deployment_options()["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["initial_replicas"]) == (0, 1)


def test_prefix_router_needs_several_engines():
    assert "request_router_config" not in deployment_options()
    assert "request_router_config" not in deployment_options(3, enable_prefix_caching=False)
    router = deployment_options(3)["request_router_config"]
    assert RequestRouterConfig(**router).get_request_router_class() is PrefixRouter
    assert router["request_router_kwargs"]["max_ahead"] == 2


def test_cpu_engine_uses_only_its_bundle():
    assert deployment_options()["ray_actor_options"] == {"num_cpus": 0}
    assert deployment_options(queued=0)["max_queued_requests"] == 1


def test_parsers_become_arguments_of_vllm():
    model_options = ServedModelOptions(tool_call_parser="hermes", reasoning_parser="qwen3")
    assert model_options.parser_arguments == {
        "enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3",
    }  # fmt: skip
    assert ServedModelOptions().parser_arguments == {}


def test_rays_defaults_still_need_replacing():
    """If this fails, Ray has changed defaults that peagle overrides."""
    from ray.llm._internal.serve import constants

    assert constants.DEFAULT_MAX_ONGOING_REQUESTS == constants.DEFAULT_MAX_TARGET_ONGOING_REQUESTS == 10**9
    assert constants.MODEL_RESPONSE_BATCH_TIMEOUT_MS == 50


def make_spec(method=None, k=7, **model_options):
    drafter = DrafterSpec(method=method, model="head", num_speculative_tokens=k) if method else None
    return EngineSpec(model="m", drafter=drafter, **model_options)


@pytest.mark.parametrize("slots", [1, 2, 8, 64, 256])
def test_target_leaves_room_for_one_standard_deviation(slots):
    """The number of concurrent requests is assumed to have a Poisson distribution."""
    target = target_ongoing_requests(slots)
    assert target + math.sqrt(target) == pytest.approx(slots)


def test_small_token_budget_per_step_limits_the_slots():
    assert decode_slots(make_spec("peagle", max_num_seqs=256, max_num_batched_tokens=2048), CPU) == 146  # 2048 // 2K
    assert decode_slots(make_spec("eagle3", max_num_seqs=256, max_num_batched_tokens=2048), CPU) == 256
    assert decode_slots(make_spec("peagle", max_num_seqs=256, max_num_batched_tokens=13), CPU) == 1
    assert decode_slots(make_spec("peagle", k=3, max_num_seqs=8), CPU) == 8
    assert decode_slots(make_spec(max_num_seqs=8), CPU) == 8


def test_default_request_counts_follow_slots_and_replicas():
    counts = request_counts(ServedModelOptions(max_replicas=3), make_spec(max_num_seqs=16), CPU)
    assert (counts.admitted, counts.queued) == (18, 48)  # 48 = 16 slots x 3 replicas
    assert request_counts(ServedModelOptions(), make_spec(max_num_seqs=1), CPU).admitted == 2


def test_configured_request_counts_are_used():
    model_options = ServedModelOptions(max_replicas=3, target_ongoing_requests=2.5, max_queued_requests=0)
    counts = request_counts(model_options, make_spec(max_num_seqs=16), CPU)
    assert (counts.target, counts.queued) == (2.5, 0)


def test_pieces_per_second_are_fewer_without_a_gpu():
    shared = Placement(num_cpus=1, num_gpus=0, num_devices=2, device="vcpu", num_engines_on_node=1)
    single = Placement(num_cpus=1, num_gpus=1, num_devices=1, device="accelerator", num_engines_on_node=1)
    assert (pieces_per_s(shared), pieces_per_s(single)) == (40, 400)
