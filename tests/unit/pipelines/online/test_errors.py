import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from pipelines.online.errors import ApiError, from_validation


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
def test_a_wrong_value_is_400_and_a_wrong_type_422(values, expected):
    with pytest.raises(ValidationError) as caught:
        Body(**values)
    error = from_validation(caught.value.errors())
    assert (error.status, error.code, error.message[: len(expected[2])]) == expected


def test_no_error_is_longer_than_a_page():
    error = ApiError(400, "x" * 2**20, param="y" * 2**20).body()["error"]
    assert error["message"] == "x" * 2000 + "... (1,048,576 characters)"
    assert len(error["param"]) < 300
