"""The HTTP side: Ray's `OpenAiIngress` on our own FastAPI application, behind the gate, with `/health`, `/v1/cost`,
`/v1/live` and the page at `/`.

Ray's own application answers wrong types with 400, repeats internal exceptions to clients and lets every web page in
with credentials; so only Ray's handlers are taken, by `make_fastapi_ingress(app=)`. Embeddings, scores and
transcriptions are left out: no model here has them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress

from peagle.economics.prices import Price
from peagle.errors import shown
from peagle.private import keep_private
from pipelines.online.answers import WholeAnswer
from pipelines.online.batches.actors import RayRunner
from pipelines.online.batches.routes import ROUTES as BATCH_ROUTES
from pipelines.online.batches.routes import BatchRoutes
from pipelines.online.batches.service import Batches
from pipelines.online.batches.settings import BatchSettings
from pipelines.online.bodies import ChatBody, CompletionBody
from pipelines.online.cost import CostView
from pipelines.online.error_handlers import answer_errors
from pipelines.online.errors import ApiError, from_exception, is_engine_death
from pipelines.online.gate import AGAIN_HEADER, CAP_HEADER, KEY_HEADER, OPERATOR_HEADER, Gate, GateSettings
from pipelines.online.handles import Answered, Cancelling
from pipelines.online.keys import KeyRing
from pipelines.online.live import MAX_WINDOW_S, LiveView
from pipelines.online.load import Load, describe_load
from pipelines.online.outgoing import NOTE_IN_SCOPE
from pipelines.online.replicas import replica_counts
from pipelines.online.requests import CHAT, COMPLETIONS
from pipelines.online.routes import Route, Rule, get, guarded_app, post
from pipelines.online.web_page import FOLDER, page_response

_AGAIN_S = 0.5  # a replica whose engine died is gone by then
_ROUTES: dict[str, Route] = {
    "models": get("/v1/models"),
    "model_data": get("/v1/models/{model:path}"),
    "completions": post(COMPLETIONS, Rule.GENERATION),
    "chat": post(CHAT, Rule.GENERATION),
    "cost": get("/v1/cost"),
    "live": get("/v1/live", Rule.POLL),
    "page": get("/", Rule.PAGE, include_in_schema=False),
    "page_file": get(FOLDER + "{name}", Rule.PAGE, include_in_schema=False),
    "health": get("/health", Rule.OPEN),
    "schema": get("/openapi.json", include_in_schema=False),
    **BATCH_ROUTES,
}


class PeagleIngress(BatchRoutes, OpenAiIngress):  # type: ignore[misc]  # Ray's classes are untyped
    """Ray's routes and ours."""

    def __init__(
        self,
        llm_deployments: Any,
        model_cards: Any,
        *,
        settings: GateSettings,
        price: Price,
        batches: BatchSettings | None = None,
    ) -> None:
        keep_private()
        super().__init__({model: Cancelling(handle) for model, handle in llm_deployments.items()}, model_cards)
        self._cards: dict[str, dict[str, Any]] = model_cards
        self._cost = CostView(settings.ledger, price)
        self.batches = self._make_batches(batches, settings) if batches else None
        self._live = LiveView(self._cost)
        self._deployments = {model: handle.deployment_name for model, handle in llm_deployments.items()}
        self._requires_key = settings.requires_key

    def _make_batches(self, batches: BatchSettings, settings: GateSettings) -> Batches:
        ring = KeyRing(settings.key_file, settings.fixed_keys) if settings.requires_key else None
        present_key = ring.present if ring else None
        return Batches(batches, RayRunner(), spent_usd=self._cost.spent_usd, present_key=present_key)

    async def models(self) -> JSONResponse:
        """The models, as OpenAI lists them."""
        return JSONResponse({"object": "list", "data": list(self._cards.values())})

    async def model_data(self, model: str) -> JSONResponse:
        """One of them."""
        if model not in self._cards:
            raise ApiError(404, f"there is no model {shown(model)}", code="model_not_found")
        return JSONResponse(self._cards[model])

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """A chat completion, whole or as a stream of events."""
        if cap := request.headers.get(CAP_HEADER):
            body.cap(int(cap))
        return await _ask(super().chat, body, request)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """A completion, likewise."""
        return await _ask(super().completions, body, request)

    async def cost(
        self, request: Request, window_s: float | None = Query(None, gt=0, allow_inf_nan=False)
    ) -> JSONResponse:
        """What was delivered and what it cost: everybody's for an operator, else one's own."""
        own = None if OPERATOR_HEADER in request.headers else request.headers[KEY_HEADER]
        await self._cost.require()
        return JSONResponse(await asyncio.to_thread(self._cost.report, own, window_s))

    async def live(
        self, request: Request, window_s: int = Query(60, ge=60, le=MAX_WINDOW_S, multiple_of=60)
    ) -> JSONResponse:
        """The figures of the last minutes: everybody's and the engines for an operator, else one's own."""
        await self._cost.require()
        if OPERATOR_HEADER not in request.headers:
            return JSONResponse(await asyncio.to_thread(self._live.report, request.headers[KEY_HEADER], window_s))
        report = await asyncio.to_thread(self._live.report, None, window_s)
        return JSONResponse(report | {"load": await asyncio.to_thread(self._loads, request.app.state.load)})

    def _loads(self, load: Load) -> dict[str, dict[str, int]]:
        return {
            model: describe_load(self._cards[model]["peagle"], counts, load.under_way(model))
            for model, counts in replica_counts(self._deployments).items()
        }

    async def page(self) -> Response:
        """The page."""
        return page_response()

    async def page_file(self, name: str) -> Response:
        """One of its files."""
        return page_response(name)

    async def schema(self, request: Request) -> JSONResponse:
        """What all routes take and give, as OpenAPI has it."""
        schema = await asyncio.to_thread(request.app.openapi)
        prefix = request.scope.get("root_path", "").rstrip("/")
        return JSONResponse(schema | ({"servers": [{"url": prefix}]} if prefix else {}))

    async def health(self) -> JSONResponse:
        """The ingress answers. Whether engines do is in Serve's status."""
        return JSONResponse({"status": "ok", "requires_key": self._requires_key})


