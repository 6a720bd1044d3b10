import asyncio
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from vllm.v1.engine.exceptions import EngineDeadError

from peagle.economics.prices import Price
from peagle.economics.shared_budgets import SharedBudget, edit_budgets
from pipelines.online import ingress
from pipelines.online.cost import CostView
from pipelines.online.errors import ApiError, EngineUnavailable
from pipelines.online.gateway.crashes import EngineCrashes
from pipelines.online.gateway.gate import GateSettings
from pipelines.online.gateway.keys import LOCAL, KeyRing, SharedBudgets, new_key
from pipelines.online.gateway.routes import get, post, with_pass
from pipelines.online.ingress import ask_engine, install_error_handlers
from pipelines.online.serve.calls import USAGE_RECORDER, stream_parts
from pipelines.online.serve.request_types import Chat
from pipelines.online.wire import Context, WholeAnswer, encoded

CONTEXT = Context(request_id="r", key="alice", account="a", num_choices=2)


def make_chat_request(context=CONTEXT, record_usage=lambda usage: None):
    """Return a chat request that the gate has admitted."""
    app = SimpleNamespace(state=SimpleNamespace(crashes=EngineCrashes()))
    scope = {"type": "http", "headers": encoded(context.headers()), "app": app}
    return Request(with_pass(scope, post("/v1/chat/completions"), record_usage=record_usage))


async def answer_and_calls(request, *ends):
    """Return the answer or error code, and the number of engine calls. Call i ends with `ends[i]`."""
    unused, started_at, called_at = list(ends), time.time(), []

    async def handler(body, request):
        context = Context.of(request.headers)
        first_asked_at = context.first_asked_at
        assert replace(context, first_asked_at=None) == CONTEXT
        assert first_asked_at is None or started_at <= first_asked_at <= called_at[0]
        called_at.append(time.time())
        end = unused.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    try:
        return await ask_engine(handler, SimpleNamespace(model="m"), request), len(ends) - len(unused)
    except ApiError as error:
        return error.code, len(ends) - len(unused)


@pytest.mark.parametrize("tokens", [None, 70])
def test_gateway_token_cap_is_applied_to_chat(monkeypatch, tokens):
    async def ray_chat(self, body, request):
        return body

    monkeypatch.setattr(ingress.OpenAiIngress, "chat", ray_chat)
    peagle_ingress = ingress.PeagleIngress.__new__(ingress.PeagleIngress)
    request = make_chat_request(Context(request_id="r", key="alice", cap_tokens=tokens))
    sent = asyncio.run(peagle_ingress.chat(Chat(model="m", messages=[]), request))
    assert (sent.max_completion_tokens, sent._is_capped) == (tokens, tokens is not None)


@pytest.mark.parametrize("window_s", ["inf", "1e999", "-inf", "nan", "0", "x"])
def test_invalid_window_is_refused(tmp_path, window_s):
    async def responses():
        peagle_ingress = ingress.PeagleIngress.__new__(ingress.PeagleIngress)
        peagle_ingress._shared_budgets = SharedBudgets(tmp_path)
        peagle_ingress._cost = CostView(tmp_path, Price.fixed(usd_per_hour=1, device="vcpu", num_devices=2))
        peagle_ingress._ring = None
        app = FastAPI()
        install_error_handlers(app)
        app.get("/v1/cost")(peagle_ingress.cost)

        async def admit(scope, receive, send):
            await app(with_pass(scope, get("/v1/cost"), key=LOCAL), receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(admit), base_url="http://localhost") as http:
            windows = [{"window_s": window} for window in (window_s, "1e308", "60")]
            period = {"start": "2026-11-01", "end": "2026-11-30", "by": "key"}
            queries = (*windows, period, {"start": "11/1"})
            return [await http.get("/v1/cost", params=query) for query in queries]

    refused, *answered, invalid_date = asyncio.run(responses())
    status = 422 if window_s == "x" else 400
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, "query.window_s")
    assert [answer.status_code for answer in answered] == [200, 200, 200]
    assert answered[-1].json()["by"] == ["key"]
    assert (invalid_date.status_code, invalid_date.json()["error"]["param"]) == (422, "query.start")


@pytest.mark.parametrize(("running", "status"), [((1, 2), 200), ((1, 0), 503), ((0, 0), 503)])
def test_ping_requires_an_engine_per_model(monkeypatch, running, status):
    counts = {f"m{number}": {"num_running_replicas": count} for number, count in enumerate(running)}
    monkeypatch.setattr(ingress, "replica_counts", lambda deployments: counts)
    peagle_ingress = ingress.PeagleIngress.__new__(ingress.PeagleIngress)
    peagle_ingress._deployments = {}
    answer = asyncio.run(peagle_ingress.ping())
    assert (answer.status_code, answer.body) == (status, b"")


@pytest.mark.parametrize("is_behind_sagemaker", [True, False])
def test_ping_exists_only_on_sagemaker(monkeypatch, tmp_path, is_behind_sagemaker):
    routes = {}
    monkeypatch.setattr(ingress, "make_fastapi_ingress", lambda _, *, endpoint_map, app: routes.update(endpoint_map))
    ingress.make_ingress(GateSettings(models=(), ledger=tmp_path, is_behind_sagemaker=is_behind_sagemaker))
    assert ("ping" in routes) == is_behind_sagemaker


