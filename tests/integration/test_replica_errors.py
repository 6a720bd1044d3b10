"""A replica with a fake vLLM: errors before and during its answers, and their ledger records."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from ray.llm._internal.serve.core.configs.openai_api_models import OpenAIHTTPException

from peagle.economics.ledger import RequestReader
from peagle.economics.usage import EngineFacts
from pipelines.online.errors import from_exception
from pipelines.online.replica import server
from pipelines.online.replica.account import EngineAccount
from pipelines.online.replica.lending import IdleSlots
from pipelines.online.replica.relay import Pace
from pipelines.online.wire import events

HIDDEN_MESSAGE = "the engine cannot process this request: a field has an unexpected value"
ENGINE = EngineFacts(model="m", drafter=None, num_devices=1, device="vcpu", usd_per_device_s=0.01)
TOKEN = [f"data: {json.dumps({'choices': [{'index': 0, 'text': 'x'}]})}\n\n"]


@pytest.fixture
def replica(tmp_path):
    account = EngineAccount(tmp_path / "ledger", ENGINE)

    class Replica(server.PeagleServer):
        def __init__(self):
            self._account, self._pace, self._max_num_seqs, self._idle_slots = account, Pace(0.0), 2, IdleSlots(2, 1.0)

        def __del__(self):
            pass

    yield Replica()
    account.end()


@pytest.fixture
def collect_answer(replica, monkeypatch):
    """Return a function that appends the replica's answer to a list. vLLM yields `items`, then raises `error`."""

    def read(answer, *items, error=None, health_error=None):
        yielded = []

        async def generate():
            for item in items:
                yielded.append(item)
                yield item
            if error:
                raise error

        async def completions(self, request, info=None):
            return generate()

        async def check_health(self):
            if health_error and yielded:
                raise health_error

        async def consume():
            async for item in await replica.completions(SimpleNamespace(n=1)):
                answer.append(item)

        monkeypatch.setattr(server.LLMServer, "completions", completions)
        monkeypatch.setattr(server.LLMServer, "check_health", check_health)
        asyncio.run(consume())

    return read


def test_stream_is_interrupted_and_not_charged_if_the_engine_dies(collect_answer, tmp_path):
    from vllm.v1.engine.exceptions import EngineDeadError

    answer, failure = [], [f"data: {json.dumps({'error': {'message': 'secret', 'code': 500}})}\n\n", "data: [DONE]\n\n"]
    with pytest.raises(EngineDeadError):
        collect_answer(answer, TOKEN, failure, health_error=EngineDeadError())
    [[text]] = answer
    assert next(events(text))["choices"]
    assert RequestReader(tmp_path / "ledger").new() == []


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (TypeError("'<' not supported"), 400, "BadRequestError"),
        (OverflowError("int too big to convert"), 400, "BadRequestError"),
        (NotImplementedError("no such sampling"), 501, "NotImplementedError"),
    ],
)
def test_python_errors_have_vllms_status_without_their_text(collect_answer, tmp_path, error, code, kind):
    collect_answer(answer := [], error=error)
    end, refusal = answer
    assert (end.text, end.reported["usage"]["completion_tokens"]) == ("", 0)
    assert (refusal.error.code, refusal.error.type, refusal.error.message) == (code, kind, HIDDEN_MESSAGE)
    assert [request.outcome for request in RequestReader(tmp_path / "ledger").new()] == ["failed"]
    raised = OpenAIHTTPException(code, refusal.error.message, kind)  # what Ray's ingress raises
    assert (from_exception(raised).status, from_exception(raised).message) == (code, HIDDEN_MESSAGE)


@pytest.mark.parametrize(("items", "error"), [([], RuntimeError("boom")), ([TOKEN], TypeError("late"))])
def test_other_errors_are_raised(collect_answer, items, error):
    with pytest.raises(type(error)):
        collect_answer([], *items, error=error)
