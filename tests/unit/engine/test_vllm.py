"""Tests of the calls to vLLM and their results, without a running engine. Tests in tests/integration start engines."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from devices import cpu

from peagle.engine import vllm as module
from peagle.engine.arguments import NodeRank
from peagle.engine.interface import RequestRefused
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.engine.vllm import VllmEngine, _generation, _sampling_params, _totals, generate, has_request_metrics
from peagle.errors import ConfigError, EngineError
from peagle.speculation import SpeculationStats


def counter(name, value):
    return SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value)


def by_position(*values):
    return SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=list(values))


def test_counters_of_ranks_add_up():
    rank = [counter("num_drafts", 10), counter("num_draft_tokens", 30), counter("num_accepted_tokens", 7)]
    unrelated = [SimpleNamespace(name="vllm:num_requests_running", value=1.0)]
    totals = _totals([*rank, by_position(5, 2, 0), *unrelated, *rank, by_position(4, 2, 1)])
    assert totals == SpeculationStats(num_drafts=20, num_draft_tokens=60, accepted_per_position=(9, 4, 1))


def test_no_statistics_without_draft_counters():
    assert _totals([SimpleNamespace(name="vllm:num_requests_running", value=1.0)]) is None


def test_counter_names_exist_in_vllm():
    from prometheus_client import REGISTRY
    from vllm.v1.metrics.reader import get_metrics_snapshot
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    config = SimpleNamespace(num_speculative_tokens=2)
    collectors = set(REGISTRY._collector_to_names)
    counters = SpecDecodingProm(config, ["engine"], {0: ["0"]})
    stats = SpecDecodingStats.new(2)
    stats.observe_draft(num_draft_tokens=2, num_accepted_tokens=1)
    counters.observe(stats)
    try:
        assert _totals(get_metrics_snapshot()) == SpeculationStats(
            num_drafts=1, num_draft_tokens=2, accepted_per_position=(1, 0)
        )
    finally:
        for collector in set(REGISTRY._collector_to_names) - collectors:
            REGISTRY.unregister(collector)


def test_vllm_reports_acceptance_per_request():
    assert has_request_metrics()


def output_of(*completions):
    return SimpleNamespace(outputs=completions, prompt_token_ids=[1, 2], num_cached_tokens=0, metrics=None)


def completion(token_ids, logprobs=None, histogram=None):
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    drafts = None if histogram is None else RequestSpecDecodeMetrics(1, histogram, 6, per_step_drafted=[1, 0])
    return SimpleNamespace(
        text=f"{token_ids}", finish_reason="stop", token_ids=token_ids, logprobs=logprobs, spec_decode_metrics=drafts
    )


def logprob(value, rank, text):
    return SimpleNamespace(logprob=value, rank=rank, decoded_token=text)


def test_several_completions():
    generation = _generation(output_of(completion([1, 2], histogram=[1, 1]), completion([3], histogram=[0, 2])))
    assert [c.text for c in generation.completions] == ["[1, 2]", "[3]"]
    assert (generation.text, generation.num_output_tokens) == ("[1, 2]", 3)
    assert (generation.speculation.num_drafts, generation.speculation.num_accepted_tokens) == (4, 3)
    assert generation.speculation.num_lookup_tokens == 2  # the first item of per_step_drafted in each


def test_sampled_token_and_most_likely_tokens():
    sampled_in_top = {7: logprob(-0.1, 1, "a"), 8: logprob(-2.0, 2, "b")}
    sampled_below_top = {9: logprob(-5.0, 40, "z"), 7: logprob(-0.1, 1, "a"), 8: logprob(-2.0, 2, "b")}
    (generated,) = _generation(output_of(completion([7, 9], [sampled_in_top, sampled_below_top])), 2).completions
    assert [(token.token, token.logprob) for token in generated.logprobs] == [("a", -0.1), ("z", -5.0)]
    assert [token.top for token in generated.logprobs] == [(("a", -0.1), ("b", -2.0))] * 2
    (without_top,) = _generation(output_of(completion([9], [{9: logprob(-5.0, 40, "z")}])), 0).completions
    assert without_top.logprobs[0].top == ()


def test_sampling_options_exist_in_vllm():
    from peagle.requests.sampling import SamplingOptions

    options = SamplingOptions(json_schema='{"type": "object"}', stop=["x"], temperature=0.5, n=2, logprobs=3)
    params = _sampling_params(options.model_dump())
    assert params.structured_outputs.json == '{"type": "object"}'
    assert (params.stop, params.n, params.logprobs, params.max_tokens) == (["x"], 2, 3, 256)
    assert _sampling_params(SamplingOptions().model_dump()).structured_outputs is None


def test_all_parameters_reach_vllm():
    sampling = {
        "temperature": 1.0, "max_tokens": 5, "min_tokens": 1, "stop_token_ids": [3], "bad_words": ["x"], "top_k": 0,
        "logit_bias": {"7": 200.0}, "allowed_token_ids": [7], "skip_special_tokens": False, "json_schema": None,
        "spaces_between_special_tokens": False, "include_stop_str_in_output": True, "stop": ["y"],
        "structured_outputs": {"regex": "a+"}, "repetition_detection": {"max_pattern_size": 2, "min_count": 3},
    }  # fmt: skip
    params = _sampling_params(sampling)
    assert params.logit_bias == {7: 100.0}  # the maximum
    assert params.structured_outputs.regex == "a+"
    assert (params.repetition_detection.max_pattern_size, params.repetition_detection.min_count) == (2, 3)
    plain = sampling.keys() - {"logit_bias", "structured_outputs", "repetition_detection", "json_schema"}
    assert {name: getattr(params, name) for name in plain} == {name: sampling[name] for name in plain}


class FailingLlm:
    def __init__(self, error):
        self._error = error

    async def generate(self, *_, **__):
        raise self._error from IndexError("no such block")
        yield  # makes this a generator


def generate_with(llm, **sampling):
    engine = object.__new__(VllmEngine)
    engine._llm = llm
    return asyncio.run(engine.generate("r", [1], {"temperature": 0.0, "max_tokens": 4, **sampling}))


def test_vllms_errors_become_refusals_or_engine_errors(monkeypatch):
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    refusing = FailingLlm(VLLMValidationError("Grammar error: no such pointer"))
    with pytest.raises(RequestRefused, match="no such pointer"):
        generate_with(refusing)
    with pytest.raises(RequestRefused, match="temperature"):
        generate_with(refusing, temperature=-1)
    with pytest.raises(RequestRefused, match="no such block"):
        generate_with(FailingLlm(EngineGenerateError()))
    with pytest.raises(EngineError, match="engine process died"):
        generate_with(FailingLlm(EngineDeadError()))
    monkeypatch.delattr("vllm.exceptions.VLLMClientError")  # vLLM 0.24 does not have it
    with pytest.raises(RequestRefused, match="too long"):
        generate_with(FailingLlm(ValueError("the prompt is too long")))


def test_signs_of_life_counts_steps():
    from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter, StatLoggerManager

    from peagle.engine.vllm import _StepCounter

    engine = object.__new__(VllmEngine)
    engine._steps = _StepCounter()
    manager = object.__new__(StatLoggerManager)
    manager.stat_loggers = [PerEngineStatLoggerAdapter(None, [0], engine._steps)]
    for number in range(3):
        assert engine.signs_of_life() == number
        manager.record(scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=0)
    manager.log()  # this and the next two calls must not fail
    manager.log_engine_initialized()
    manager.record_sleep_state(0, 0)


def test_kill_ends_all_processes():
    """Runs in a subprocess, whose descendants are all killed. Zombies count as ended."""
    code = """if True:
        import psutil, subprocess, sys, time
        from peagle.engine.vllm import VllmEngine
        def runs(process):
            try:
                return process.status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False
        sleeper = "import subprocess as s, time; s.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
        core = subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.PIPE)
        core.stdout.readline()
        descendants = psutil.Process().children(recursive=True)
        object.__new__(VllmEngine).kill()
        while any(map(runs, descendants)):
            time.sleep(0.05)
        print(len(descendants))
    """
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(completed.stdout) > 1


def test_priority_and_cache_salt_reach_vllm():
    calls = []

    class RecordingEngine:
        async def generate(self, prompt, params, request_id, priority):
            calls.append((prompt, request_id, priority))
            yield output_of(completion([1, 2]))

    prompt = {"prompt_token_ids": [1], "cache_salt": "s"}
    answer = asyncio.run(generate(RecordingEngine(), "r", prompt, {"temperature": 0.0, "max_tokens": 4}, priority=1))
    assert (calls, answer.num_output_tokens) == ([(prompt, "r", 1)], 2)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_incomplete_answers_are_refused(reason):
    from vllm.v1.engine import FINISH_REASON_STRINGS

    class AbortingEngine:
        async def generate(self, *_, **__):
            incomplete = completion([1, 2])
            incomplete.finish_reason = reason
            yield output_of(completion([1, 2, 3]), incomplete)

    assert reason in FINISH_REASON_STRINGS
    with pytest.raises(RequestRefused, match=rf"ended the response early \({reason}\) after 2 tokens"):
        generate_with(AbortingEngine())


@pytest.mark.parametrize(
    ("config", "runner"), [({"use_v2_model_runner": True}, "V2"), ({"use_v2_model_runner": False}, "V1"), ({}, None)]
)
def test_model_runner(config, runner):
    engine = VllmEngine.__new__(VllmEngine)
    engine._llm = SimpleNamespace(vllm_config=SimpleNamespace(**config))
    assert engine.model_runner == runner


def test_vllms_configuration_names_its_model_runner():
    from vllm.config import VllmConfig

    assert isinstance(VllmConfig.use_v2_model_runner, property)


CPU = cpu()
SPEC = EngineSpec(model="m", drafter=DrafterSpec(method="peagle", model="d", num_speculative_tokens=3))


@pytest.mark.parametrize("has_request_metrics", [True, False])
def test_start_sets_environment_and_supported_arguments(has_request_metrics, monkeypatch):
    arguments_of_vllm = {}

    def start_vllm(arguments):
        arguments_of_vllm.update(arguments, bound_to=os.environ["VLLM_CPU_OMP_THREADS_BIND"])
        return "engine"

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(module, "VllmEngine", start_vllm)
    monkeypatch.setattr(module, "has_request_metrics", lambda: has_request_metrics)
    assert module.start_engine(SPEC, CPU, engine_index=1, num_engines_on_node=2) == "engine"
    assert arguments_of_vllm["bound_to"] == "1"  # each engine has one of the two cores
    assert ("per_request_spec_decode_metrics" in arguments_of_vllm) == has_request_metrics
    assert arguments_of_vllm["speculative_config"]["num_speculative_tokens"] == 3


def test_unsupported_synthetic_acceptance_is_refused(monkeypatch):
    head = DrafterSpec(method="peagle", model="d", num_speculative_tokens=1, synthetic_rates=(0.5,))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(module, "has_request_metrics", lambda: True)
    monkeypatch.setattr(module, "has_synthetic_acceptance", lambda: False)
    with pytest.raises(ConfigError, match="does not support synthetic acceptance"):
        module.start_engine(EngineSpec(model="m", drafter=head), CPU)


def test_each_node_of_an_engine_starts_its_own_ranks(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(module, "has_request_metrics", lambda: True)
    for name, start_on_node in (("VllmEngine", module.start_engine), ("follow", module.follow_engine)):
        arguments_of_vllm = {}
        monkeypatch.setattr(module, name, arguments_of_vllm.update)
        spec = EngineSpec(model="m", tensor_parallel_size=2, num_nodes=2)
        node_rank = NodeRank(number=1, host="10.0.0.2", leader=("10.0.0.1", 4000))
        start_on_node(spec, CPU, engine_index=0, num_engines_on_node=1, node_rank=node_rank)
        assert arguments_of_vllm["tensor_parallel_size"] == 2
        assert (
            arguments_of_vllm["nnodes"],
            arguments_of_vllm["node_rank"],
            arguments_of_vllm["distributed_executor_backend"],
        ) == (2, 1, "mp")
        assert (arguments_of_vllm["master_addr"], arguments_of_vllm["master_port"]) == ("10.0.0.1", 4000)
        assert os.environ["VLLM_HOST_IP"] == "10.0.0.2"
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


@pytest.mark.parametrize("is_service", [True, False])
def test_port_of_a_kubernetes_service_is_removed(is_service, monkeypatch):
    """Kubernetes sets VLLM_PORT to an address for a service named vllm; vLLM expects a port."""
    from vllm.envs import get_vllm_port

    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_PORT": "tcp://10.0.0.1:8000" if is_service else "29500"})
    monkeypatch.setattr(module, "VllmEngine", lambda arguments: get_vllm_port())
    monkeypatch.setattr(module, "has_request_metrics", lambda: True)
    assert module.start_engine(SPEC, CPU) == (None if is_service else 29500)


def test_too_long_socket_folder_is_refused(monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_RPC_BASE_PATH": "/" + 70 * "x"})
    with pytest.raises(ConfigError, match="the limit for vLLM is 70"):
        module.start_engine(SPEC, CPU)
