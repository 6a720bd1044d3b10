import os
from typing import Any

import pytest

from peagle.engine import start
from peagle.engine.ranks import NodeRank
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import ConfigError
from peagle.hardware import Hardware

HERE = Hardware(platform="cpu", memory_gib=24, free_memory_gib=20, num_cpus=2, core_ids=(0, 1))
SPEC = EngineSpec(model="m", drafter=DrafterSpec(method="peagle", model="d", num_speculative_tokens=3))


@pytest.mark.parametrize("has_request_metrics", [True, False])
def test_vllm_starts_in_its_environment_and_is_asked_only_for_what_it_has(
    has_request_metrics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, Any] = {}

    def vllm(arguments: dict[str, Any]) -> str:
        started.update(arguments, bound_to=os.environ["VLLM_CPU_OMP_THREADS_BIND"])
        return "engine"

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(start, "VllmEngine", vllm)
    monkeypatch.setattr(start, "has_request_metrics", lambda: has_request_metrics)
    assert start.start_engine(SPEC, HERE, engine_index=1, num_engines_on_node=2) == "engine"
    assert started["bound_to"] == "1"
    assert ("per_request_spec_decode_metrics" in started) == has_request_metrics
    assert started["speculative_config"]["num_speculative_tokens"] == 3


def test_a_vllm_that_cannot_accept_by_lot_is_told_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    head = DrafterSpec(method="peagle", model="d", num_speculative_tokens=1, synthetic_rates=(0.5,))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(start, "has_request_metrics", lambda: True)
    monkeypatch.setattr(start, "has_synthetic_acceptance", lambda: False)
    with pytest.raises(ConfigError, match="cannot accept drafts by lot"):
        start.start_engine(EngineSpec(model="m", drafter=head), HERE)


def test_a_node_of_several_starts_its_own_ranks_on_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(start, "has_request_metrics", lambda: True)
    for name, begin in (("VllmEngine", start.start_engine), ("follow", start.follow_engine)):
        started: dict[str, Any] = {}
        monkeypatch.setattr(start, name, started.update)
        spec = EngineSpec(model="m", tensor_parallel_size=2, num_nodes=2)
        place = NodeRank(number=1, host="10.0.0.2", leader=("10.0.0.1", 4000))
        begin(spec, HERE, engine_index=0, num_engines_on_node=1, node_rank=place)
        assert started["tensor_parallel_size"] == 2
        assert (started["nnodes"], started["node_rank"], started["distributed_executor_backend"]) == (2, 1, "mp")
        assert (started["master_addr"], started["master_port"]) == ("10.0.0.1", 4000)
        assert os.environ["VLLM_HOST_IP"] == "10.0.0.2"
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


@pytest.mark.parametrize("linked", [True, False])
def test_a_service_called_vllm_does_not_keep_an_engine_from_starting(
    linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes tells each pod of its namespace where it listens, by a name that vLLM reads a port from."""
    from vllm.envs import get_vllm_port

    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_PORT": "tcp://10.0.0.1:8000" if linked else "29500"})
    monkeypatch.setattr(start, "VllmEngine", lambda arguments: get_vllm_port())
    monkeypatch.setattr(start, "has_request_metrics", lambda: True)
    assert start.start_engine(SPEC, HERE) == (None if linked else 29500)


def test_a_temporary_folder_in_which_vllm_has_no_place_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_RPC_BASE_PATH": "/" + 70 * "x"})
    with pytest.raises(ConfigError, match="vLLM can use at most 70"):
        start.start_engine(SPEC, HERE)
