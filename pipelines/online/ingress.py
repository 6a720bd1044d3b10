"""The HTTP side: Ray's `OpenAiIngress` on our own FastAPI application, behind the gate, with `/health` and `/v1/cost`.

Ray's own application answers wrong types with 400, repeats internal exceptions to clients and lets every web page in
with credentials; so only Ray's handlers are taken, by `make_fastapi_ingress(app=)`. Embeddings, scores and
transcriptions are left out: no model here has them.
"""

import asyncio
from typing import Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress

from peagle.economics.prices import Price
from pipelines.online.batches.actors import RayRunner
from pipelines.online.batches.routes import ROUTES as BATCH_ROUTES
from pipelines.online.batches.routes import BatchRoutes
from pipelines.online.batches.service import Batches
from pipelines.online.batches.settings import BatchSettings
from pipelines.online.cost import CostView
from pipelines.online.error_handlers import answer_errors
from pipelines.online.errors import ApiError
from pipelines.online.gate import KEY_HEADER, OPERATOR_HEADER, Gate, GateSettings
from pipelines.online.requests import CHAT, COMPLETIONS

_ROUTES = {
    "models": lambda app: app.get("/v1/models"),
    "model_data": lambda app: app.get("/v1/models/{model:path}"),
    "completions": lambda app: app.post(COMPLETIONS),
    "chat": lambda app: app.post(CHAT),
    "cost": lambda app: app.get("/v1/cost"),
    "health": lambda app: app.get("/health"),
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
        super().__init__(llm_deployments, model_cards)
        self._cards: dict[str, dict[str, Any]] = model_cards
        self._cost = CostView(settings.ledger, price)
        self.batches = Batches(batches, RayRunner(), spent_usd=self._cost.spent_usd) if batches else None

    async def models(self) -> JSONResponse:
        """The models, as OpenAI lists them."""
        return JSONResponse({"object": "list", "data": list(self._cards.values())})

    async def model_data(self, model: str) -> JSONResponse:
        """One of them."""
        if model not in self._cards:
            raise ApiError(404, f"there is no model {model!r}", code="model_not_found")
        return JSONResponse(self._cards[model])

    async def cost(self, request: Request, window_s: float | None = Query(None, gt=0)) -> JSONResponse:
        """What was delivered and what it cost: everybody's for an operator, else one's own."""
        own = None if OPERATOR_HEADER in request.headers else request.headers[KEY_HEADER]
        return JSONResponse(await asyncio.to_thread(self._cost.report, own, window_s))

    async def health(self) -> JSONResponse:
        """The ingress answers. Whether engines do is in Serve's status."""
        return JSONResponse({"status": "ok"})


def make_ingress(settings: GateSettings) -> Any:
    """The class of the ingress deployment."""
    return make_fastapi_ingress(PeagleIngress, endpoint_map=_ROUTES, app=make_app(settings))


def make_app(settings: GateSettings) -> FastAPI:
    """An application without routes that answers errors as OpenAI does, behind the gate."""
    app = FastAPI(title="peagle", docs_url=None, redoc_url=None)
    answer_errors(app)
    app.add_middleware(Gate, settings=settings)
    return app
