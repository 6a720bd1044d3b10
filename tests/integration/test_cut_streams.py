"""A replica in whose engine's place a test answers: what the ledger has of a client that leaves, of an engine that
dies, and of a request that vLLM refuses."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from peagle.economics.ledger import RequestReader
from peagle.economics.usage import EngineFacts
from pipelines.online.replica.account import EngineAccount
from pipelines.online.replica.lending import IdleSlots
from pipelines.online.replica.relay import Pace
from pipelines.online.wire import Context, events

HIDDEN = "the engine cannot take this request: a field has a value that it does not expect"
PROMPTS = (5, 7)  # tokens
ENGINE = EngineFacts(model="m", drafter=None, num_devices=1, device="vcpu", usd_per_device_s=0.01)


async def answers(num_choices):
    """An event of each choice of each prompt, and then nothing more for long."""
    for prompt, tokens in enumerate(PROMPTS):
        for choice in range(num_choices):
            index, usage = prompt * num_choices + choice, {"prompt_tokens": tokens, "completion_tokens": 1}
            yield [f"data: {json.dumps({'choices': [{'index': index, 'text': 'x'}], 'usage': usage})}\n\n"]
    await asyncio.sleep(3600)


@pytest.fixture
def replica(tmp_path, monkeypatch):
    from pipelines.online.replica import server

    account = EngineAccount(tmp_path / "ledger", ENGINE)

    class Replica(server.PeagleServer):
        def __init__(self):
            self._account, self._pace, self._slots, self._idle = account, Pace(0.0), 2, IdleSlots(2, 1.0)

        def __del__(self):
            pass

    async def completions(self, request, info=None):
        return answers(request.n or 1)

    async def check_health(self):
        """It is well."""

    monkeypatch.setattr(server.LLMServer, "check_health", check_health)
    monkeypatch.setattr(server.LLMServer, "completions", completions)
    yield Replica()
    account.end()


def test_a_stream_in_which_the_engine_dies_is_broken_off_and_free(replica, tmp_path, monkeypatch):
    from vllm.v1.engine.exceptions import EngineDeadError

    from pipelines.online.replica import server

    async def fails():
        yield await anext(answers(1))
        has_begun.append(True)
        yield [f"data: {json.dumps({'error': {'message': 'secret', 'code': 500}})}\n\n", "data: [DONE]\n\n"]

    async def completions(self, request, info=None):
        return fails()

    async def check_health(self):
        if has_begun:
            raise EngineDeadError

    seen, has_begun = [], []

    async def read():
        async for texts in await replica.completions(SimpleNamespace(n=1)):
            seen.extend(texts)

    monkeypatch.setattr(server.LLMServer, "completions", completions)
    monkeypatch.setattr(server.LLMServer, "check_health", check_health)
    with pytest.raises(EngineDeadError):
        asyncio.run(read())
    (text,) = seen
    assert next(events(text))["choices"]
    assert RequestReader(tmp_path / "ledger").new() == []


@pytest.mark.parametrize("n", [None, 2])
def test_a_client_that_leaves_a_completion_of_several_prompts_pays_for_each_once(replica, tmp_path, n):
    num_choices = len(PROMPTS) * (n or 1)

    async def leave():
        stream, num_seen = await replica.completions(SimpleNamespace(n=n)), 0
        while num_seen < num_choices:
            num_seen += sum(len(list(events(text))) for text in await anext(stream))
        await stream.aclose()

    asyncio.run(leave())
    (request,) = RequestReader(tmp_path / "ledger").new()
    assert (request.outcome, request.usage.num_output_tokens) == ("cut", num_choices)
    assert request.usage.num_prompt_tokens == sum(PROMPTS)


@pytest.mark.parametrize(("is_asked_again", "num_records"), [(True, 1), (False, 2)])
def test_what_another_engine_has_billed_is_not_billed_where_it_is_asked_again(
    replica, tmp_path, is_asked_again, num_records
):
    headers = Context(request_id="r", key="alice", first_asked_at=time.time() if is_asked_again else None).headers()
    died = EngineAccount(tmp_path / "ledger", ENGINE)
    died.ready()
    request = died.begin(Context(request_id="r", key="alice"))
    time.sleep(0.01)
    request.write("ok")
    died.end()

    async def leave():
        stream = await replica.completions(SimpleNamespace(n=1), SimpleNamespace(headers=headers))
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert [record.request_id for record in RequestReader(tmp_path / "ledger").new()] == ["r"] * num_records


def answered(replica, monkeypatch, *events, error):
    """What the replica answers where vLLM raises an error after these events."""
    from pipelines.online.replica import server

    async def fails():
        for event in events:
            yield event
        raise error

    async def completions(self, request, info=None):
        return fails()

    async def read():
        return [answer async for answer in await replica.completions(SimpleNamespace(n=1))]

    monkeypatch.setattr(server.LLMServer, "completions", completions)
    return asyncio.run(read())


@pytest.mark.parametrize(
    ("error", "code", "type"),
    [
        (TypeError("'<' not supported"), 400, "BadRequestError"),
        (OverflowError("int too big to convert"), 400, "BadRequestError"),
        (NotImplementedError("no such sampling"), 501, "NotImplementedError"),
    ],
)
def test_python_errors_of_vllm_have_its_status_and_not_their_text(replica, tmp_path, monkeypatch, error, code, type):
    from pipelines.online.errors import from_exception

    used, answer = answered(replica, monkeypatch, error=error)
    assert (used.text, used.reported["usage"]["completion_tokens"]) == ("", 0)
    assert (answer.error.code, answer.error.type, answer.error.message) == (code, type, HIDDEN)
    (request,) = RequestReader(tmp_path / "ledger").new()
    assert request.outcome == "failed"

    from ray.llm._internal.serve.core.configs.openai_api_models import OpenAIHTTPException

    raised = OpenAIHTTPException(answer.error.code, answer.error.message, answer.error.type)  # Ray's ingress
    assert (from_exception(raised).status, from_exception(raised).message) == (code, HIDDEN)


def test_what_is_no_refusal_stays_a_failure(replica, monkeypatch):
    with pytest.raises(RuntimeError, match="boom"):
        answered(replica, monkeypatch, error=RuntimeError("boom"))


def test_an_answer_that_has_begun_is_no_refusal(replica, monkeypatch):
    event = [f"data: {json.dumps({'choices': [{'index': 0, 'text': 'x'}]})}\n\n"]
    with pytest.raises(TypeError):
        answered(replica, monkeypatch, event, error=TypeError("late"))
