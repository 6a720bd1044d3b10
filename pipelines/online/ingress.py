"""The HTTP routes: Ray's `OpenAiIngress` behind the gate, plus `/health`, `/v1/cost`, `/v1/live` and the web page.

Ray's own FastAPI application sends internal exceptions to clients and lets every web site send requests with
credentials (CORS), so only its handlers are used. Embeddings, scores and transcriptions are omitted, because no
supported model offers them.
"""

import asyncio
import datetime
import functools
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress
from starlette.exceptions import HTTPException

from peagle.economics.prices import Price
from peagle.errors import shown
from peagle.private import restrict_new_files
from peagle.requests.fields import CHAT_URL, COMPLETIONS_URL
from pipelines.cluster.metrics import create_metric
from pipelines.online.batches.routes import ROUTES as BATCH_ROUTES
from pipelines.online.batches.routes import Batches, BatchRoutes
from pipelines.online.batches.settings import BatchSettings
from pipelines.online.batches.work import Runner
from pipelines.online.cost import CostView, requested_period
from pipelines.online.errors import ApiError, from_exception, from_validation, is_engine_death, is_engine_unavailable
from pipelines.online.gateway.budget_watch import BudgetWatch
from pipelines.online.gateway.crashes import CRASH_SETTLE_S, Attempt, EngineCrashes
from pipelines.online.gateway.gate import Gate, GateSettings
from pipelines.online.gateway.keys import KeyRing, SharedBudgets
from pipelines.online.gateway.outgoing import Load, describe_load
from pipelines.online.gateway.routes import Route, Rule, gate_pass_of, get, guarded_app, key_of, post
from pipelines.online.gateway.web_page import DOCS, FOLDER, get_docs, get_page
from pipelines.online.live import MAX_WINDOW_S, LiveView, publish_break_even_forever
from pipelines.online.serve.calls import USAGE_RECORDER, Answered, CancellingHandle
from pipelines.online.serve.ray_names import replica_counts
from pipelines.online.serve.request_types import ChatBody, CompletionBody
from pipelines.online.wire import PING_URL, Context, error_response, with_headers


