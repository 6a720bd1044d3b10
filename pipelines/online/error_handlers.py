"""What a FastAPI application answers when something is wrong: OpenAI's error objects."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pipelines.online.errors import ApiError, from_exception, from_validation


def answer_errors(app: FastAPI) -> None:
    """Have the application answer so."""
    app.add_exception_handler(RequestValidationError, _answer_validation)
    app.add_exception_handler(HTTPException, _answer)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    return _response(from_exception(error))


async def _answer_validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "registered for it alone"
    return _response(from_validation(list(error.errors())))


def _response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())
