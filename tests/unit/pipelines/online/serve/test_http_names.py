"""Tests that the private names of Starlette and FastAPI that peagle uses still exist and behave as expected."""

import pytest

from pipelines.online.serve.http_names import route_path, validate_body


@pytest.mark.parametrize(
    ("path", "root_path", "result"),
    [("/v1/models", "", "/v1/models"), ("/a/v1/models", "/a", "/v1/models"), ("/ab", "/a", "/ab"), ("/a", "/a", "")],
)
def test_route_path_omits_the_root_path(path, root_path, result):
    assert route_path({"type": "http", "path": path, "root_path": root_path}) == result


def test_validate_body_returns_value_or_errors():
    from fastapi import Body, FastAPI

    app = FastAPI()

    @app.post("/")
    def handle(number: int = Body()) -> None: ...

    field = app.routes[-1].body_field
    assert validate_body(field, 7) == (7, [])
    value, (error,) = validate_body(field, "x")
    assert (value, error["type"], error["loc"]) == (None, "int_parsing", ("body",))