def install_error_handlers(app: FastAPI) -> None:
    async def respond(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            api_error = from_validation(list(error.errors()))
        else:
            api_error = from_exception(error)
        headers, body = error_response(api_error)
        return Response(body, api_error.status, headers)

    app.add_exception_handler(RequestValidationError, respond)
    app.add_exception_handler(HTTPException, respond)


_MAX_DEAD_ENGINES = 3
_ROUTES: dict[str, Route] = {
    "models": get("/v1/models"),
    "model_data": get("/v1/models/{model:path}"),
    "completions": post(COMPLETIONS_URL, Rule.GENERATION),
    "chat": post(CHAT_URL, Rule.GENERATION),
    "cost": get("/v1/cost", Rule.POLL),
    "live": get("/v1/live", Rule.POLL),
    "page": get("/", Rule.PAGE, include_in_schema=False),
    "page_file": get(FOLDER + "{name}", Rule.PAGE, include_in_schema=False),
    "health": get("/health", Rule.OPEN, openapi_extra={"security": []}),
    "docs": get(DOCS, Rule.PAGE, include_in_schema=False),
    "docs_file": get(DOCS + "/{name}", Rule.PAGE, include_in_schema=False),
    "schema": get("/openapi.json", Rule.PAGE, include_in_schema=False),
    **BATCH_ROUTES,
}
_EXAMPLES: dict[str, dict[str, Any]] = {
    CHAT_URL: {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    COMPLETIONS_URL: {"prompt": "The capital of France is"},
}


class PeagleIngress(BatchRoutes, OpenAiIngress):  # type: ignore[misc]  # Ray's classes are untyped
    def __init__(
        self,
        llm_deployments: Any,
        model_cards: Any,
        *,
        settings: GateSettings,
        price: Price,
        batches: BatchSettings | None = None,
    ) -> None:
        restrict_new_files()
        super().__init__({model: CancellingHandle(handle) for model, handle in llm_deployments.items()}, model_cards)
        self._cards: dict[str, dict[str, Any]] = model_cards
        self._cost = CostView(settings.ledger, price)
        self._ring = KeyRing(settings.key_file, settings.fixed_keys) if settings.requires_key else None
        self._shared_budgets = SharedBudgets(settings.ledger)
        self._deployments = {model: handle.deployment_name for model, handle in llm_deployments.items()}
        self.batches = self._make_batches(batches) if batches else None
        break_even = {
            name: card["peagle"].get("break_even_acceptance_length", {}) for name, card in model_cards.items()
        }
        self._live = LiveView(self._cost, break_even)
        self._start_metrics(has_break_even=any(break_even.values()))
        self._requires_key = settings.requires_key

    def _make_batches(self, settings: BatchSettings) -> Batches:
        current_key = self._ring.current if self._ring else None
        if settings.uses_idle_slots:  # batches find the endpoint's engines by their names in Ray Serve
            app_name = serve.get_replica_context().app_name
            settings = replace(settings, application=app_name, deployments=self._deployments)
        return Batches(settings, Runner(), spent_usd=self._cost.spent_usd, current_key=current_key)

    def _start_metrics(self, *, has_break_even: bool) -> None:
        """Publish the use of budgets, and break-even acceptance lengths if the models have any."""
        used_ratio = create_metric("peagle_budget_used_ratio")
        watch = BudgetWatch(
            self._ring,
            self._shared_budgets,
            self._cost.totals,
            on_used=lambda name, share: used_ratio.set(share, {"key": name}),
        )
        threading.Thread(target=watch.watch_forever, daemon=True).start()
        if has_break_even:
            break_even_length = create_metric("peagle_break_even_acceptance_length")
            drafters = {name: card["peagle"]["drafter"] or "" for name, card in self._cards.items()}
            threading.Thread(
                target=publish_break_even_forever,
                args=(
                    self._live,
                    lambda name, value: break_even_length.set(value, {"model_name": name, "drafter": drafters[name]}),
                ),
                daemon=True,
            ).start()

    async def models(self) -> JSONResponse:
        """Return the list of models."""
        return JSONResponse({"object": "list", "data": list(self._cards.values())})

    async def model_data(self, model: str) -> JSONResponse:
        """Return a model."""
        if model not in self._cards:
            raise ApiError(404, f"there is no model {shown(model)}", code="model_not_found")
        return JSONResponse(self._cards[model])

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a chat completion, streaming or not."""
        if (context := Context.of(request.headers)) and context.cap_tokens:
            body.cap(context.cap_tokens)
        return await ask_engine(super().chat, body, request)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Answer a completion, streaming or not."""
        return await ask_engine(super().completions, body, request)

    async def cost(
        self,
        request: Request,
        window_s: float | None = Query(None, gt=0, allow_inf_nan=False),
        start: datetime.date | None = None,
        end: datetime.date | None = None,
        by: str | None = None,
    ) -> JSONResponse:
        """Return usage and cost: for all keys if the client is an operator, otherwise for its key.

        With `start`, `end` (UTC days, inclusive) or `by`, return the cost report of `peagle cost` for that period.
        """
        has_period = any(value is not None for value in (start, end, by))
        period = requested_period(start, end, by, window_s) if has_period else None
        key = key_of(request)
        name = None if key.is_operator else key.name
        await self._cost.require_loaded()
        if period is None:
            report = await asyncio.to_thread(self._cost.report, name, window_s)
            keys = self._ring.all() if key.is_operator and self._ring else [key]
            report["budgets"] = await asyncio.to_thread(self._cost.budgets, keys)
            if key.is_operator:
                report["shared_budgets"] = await asyncio.to_thread(self._cost.budgets, self._shared_budgets.all())
            return JSONResponse(report)
        return JSONResponse(await asyncio.to_thread(self._cost.statement, *period, name))

    async def live(
        self, request: Request, window_s: int = Query(60, ge=60, le=MAX_WINDOW_S, multiple_of=60)
    ) -> JSONResponse:
        """Return metrics of the last minutes: for all keys if the client is an operator, otherwise for its key."""
        key = key_of(request)
        await self._cost.require_loaded()
        if not key.is_operator:
            return JSONResponse(await asyncio.to_thread(self._live.report, key.name, window_s))
        report = await asyncio.to_thread(self._live.report, None, window_s)
        state = request.app.state
        notes = [*report["notes"], *state.crashes.notes()]
        counts = await asyncio.to_thread(replica_counts, self._deployments)
        loads = {
            model: describe_load(self._cards[model]["peagle"], replicas, state.load.num_running(model))
            for model, replicas in counts.items()
        }
        return JSONResponse(report | {"notes": notes, "load": loads})

    async def page(self) -> Response:
        return get_page()

    async def page_file(self, name: str) -> Response:
        return get_page(name)

    async def docs(self) -> Response:
        return get_docs()

    async def docs_file(self, name: str) -> Response:
        return get_docs(name)

    async def schema(self, request: Request) -> JSONResponse:
        schema = await asyncio.to_thread(request.app.openapi)
        for path, example in _EXAMPLES.items():
            (content,) = schema["paths"][path]["post"]["requestBody"]["content"].values()
            content["example"] = {"model": next(iter(self._cards)), **example, "max_tokens": 64}
        schemas = {**schema.get("components", {}), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        schema = {**schema, "components": schemas, "security": [{"key": []}]}
        prefix = request.scope.get("root_path", "").rstrip("/")
        return JSONResponse(schema | ({"servers": [{"url": prefix}]} if prefix else {}))

    async def health(self) -> JSONResponse:
        """Report that the ingress is up. The state of engines is in Serve's status."""
        return JSONResponse({"status": "ok", "requires_key": self._requires_key})

    async def ping(self) -> Response:
        """Return 200 if each model has a running engine according to Serve, else 503.

        The engines are not called, because busy engines would reply too late, and SageMaker would stop the container.
        """
        counts = await asyncio.to_thread(replica_counts, self._deployments)
        is_up = all(replicas["num_running_replicas"] for replicas in counts.values())
        return Response(status_code=200 if is_up else 503)


async def ask_engine(handler: Callable[[Any, Request], Awaitable[Response]], body: Any, request: Request) -> Response:
    """Return an engine's answer. Any failure is raised as an ApiError.

    A request whose engine crashed before the first output is retried once, unless it might have caused the crash.
    """
    asked_at, record_usage, context = time.time(), gate_pass_of(request).record_usage, Context.of(request.headers)
    assert record_usage is not None, "the gate sets it on routes that engines answer"
    assert context is not None, "the gate sets it on routes that engines answer"
    USAGE_RECORDER.set(record_usage)
    crashes: EngineCrashes = request.app.state.crashes
    attempt = crashes.start(request_id=context.request_id, key=context.key, account=context.account, model=body.model)
    try:
        try:
            return await _call_live_engine(handler, body, request)
        except Exception as error:
            if not is_engine_death(error):
                raise
        # With `first_asked_at`, the second engine only bills the request if the first engine has not billed it.
        headers = with_headers(request.scope["headers"], replace(context, first_asked_at=asked_at).headers())
        retry_request = Request({**request.scope, "headers": headers}, request.receive)
        async with crashes.retry(attempt):
            try:
                return await _call_live_engine(handler, body, retry_request)
            except Exception as error:
                if not is_engine_death(error):
                    raise
        await crashes.report(attempt)
    except Answered as answered:  # the engine's non-streaming answer
        return Response(answered.body, media_type="application/json")
    except Exception as error:
        raise from_exception(error) from error
    raise AssertionError("`report` raises after a request's second crash")


async def _call_live_engine(
    handler: Callable[[Any, Request], Awaitable[Response]], body: Any, request: Request
) -> Response:
    """Call engines until one is alive. Serve might still route requests to a dead engine for a moment."""
    for _ in range(_MAX_DEAD_ENGINES):
        try:
            return await handler(body, request)
        except Exception as error:
            if not is_engine_unavailable(error):
                raise
        await asyncio.sleep(CRASH_SETTLE_S)
    return await handler(body, request)


def make_ingress(settings: GateSettings) -> Any:
    return make_fastapi_ingress(PeagleIngress, endpoint_map=_routes(settings), app=make_app(settings))


def make_app(settings: GateSettings) -> FastAPI:
    """Return an application with the gate and OpenAI's error format, but without routes."""

    def count_crash(suspect: Attempt) -> None:
        _crash_counter().inc(1, {"model_name": suspect.model})

    app = guarded_app(title="peagle")
    install_error_handlers(app)
    app.state.load, app.state.crashes = Load(), EngineCrashes(on_crash=count_crash)
    app.add_middleware(
        Gate,
        settings=settings,
        routes=tuple(_routes(settings).values()),
        load=app.state.load,
        crashes=app.state.crashes,
    )
    return app


@functools.cache
def _crash_counter() -> Any:
    return create_metric("peagle_engine_crashes_total")


def _routes(settings: GateSettings) -> dict[str, Route]:
    ping = get(PING_URL, Rule.OPEN, include_in_schema=False)
    return _ROUTES | ({"ping": ping} if settings.is_behind_sagemaker else {})
