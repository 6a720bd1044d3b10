"""A fake endpoint without Ray or engines: its gate, page, ledger and metrics are real, but its answers are fixed.

A prompt that begins with "busy", "break", "slow", "html" or "differ" gets a special answer. For other prompts, each
model returns the same text.
"""

import asyncio
import json
import random
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from peagle.economics.ledger import append_request, write_session
from peagle.economics.prices import Price
from peagle.economics.usage import EngineSession, RequestUsage, UnitUsage
from peagle.requests.fields import CHAT_URL
from peagle.speculation import SpeculationStats
from pipelines.online.cost import CostView, requested_period
from pipelines.online.errors import ApiError, from_exception, overloaded
from pipelines.online.gateway.admission import ServedModel
from pipelines.online.gateway.gate import Gate, GateSettings
from pipelines.online.gateway.keys import KeyRecord, SharedBudgets
from pipelines.online.gateway.outgoing import Load, describe_load
from pipelines.online.gateway.routes import Rule, gate_pass_of, get, key_of, post
from pipelines.online.gateway.web_page import FOLDER, get_page
from pipelines.online.live import LiveView
from pipelines.online.wire import Context

MODEL_WITH_DRAFTER, MODEL_WITHOUT_DRAFTER = "smollm2-135m", "plain"
_DRAFTERS = {MODEL_WITH_DRAFTER: "smollm2-135m-peagle", MODEL_WITHOUT_DRAFTER: None}
_WORDS_PER_S = {MODEL_WITH_DRAFTER: 150, MODEL_WITHOUT_DRAFTER: 110}
_ROUTES = (
    get("/", Rule.PAGE), get(FOLDER + "{name}", Rule.PAGE), get("/health", Rule.OPEN), get("/v1/models"),
    get("/v1/live", Rule.POLL), get("/v1/cost", Rule.POLL), post(CHAT_URL, Rule.GENERATION),
)  # fmt: skip
_PRICE = Price.fixed(usd_per_hour=0.1026, device="vcpu", num_devices=2)
_TEXT = """Here is a function that returns the n-th Fibonacci number:

def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a

It keeps two neighbours of the sequence and moves one step on in each round, so it takes n steps and no more memory \
for a larger n. With n = 10 it returns 55."""
HTML = '<img src="https://example.org/x.png" onerror="alert(1)"> <script>alert(2)</script> & <b>done</b>'


def text_of(prompt: str, model: str) -> str:
    """Return the fixed answer of a model."""
    if prompt.startswith("html"):
        return HTML
    if prompt.startswith("slow"):
        return "and so on " * 1000
    if prompt.startswith("differ") and model == MODEL_WITHOUT_DRAFTER:
        return _TEXT.replace("neighbours of", "numbers of").replace("no more memory", "hardly any memory")
    return _TEXT


class FakeEndpoint:
    """The endpoint's HTTP server, in a thread.

    Args:
        folder: parent of the ledger.
        num_requests: number of requests per engine in the ledger, within the last few minutes.
        models: served names.
        budgets: keys with a budget.
        access: fields of `GateSettings` about API keys; by default, no key is required.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_requests: int = 0,
        models: tuple[str, ...] = (MODEL_WITH_DRAFTER, MODEL_WITHOUT_DRAFTER),
        budgets: tuple[KeyRecord, ...] = (),
        **access: Any,
    ) -> None:
        self.ledger = folder / "ledger"
        self.ledger.mkdir(parents=True)
        self._sessions = {model: f"session-{model}" for model in models}
        self._write_history(num_requests)
        self._settings = GateSettings(
            models=tuple(ServedModel(name=model, max_model_len=2048, drafter=_DRAFTERS[model]) for model in models),
            ledger=self.ledger,
            **({"requires_key": False} | access),
        )
        self._load, self._budgets = Load(), budgets
        self._cost = CostView(self.ledger, _PRICE)
        self._live = LiveView(self._cost)
        self._server = uvicorn.Server(
            uvicorn.Config(self._app(), host="127.0.0.1", port=0, log_level="error", ws="none", lifespan="off")
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/"

    def close(self) -> None:
        """Stop the server, even in the middle of an answer."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def _app(self) -> Starlette:
        routes = [
            Route("/", lambda request: get_page()),
            Route("/page/{name}", lambda request: get_page(request.path_params["name"])),
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/live", self._live_metrics),
            Route("/v1/cost", self._spending),
            Route(CHAT_URL, self._chat, methods=["POST"]),
        ]
        return Starlette(
            routes=routes,
            exception_handlers={ApiError: _error_response},
            middleware=[Middleware(Gate, settings=self._settings, routes=_ROUTES, load=self._load)],
        )

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "requires_key": self._settings.requires_key})

    async def _models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_card(model) for model in self._sessions]})

    async def _live_metrics(self, request: Request) -> JSONResponse:
        key = key_of(request)
        key_name = None if key.is_operator else key.name
        report = await asyncio.to_thread(self._live.report, key_name, int(request.query_params["window_s"]))
        replicas = {"num_running_replicas": 1, "num_starting_replicas": 0, "num_stopping_replicas": 0}
        load = {
            model: describe_load(_card(model)["peagle"], replicas, self._load.num_running(model))
            for model in self._sessions
        }
        return JSONResponse(report if key_name else report | {"load": load})

    async def _spending(self, request: Request) -> JSONResponse:
        query = request.query_params
        if not query:
            return JSONResponse(await asyncio.to_thread(self._report))
        days = (date.fromisoformat(query[name]) for name in ("start", "end"))
        period = requested_period(*days, query["by"], None)
        return JSONResponse(await asyncio.to_thread(self._cost.statement, *period))

    def _report(self) -> dict[str, Any]:
        holders = {"budgets": self._budgets, "shared_budgets": SharedBudgets(self.ledger).all()}
        return self._cost.report() | {name: self._cost.budgets(group) for name, group in holders.items()}

    async def _chat(self, request: Request) -> StreamingResponse:
        body = gate_pass_of(request).body.values
        prompt, model = body["messages"][-1]["content"], body["model"]
        if prompt.startswith("busy"):
            raise overloaded("all engines are busy or starting; try again")
        events = self._events(text_of(prompt, model), model, request, fails_midway=prompt.startswith("break"))
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(self, text: str, model: str, request: Request, *, fails_midway: bool) -> Any:
        started_at, words = time.time(), text.split(" ")
        for number, word in enumerate(words, 1):
            await asyncio.sleep(1 / _WORDS_PER_S[model])
            if fails_midway and number > 9:  # after the page has shown some words
                raise RuntimeError("an engine died")
            piece = word if number == len(words) else word + " "
            yield _event([{"delta": {"content": piece}, "finish_reason": None}], _usage(number))
        record = _record(
            self._sessions[model], model, len(words), started_at, time.time(), key=key_of(request).name, ttft_s=0.02
        )
        append_request(self.ledger, record)
        peagle_fields = {"usd": record.usd, "acceptance_length": record.usage.speculation.acceptance_length}
        yield _event([{"delta": {}, "finish_reason": "stop"}], _usage(len(words)))
        gate_pass_of(request).record_usage({"usage": _usage(len(words)), "peagle": peagle_fields})
        if Context.of(request.headers).shown_usage != "never":
            yield _event([], _usage(len(words)), peagle=peagle_fields)
        yield "data: [DONE]\n\n"

    def _write_history(self, num_requests: int, age_s: float = 400.0) -> None:
        """Write recent requests and a heartbeat of each engine."""
        rng, now = random.Random(5), time.time()
        for index, (model, session_id) in enumerate(self._sessions.items()):
            finished_at, busy_s = now - 1.0, 0.0
            for _ in range(num_requests):
                tokens = rng.randint(20, 120)
                duration_s = tokens / rng.gauss(_WORDS_PER_S[model] / 4, 3)  # slower than one chat, as under load
                ttft_s = rng.lognormvariate(-2.3, 0.5)  # with a median of 0.1 s
                record = _record(session_id, model, tokens, finished_at - duration_s, finished_at, ttft_s=ttft_s)
                append_request(self.ledger, record)
                busy_s += record.usage.busy_s
                finished_at -= duration_s + rng.expovariate(1 / 3)
            write_session(self.ledger, _session(session_id, model, index, now - age_s, now, busy_s))


