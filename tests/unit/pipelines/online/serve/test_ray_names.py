"""Private names of Ray Serve are still there, and mean what they are taken for."""

import inspect

import pytest

from pipelines.online.serve import ray_names
from pipelines.online.serve.ray_names import count_states, refusal


def test_serves_client_has_the_http_options():
    """`running_http_options` needs a Serve that runs: test_serve_shared.py."""
    from ray.serve import context
    from ray.serve._private.client import ServeControllerClient

    assert callable(context._get_global_client)
    assert isinstance(ServeControllerClient.http_config, property)


def test_a_deletion_waits_a_minute_unless_it_is_told_not_to(monkeypatch):
    from ray import serve

    assert inspect.signature(serve.delete).parameters["_blocking"].default is True
    seen = []
    monkeypatch.setattr(serve, "delete", lambda name, **how: seen.append((name, how)))
    ray_names.begin_deletion("peagle")
    assert seen == [("peagle", {"_blocking": False})]


def test_serves_states_become_three():
    from ray.serve._private.common import ReplicaState

    states = {ReplicaState.RUNNING: 2, ReplicaState.STARTING: 1, ReplicaState.RECOVERING: 1, ReplicaState.STOPPING: 3}
    assert list(count_states(states).values()) == [2, 2, 3]
    assert list(count_states({}).values()) == [0, 0, 0]
    assert {state for state in ReplicaState if not any(count_states({state: 1}).values())} == {ReplicaState.STOPPED}


def test_rays_engine_keeps_its_client_under_that_name():
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

    assert "self._engine_client = self._start_async_llm_engine(" in inspect.getsource(VLLMEngine.start)


@pytest.mark.parametrize(("error", "status"), [(ValueError("too long"), 400), (RuntimeError("boom"), None)])
def test_a_refusal_is_that_of_vllm_serve(error, status):
    found = refusal(error)
    assert (found and found.error.code) == status
