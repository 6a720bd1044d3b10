import pytest
from ray.exceptions import ActorDiedError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from vllm.exceptions import VLLMNotFoundError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from pipelines.online.errors import ApiError, from_exception, is_engine_death


class WrappedError(ActorDiedError):
    """As Ray wraps it."""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (VLLMValidationError("no prompt", parameter="prompt"), 400),
        (VLLMNotFoundError("no such adapter"), 404),
        (VLLMUnprocessableEntityError("no such image"), 422),
        (VLLMValidationError(""), 400),
    ],
)
def test_what_vllm_refuses_is_the_clients_fault(error, status):
    answer = from_exception(error)
    assert answer.status == status
    assert answer.param == getattr(error, "parameter", None)
    assert answer.message == error.args[0]


def test_a_secret_stays_inside_and_an_answer_stays_as_it_is():
    answer = from_exception(RuntimeError("secret"))
    assert (answer.status, "secret" in answer.message) == (500, False)
    own = ApiError(418, "x")
    assert from_exception(own) is own


@pytest.mark.parametrize("error", [EngineDeadError(), ActorDiedError(), WrappedError()])
def test_an_engine_that_died_is_unavailable(error):
    assert is_engine_death(error)
    assert not is_engine_death(RuntimeError())


@pytest.mark.parametrize(
    "kind", [EngineDeadError, ActorDiedError, RayActorError, BackPressureError, DeploymentUnavailableError]
)
def test_unavailable_engines_are_503(kind):
    """By the names of Ray's and vLLM's own classes."""
    assert from_exception(kind.__new__(kind)).status == 503