def _error_response(request: Request, error: Exception) -> JSONResponse:
    refusal = from_exception(error)
    return JSONResponse(refusal.body(), status_code=refusal.status, headers=refusal.headers())


def _card(model: str) -> dict[str, Any]:
    peagle_fields = {
        "target": "smollm2-135m",
        "stand_in": True,
        "drafter": _DRAFTERS[model],
        "max_replicas": 2,
        "max_requests_per_replica": 9,
    }
    peagle_fields |= {"num_speculative_tokens": 3 if _DRAFTERS[model] else None}
    return {"id": model, "object": "model", "created": 0, "owned_by": "peagle", "peagle": peagle_fields}


def _session(session_id: str, model: str, index: int, started_at: float, now: float, busy_s: float) -> EngineSession:
    load_s = (now - started_at) / 10  # the first tenth of the session
    return EngineSession(
        session_id=session_id,
        engine_index=index,
        hostname="localhost",
        num_devices=1,
        device="vcpu",
        started_at=started_at,
        last_seen_at=now,
        load_s=load_s,
        compile_s=0.0,
        busy_s=busy_s,
        idle_s=now - started_at - load_s - busy_s,
        num_output_tokens=0,
        ended=False,
        model=model,
        usd_per_device_s=_PRICE.usd_per_device_s,
    )


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 20, "completion_tokens": num_tokens, "total_tokens": 20 + num_tokens}


def _event(choices: list[Any], usage: dict[str, int], **more: Any) -> str:
    return f"data: {json.dumps({'choices': choices, 'usage': usage, **more})}\n\n"


def _record(
    session_id: str,
    model: str,
    num_tokens: int,
    started_at: float,
    finished_at: float,
    *,
    ttft_s: float,
    key: str = "local",
) -> RequestUsage:
    drafts = round(num_tokens / 1.6)  # the acceptance length: 1 + 0.42 + 0.14 + 0.05
    stats = SpeculationStats(
        num_drafts=drafts,
        num_draft_tokens=3 * drafts,
        accepted_per_position=(round(drafts * 0.42), round(drafts * 0.14), round(drafts * 0.05)),
    )
    busy_s = finished_at - started_at
    return RequestUsage(
        request_id=f"{model}-{started_at}",
        key=key,
        model=model,
        drafter=_DRAFTERS[model],
        outcome="ok",
        ttft_s=ttft_s,
        usd=busy_s * _PRICE.usd_per_device_s,
        usage=UnitUsage(
            session_id=session_id,
            num_rows=1,
            num_failed_rows=0,
            num_prompt_tokens=20,
            num_cached_tokens=0,
            num_output_tokens=num_tokens,
            busy_s=busy_s,
            speculation=stats if _DRAFTERS[model] else SpeculationStats.empty(),
            started_at=started_at,
            finished_at=finished_at,
        ),
    )
