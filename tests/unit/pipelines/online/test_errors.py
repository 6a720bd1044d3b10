import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator
from ray.exceptions import ActorDiedError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from vllm.exceptions import VLLMNotFoundError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from pipelines.online.errors import ApiError, from_exception, from_validation, is_engine_death


class Body(BaseModel):
    number: int = Field(ge=1)
    word: str = "a"

    @field_validator("word")
    @classmethod
    def _is_short(cls, word: str) -> str:
        if len(word) > 3:
            raise ValueError("too long a word")
        return word


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"number": 0}, (400, "invalid_value", "number: Input should be greater than or equal to 1")),
        ({"number": 1, "word": "longer"}, (400, "invalid_value", "word: too long a word")),
        ({"number": "x"}, (422, "invalid_type", "number: Input should be a valid integer, unable to parse")),
        ({"number": 1, "word": 5}, (422, "invalid_type", "word: Input should be a valid string")),
        ({}, (422, "invalid_type", "number: Field required")),
    ],
)
def test_status_of_validation_errors(values, expected):
    with pytest.raises(ValidationError) as exception:
        Body(**values)
    error = from_validation(exception.value.errors())
    assert (error.status, error.code, error.message[: len(expected[2])]) == expected


def test_long_messages_are_shortened():
    error = ApiError(400, "x" * 2**20, param="y" * 2**20).body()["error"]
    assert error["message"] == "x" * 2000 + "... (1,048,576 characters)"
    assert len(error["param"]) < 300


class WrappedError(ActorDiedError):
    """A fake of the subclass with which Ray wraps an error."""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (VLLMValidationError("no prompt", parameter="prompt"), 400),
        (VLLMNotFoundError("no such adapter"), 404),
        (VLLMUnprocessableEntityError("no such image"), 422),
        (VLLMValidationError(""), 400),
    ],
)
def test_vllms_refusals_are_client_errors(error, status):
    answer = from_exception(error)
    assert answer.status == status
    assert answer.param == getattr(error, "parameter", None)
    assert answer.message == error.args[0]


def test_internal_text_is_hidden():
    answer = from_exception(RuntimeError("secret"))
    assert (answer.status, "secret" in answer.message) == (500, False)
    api_error = ApiError(418, "x")
    assert from_exception(api_error) is api_error


@pytest.mark.parametrize("error", [EngineDeadError(), ActorDiedError(), WrappedError()])
def test_engine_death_is_recognised(error):
    assert is_engine_death(error)
    assert not is_engine_death(RuntimeError())


@pytest.mark.parametrize(
    "kind", [EngineDeadError, ActorDiedError, RayActorError, BackPressureError, DeploymentUnavailableError]
)
def test_unavailable_engines_are_503(kind):
    """The errors of Ray and vLLM are recognised by their class names."""
    assert from_exception(kind.__new__(kind)).status == 503
