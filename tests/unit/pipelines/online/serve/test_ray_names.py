"""Tests that the private names of Ray Serve and vLLM that peagle uses still exist and behave as expected."""

import inspect
from types import SimpleNamespace

import jinja2
import pytest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError

from pipelines.online.serve import ray_names
from pipelines.online.serve.ray_names import ProcessWatch, count_states, to_error_response


def test_client_of_serve_has_http_options():
    """test_serve_shared.py tests `running_http_options`, which needs a running Serve."""
    from ray.serve import context
    from ray.serve._private.client import ServeControllerClient

    assert callable(context._get_global_client)
    assert isinstance(ServeControllerClient.http_config, property)


def test_deletion_does_not_block(monkeypatch):
    from ray import serve

    assert inspect.signature(serve.delete).parameters["_blocking"].default is True
    calls = []
    monkeypatch.setattr(serve, "delete", lambda name, **options: calls.append((name, options)))
    ray_names.begin_deletion("peagle")
    assert calls == [("peagle", {"_blocking": False})]


def test_replica_states_are_reduced_to_three():
    from ray.serve._private.common import ReplicaState

    states = {ReplicaState.RUNNING: 2, ReplicaState.STARTING: 1, ReplicaState.RECOVERING: 1, ReplicaState.STOPPING: 3}
    assert list(count_states(states).values()) == [2, 2, 3]
    assert list(count_states({}).values()) == [0, 0, 0]
    assert {state for state in ReplicaState if not any(count_states({state: 1}).values())} == {ReplicaState.STOPPED}


def test_rays_engine_client_has_the_expected_name():
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

    assert "self._engine_client = self._start_async_llm_engine(" in inspect.getsource(VLLMEngine.start)


def test_vllms_api_server_has_the_expected_names():
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    for name in ("_oai_serving_chat", "_oai_serving_completion"):
        assert f"self.{name} = " in inspect.getsource(VLLMEngine)
    assert "self.create_error_response(" in inspect.getsource(GenerateBaseServing.create_streaming_error_response)


def raise_and_catch(error, cause=None):
    try:
        raise error from cause
    except Exception as caught:
        return caught


TEMPLATE_ERROR = jinja2.TemplateError("roles must alternate")
HIDDEN_MESSAGE = "the engine cannot process this request: a field has"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (VLLMValidationError("too long", parameter="prompt"), "too long (parameter=prompt)"),
        (raise_and_catch(ValueError("roles must alternate"), TEMPLATE_ERROR), "roles must alternate"),
        (TEMPLATE_ERROR, "roles must alternate"),
        (TypeError("tuple indices must be integers or slices, not str"), HIDDEN_MESSAGE),
        (ValueError("invalid literal for int() with base 10: 'x'"), HIDDEN_MESSAGE),
        (
            raise_and_catch(ValueError("can only concatenate str"), TypeError("can only concatenate str")),
            HIDDEN_MESSAGE,
        ),
        (jinja2.UndefinedError("'dict object' has no attribute 'x'"), HIDDEN_MESSAGE),
    ],
)
def test_python_errors_are_hidden(error, text):
    serving = SimpleNamespace(create_error_response=create_error_response)
    ray_names.hide_python_errors(SimpleNamespace(_oai_serving_chat=serving, _oai_serving_completion=None))
    answers = [to_error_response(error), serving.create_error_response(error)]
    for answer in answers:
        assert (answer.error.code, answer.error.message[: len(text)]) == (400, text)
    assert serving.create_error_response("plain text").error.message == "plain text"


@pytest.mark.parametrize(("error", "status"), [(ValueError("too long"), 400), (RuntimeError("boom"), None)])
def test_only_client_errors_are_refusals(error, status):
    result = to_error_response(error)
    assert (result and result.error.code) == status


def test_crash_and_restart_of_a_serve_process_are_reported():
    processes, messages, now = {("a", 1): "controller", ("b", 2): "proxy"}, [], [0.0]
    watch = ProcessWatch(lambda: processes, messages.append, lambda: now[0])
    watch.check()
    assert messages == []
    del processes["b", 2]
    watch.check()
    (line,) = messages
    assert line.startswith("Serve's proxy died: its connections were cut")
    now[0] = 11.0
    processes["c", 3] = "proxy"
    watch.check()
    assert messages[1:] == ["Serve's proxy is back after 11 s"]
    del processes["a", 1]
    processes["a", 9] = "controller"  # Ray restarts the controller between two polls
    watch.check()
    assert [line.partition(":")[0] for line in messages[2:]] == [
        "Serve's controller died",
        "Serve's controller is back after 0 s",
    ]


def test_process_that_does_not_restart_is_reported_once():
    processes, messages, now = {("b", 2): "proxy"}, [], [0.0]
    watch = ProcessWatch(lambda: processes, messages.append, lambda: now[0])
    processes.clear()
    for now[0] in (1.0, 30.0, 61.0, 90.0):
        watch.check()
    assert len(messages) == 2
    assert "is not back after 60 s: stop this command and start it again" in messages[1]
