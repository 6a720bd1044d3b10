"""A replica in whose engine's place a test answers: what the ledger has of a client that leaves, and of an engine that
dies."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from peagle.economics.ledger import RequestReader
from pipelines.online.account import Engine, EngineAccount
from pipelines.online.answers import events
from pipelines.online.coalesce import Pace

PROMPTS = (5, 7)  # tokens


async def answers(num_choices):
    """An event of each choice of each prompt, and then nothing more for long."""
    for prompt, tokens in enumerate(PROMPTS):
        for choice in range(num_choices):
            index, usage = prompt * num_choices + choice, {"prompt_tokens": tokens, "completion_tokens": 1}
            yield [f"data: {json.dumps({'choices': [{'index': index, 'text': 'x'}], 'usage': usage})}\n\n"]
    await asyncio.sleep(3600)


@pytest.fixture
def replica(tmp_path, monkeypatch):
    from pipelines.online import server

    engine = Engine(model="m", drafter=None, num_devices=1, device="vcpu", usd_per_device_s=0.01)
    account = EngineAccount(tmp_path / "ledger", engine)

    class Replica(server.PeagleServer):
        def __init__(self):
            self._account, self._pace = account, Pace(0.0)

        def __del__(self):
            pass

    async def completions(self, request, info=None):
        return answers(request.n or 1)

    monkeypatch.setattr(server.LLMServer, "completions", completions)
    yield Replica()
    account.end()


def test_a_stream_in_which_the_engine_dies_is_broken_off_and_free(replica, tmp_path, monkeypatch):
    from vllm.v1.engine.exceptions import EngineDeadError

    from pipelines.online import server

    async def fails():
        yield await anext(answers(1))
        yield [f"data: {json.dumps({'error': {'message': 'secret', 'code': 500}})}\n\n", "data: [DONE]\n\n"]

    async def completions(self, request, info=None):
        return fails()

    async def check_health(self):
        raise EngineDeadError

    seen = []

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