def test_request_that_crashed_its_engine_is_not_retried():
    assert asyncio.run(answer_and_calls(make_chat_request(), EngineDeadError(), "answer")) == ("engine_crashed", 1)


def crash_with_newer_request(request, *ends):
    """Send a request whose first engine crashes while it also runs a newer request."""

    async def main():
        first = asyncio.create_task(answer_and_calls(request, *ends))
        await asyncio.sleep(0)
        crashes = request.app.state.crashes
        newer = crashes.start(request_id="newer", key="bob", account="b", model="m")
        newer.started_at += 1
        with pytest.raises(ApiError):
            await crashes.report(newer)
        return await first

    return asyncio.run(main())


def test_request_is_retried_once_if_a_newer_request_ran_in_the_crashed_engine():
    assert crash_with_newer_request(make_chat_request(), EngineDeadError(), "answer") == ("answer", 2)
    assert crash_with_newer_request(make_chat_request(), EngineDeadError(), EngineDeadError(), "answer") == (
        "engine_crashed",
        2,
    )


def test_request_is_retried_up_to_three_times_while_engines_are_unavailable(monkeypatch):
    monkeypatch.setattr(ingress, "CRASH_SETTLE_S", 0.0)
    unavailable = EngineUnavailable()
    assert asyncio.run(answer_and_calls(make_chat_request(), unavailable, unavailable, unavailable, "answer")) == (
        "answer",
        4,
    )
    assert asyncio.run(
        answer_and_calls(make_chat_request(), unavailable, unavailable, unavailable, unavailable, "answer")
    ) == ("overloaded", 4)


def test_whole_answer_passes_unparsed(monkeypatch):
    """The body is invalid JSON, which would fail if the ingress parsed it."""
    reports = []

    async def parts():
        yield whole

    async def ray_chat(body, request):
        return await anext(stream_parts(parts, USAGE_RECORDER.get()))

    whole = WholeAnswer(body=b"{not JSON", reported={"usage": {"completion_tokens": 2}})
    chat_request = make_chat_request(record_usage=reports.append)
    answer = asyncio.run(ask_engine(ray_chat, SimpleNamespace(model="m"), chat_request))
    assert (answer.body, answer.media_type) == (b"{not JSON", "application/json")
    assert reports == [{"usage": {"completion_tokens": 2}}]


@pytest.mark.parametrize(
    ("error", "code"), [(BackPressureError(9, 9), "overloaded"), (RuntimeError("x"), "internal_error")]
)
def test_overload_and_internal_errors_are_not_retried(error, code):
    assert asyncio.run(answer_and_calls(make_chat_request(), error, "answer")) == (code, 1)


def test_batches_use_the_current_limits_of_keys(monkeypatch, tmp_path):
    monkeypatch.setattr(ingress, "Batches", lambda *_, **options: options["current_key"])
    (_, alice), (_, revoked) = new_key("alice"), new_key("gone")
    endpoint = SimpleNamespace(_cost=SimpleNamespace(spent_usd=None), _ring=KeyRing(None, (alice,)))
    current_key = ingress.PeagleIngress._make_batches(endpoint, SimpleNamespace(uses_idle_slots=False))
    assert (current_key(alice), current_key(revoked)) == (alice.without_hash(), None)
    endpoint._ring = None
    assert ingress.PeagleIngress._make_batches(endpoint, SimpleNamespace(uses_idle_slots=False)) is None


def test_operator_sees_all_budgets(tmp_path):
    (_, alice), (_, bob), (_, boss) = (
        new_key("alice", budget_usd=1), new_key("bob", budget_usd=2), new_key("boss", is_operator=True),
    )  # fmt: skip
    peagle_ingress = ingress.PeagleIngress.__new__(ingress.PeagleIngress)
    peagle_ingress._cost = CostView(tmp_path, Price.fixed(usd_per_hour=1, device="vcpu", num_devices=2))
    peagle_ingress._ring, peagle_ingress._shared_budgets = KeyRing(None, (alice, bob, boss)), SharedBudgets(tmp_path)
    with edit_budgets(tmp_path / "budgets.json") as budgets:
        budgets["team=search"] = SharedBudget(name="team=search", budget_usd=3)

    async def cost(key):
        request = Request(with_pass({"type": "http", "headers": []}, get("/v1/cost"), key=key))
        return json.loads((await peagle_ingress.cost(request, None, None, None, None)).body)

    for_alice, for_operator = asyncio.run(cost(alice)), asyncio.run(cost(boss))
    assert for_alice["budgets"] == {"alice": {"spent_usd": 0.0, "left_usd": 1.0, "used": 0.0, "alert": None}}
    assert "shared_budgets" not in for_alice
    assert sorted(for_operator["budgets"]) == ["alice", "bob"]
    assert for_operator["shared_budgets"]["team=search"]["left_usd"] == 3.0