async def _ask(handler: Callable[[Any, Request], Awaitable[Response]], body: Any, request: Request) -> Response:
    """Ray's answer. Where the engine died before the first of it was sent, another engine is asked, once.

    Raises:
        ApiError: for whatever went wrong; Ray's application would answer some of its errors in plain text.
    """
    asked_at = time.time()
    try:
        try:
            return await handler(body, request)
        except Exception as error:
            if not is_engine_death(error):
                raise
            await asyncio.sleep(_AGAIN_S)
            return await handler(body, _again(request, asked_at))
    except Answered as end:
        return _respond(end.answer, request)
    except Exception as error:
        raise from_exception(error) from error


def _respond(answer: WholeAnswer, request: Request) -> Response:
    request.scope[NOTE_IN_SCOPE](answer.said)
    return Response(answer.body, media_type="application/json")


def _again(request: Request, asked_at: float) -> Request:
    """The request as the second engine is to see it: what the first has billed is not billed again."""
    headers = [*request.scope["headers"], (AGAIN_HEADER.encode(), str(asked_at).encode())]
    return Request({**request.scope, "headers": headers}, request.receive)


def make_ingress(settings: GateSettings) -> Any:
    """The class of the ingress deployment."""
    return make_fastapi_ingress(PeagleIngress, endpoint_map=_ROUTES, app=make_app(settings))


def make_app(settings: GateSettings) -> FastAPI:
    """An application without routes that answers errors as OpenAI does, behind the gate."""
    app = guarded_app(title="peagle")
    answer_errors(app)
    app.state.load = Load()
    app.add_middleware(Gate, settings=settings, routes=tuple(_ROUTES.values()), load=app.state.load)
    return app
