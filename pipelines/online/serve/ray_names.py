"""Private names of Ray Serve, and of vLLM's API server behind it."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from peagle.engine.vllm_internals import client_text
from pipelines.online.errors import NOT_IMPLEMENTED

_STARTING = ("STARTING", "UPDATING", "RECOVERING")
_STOPPING = ("STOPPING", "PENDING_MIGRATION")
_KIND_BY_ACTOR_CLASS = {"ServeController": "controller", "ProxyActor": "proxy"}
_POLL_S = 2.0
_MAX_RESTART_S = 60.0
_CONSEQUENCES = {
    "controller": "requests continue, only scaling is delayed; Ray restarts it",
    "proxy": "its connections were cut, and new connections are refused until Serve has restarted it",
}
_log = logging.getLogger(__name__)


def running_http_options() -> Any:
    """Return host, port and certificate of the running Serve, which its public status does not include."""
    from ray.serve.context import _get_global_client

    return _get_global_client().http_config


def begin_deletion(application: str) -> None:
    """Start the deletion of an application. `serve.delete` would wait, and fail after a minute."""
    from ray import serve

    serve.delete(application, _blocking=False)


def engine_client(engine: Any) -> Any:
    """Return the `AsyncLLM` inside Ray's engine of an `LLMServer`."""
    return engine._engine_client


def replica_counts(deployments: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return the replica counts of each model. Blocks.

    `deployments` has the name of each model's deployment in the application of the calling replica.
    """
    from ray import serve

    app_name = serve.get_replica_context().app_name
    application = serve.status().applications.get(app_name)
    states = (
        {name: deployment.replica_states for name, deployment in application.deployments.items()} if application else {}
    )
    return {model: count_states(states.get(name, {})) for model, name in deployments.items()}


def serve_processes() -> dict[Hashable, str]:
    """Return the kind of each live process of Serve: "controller" or "proxy".

    Ray's public list of actors has no process ids, and Ray's state API needs a dashboard.
    """
    from ray._private import state

    alive = [actor for actor in state.actors().values() if actor["State"] == "ALIVE"]
    kinds = [(actor, _KIND_BY_ACTOR_CLASS.get(actor["ActorClassName"].rpartition(".")[2])) for actor in alive]
    return {(actor["ActorID"], actor["Pid"]): kind for actor, kind in kinds if kind is not None}


class ProcessWatch:
    """Reports when Serve's controller or a proxy dies, and when it is back."""

    def __init__(
        self,
        processes: Callable[[], Mapping[Hashable, str]],
        report: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes, self._report, self._monotonic = processes, report, monotonic
        self._last_processes = dict(processes())
        self._died_at: dict[str, float] = {}
        self._reported_kinds: set[str] = set()

    def check(self) -> None:
        """Report processes that ended or came back since the previous check."""
        now, processes = self._monotonic(), dict(self._processes())
        ended = [self._last_processes[process] for process in self._last_processes.keys() - processes.keys()]
        new = [processes[process] for process in processes.keys() - self._last_processes.keys()]
        self._last_processes = processes
        for kind in ended:
            self._died_at[kind] = now
            self._report(f"Serve's {kind} died: {_CONSEQUENCES[kind]}. No action is needed")
        for kind in new:
            if (died_at := self._died_at.pop(kind, None)) is not None:
                self._reported_kinds.discard(kind)
                self._report(f"Serve's {kind} is back after {now - died_at:.0f} s")
        for kind, died_at in self._died_at.items():
            if now - died_at >= _MAX_RESTART_S and kind not in self._reported_kinds:
                self._reported_kinds.add(kind)
                self._report(
                    f"Serve's {kind} is not back after {_MAX_RESTART_S:g} s: stop this command and start it again; "
                    "usage, files and batches are saved"
                )


def watch_processes(stopped: threading.Event, report: Callable[[str], None]) -> None:
    watch = ProcessWatch(serve_processes, report)

    def run() -> None:
        while not stopped.wait(_POLL_S):
            watch.check()

    threading.Thread(target=run, name="serve-processes", daemon=True).start()


def count_states(states: Mapping[Any, int]) -> dict[str, int]:
    count_by_state = {str(getattr(state, "value", state)): number for state, number in states.items()}
    return {
        "num_running_replicas": count_by_state.get("RUNNING", 0),
        "num_starting_replicas": sum(count_by_state.get(state, 0) for state in _STARTING),
        "num_stopping_replicas": sum(count_by_state.get(state, 0) for state in _STOPPING),
    }


def to_error_response(error: Exception) -> Any | None:
    """Return vLLM's error response for an exception, or None for a server error."""
    from ray.serve.llm.openai_api_models import ErrorResponse
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.exceptions import VLLMError

    answer = create_error_response(error)
    if answer.error.code >= 500 and answer.error.code != NOT_IMPLEMENTED:
        return None
    # A ValueError might be a bug in vLLM, so its traceback is logged.
    is_expected = isinstance(error, VLLMError)
    _log.warning("vLLM refused a request: %.500s", error, exc_info=None if is_expected else error)
    return ErrorResponse.model_validate(_hide_exception_text(answer, error).model_dump())


def hide_python_errors(engine: Any) -> None:
    """Make the API server of Ray's engine send clients only vLLM's refusals, without the text of other exceptions."""
    for serving in (engine._oai_serving_chat, engine._oai_serving_completion):
        if serving is not None:
            serving.create_error_response = _with_client_text(serving.create_error_response)


def _with_client_text(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_for_client(message: Any, *arguments: Any, **options: Any) -> Any:
        return _hide_exception_text(create(message, *arguments, **options), message)

    return create_for_client


def _hide_exception_text(answer: Any, error: Any) -> Any:
    """Return an error response without the text of an exception that is not meant for clients."""
    if isinstance(error, Exception) and (text := client_text(error)) != str(error):
        _log.warning("vLLM failed on a request", exc_info=error)
        answer.error.message = text
    return answer


def event_to_error_response(error: Mapping[str, Any]) -> Any:
    from ray.serve.llm.openai_api_models import ErrorResponse

    return ErrorResponse.model_validate({"error": error})
