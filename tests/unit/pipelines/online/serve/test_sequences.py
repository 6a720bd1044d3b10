"""Tests with vLLM's real output processors, which get fake outputs of an engine core."""

import asyncio
import gc
import time
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, RequestSpecDecodeMetrics

from peagle.economics.ledger import RequestReader
from pipelines.online.replica.relay import Pace, in_pieces, relay
from pipelines.online.serve.sequences import Sequences, report_sequences
from pipelines.online.wire import Context

AGE_S = 100.0  # of each request when it reaches vLLM
DRAFT_METRICS = RequestSpecDecodeMetrics(num_spec_tokens=3, histogram=[1, 0, 2, 0], num_draft_tokens=9)


class FakeWholeAnswer(SimpleNamespace):
    def model_dump(self, include):
        return {name: getattr(self, name, None) for name in include}

    def model_dump_json(self):
        return "{}"


class FrontEnd:
    """A vLLM front end without an engine core. Tests send the outputs of a core with `send_outputs`."""

    def __init__(self):
        self.processor = OutputProcessor(None, log_stats=True)
        report_sequences(SimpleNamespace(output_processor=self.processor))

    def add(self, name, n=1, kind=RequestOutputKind.FINAL_ONLY):
        """Add a request as `AsyncLLM.add_request` does."""
        params = SamplingParams(n=n, max_tokens=9, output_kind=kind)
        names = [name] if n == 1 else [f"{index}_{name}" for index in range(n)]
        original, queue = self._request(name, params), RequestOutputCollector(kind, name)
        parent = None if n == 1 else ParentRequest(original)
        for index, sequence in enumerate(names):
            request = original if n == 1 else self._request(sequence, parent.get_child_info(index)[1])
            self.processor.add_request(request, "x", parent, index, queue)
        return names, queue

    def _request(self, name, params):
        return EngineCoreRequest(
            request_id=name, external_req_id="the same", prompt_token_ids=[1, 2], mm_features=None,
            sampling_params=params, pooling_params=None, arrival_time=time.time() - AGE_S, lora_request=None,
            cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip

    def send_outputs(self, *names, draft_metrics=DRAFT_METRICS, ends=True):
        outputs = [
            EngineCoreOutput(
                request_id=name, new_token_ids=[5], finish_reason=FinishReason.LENGTH if ends else None,
                spec_decode_metrics=draft_metrics if ends else None,
            )
            for name in names
        ]  # fmt: skip
        self.processor.process_outputs(outputs, time.monotonic(), IterationStats())

    async def answers(self, *names, n=1):
        """Yield one non-streaming answer to these prompts."""
        for name in names:
            children, queue = self.add(name, n)
            await asyncio.sleep(0.01)
            self.send_outputs(*children, ends=False)
            await asyncio.sleep(0.01)
            self.send_outputs(*children)
            assert (await queue.get()).finished
        num_tokens = 2 * n * len(names)
        yield FakeWholeAnswer(usage={"prompt_tokens": 2, "completion_tokens": num_tokens}, metrics=None)


@pytest.fixture
def engine():
    return FrontEnd()


def make_begin(account, request_id):
    return partial(account.begin, Context(request_id=request_id, key="alice"))


async def collect(answers):
    return [answer async for answer in answers]


def records_by_id(tmp_path):
    return {record.request_id: record for record in RequestReader(tmp_path / "ledger").new()}


@pytest.mark.parametrize(
    ("names", "n", "num_sequences"), [(["a"], 1, 1), (["a"], 3, 3), (["a", "b"], 1, 2), (["a", "b"], 2, 4)]
)
def test_drafts_of_all_choices_and_prompts_are_counted(engine, engine_account, tmp_path, names, n, num_sequences):
    begin = make_begin(engine_account, "r")
    asyncio.run(collect(relay(engine.answers(*names, n=n), begin, shown_usage="last")))
    speculation = records_by_id(tmp_path)["r"].usage.speculation
    assert speculation.num_drafts == 3 * num_sequences
    assert speculation.num_draft_tokens == 9 * num_sequences
    assert speculation.accepted_per_position == (2 * num_sequences, 2 * num_sequences, 0)


async def test_concurrent_requests_are_separate(engine, engine_account, tmp_path):
    def request_drafts(name, n):
        answers = relay(engine.answers(name, n=n), make_begin(engine_account, name), shown_usage="last")
        return collect(in_pieces(answers, Pace(0.0)))

    await asyncio.gather(request_drafts("one", 1), request_drafts("two", 2))
    result = {name: record.usage.speculation.num_drafts for name, record in records_by_id(tmp_path).items()}
    assert result == {"one": 3, "two": 6}


@pytest.mark.parametrize("n", [1, 2])
def test_whole_answer_has_a_ttft(engine, engine_account, tmp_path, n):
    """The TTFT is measured from the start of the request in the engine's account."""
    started_at = time.time()
    begin = make_begin(engine_account, "r")
    (answer,) = asyncio.run(collect(relay(engine.answers("a", n=n), begin, shown_usage="last")))
    record = records_by_id(tmp_path)["r"]
    assert 0.01 <= record.ttft_s <= time.time() - started_at - 0.01
    assert answer.reported["peagle"]["ttft_s"] == pytest.approx(record.ttft_s, abs=1e-4)


def test_cancelled_whole_answer_has_a_ttft(engine, engine_account, tmp_path):
    async def answers(tokens):
        names, queue = engine.add("-".join(tokens))
        for _ in tokens:
            engine.send_outputs(*names, ends=False)
        await queue.get()
        yield

    async def cancel(name, tokens):
        stream = relay(answers(tokens), make_begin(engine_account, name), shown_usage="last")
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        reader.cancel()
        await asyncio.wait([reader])

    asyncio.run(cancel("with tokens", ["a", "b"]))
    asyncio.run(cancel("without tokens", []))
    result = records_by_id(tmp_path)
    assert {name: record.outcome for name, record in result.items()} == {"with tokens": "cut", "without tokens": "cut"}
    assert result["with tokens"].ttft_s >= 0
    assert result["without tokens"].ttft_s is None
    assert result["with tokens"].usage.speculation.num_drafts == 0


def test_drafts_of_a_merged_stream_end_are_kept(engine):
    sequences = Sequences()
    sequences.listen()
    names, queue = engine.add("a", kind=RequestOutputKind.DELTA)
    engine.send_outputs(*names, ends=False)
    engine.send_outputs(*names)
    (output,) = queue.get_nowait().outputs
    assert output.finish_reason == "length"
    assert output.spec_decode_metrics is None, "vLLM now keeps the drafts, so this workaround can be removed"
    assert sequences.speculation.num_drafts == 3


def test_vllm_reports_no_drafts_after_a_stop_string(engine):
    """The core has the drafts, but the front end finds the stop string and aborts the sequence in the core."""
    sequences = Sequences()
    sequences.listen()
    names, queue = engine.add("a", n=2)
    engine.processor.request_states[names[0]].detokenizer.update = lambda *_: "stop"
    engine.send_outputs(names[0], ends=False)
    engine.send_outputs(names[1])
    assert [output.finish_reason for output in queue.get_nowait().outputs] == ["stop", "length"]
    assert sequences.speculation.num_drafts == 3  # only the second sequence's


def test_ended_sequences_are_dropped(engine):
    sequences = Sequences()
    sequences.listen()
    states = []
    for number in range(5):
        names, _ = engine.add(f"beam-{number}", n=2)
        states += [weakref.ref(engine.processor.request_states[name]) for name in names]
        first_token_at = sequences.first_token_at
        engine.send_outputs(*names)
        assert first_token_at in (None, sequences.first_token_at), "the first token of all sequences counts"
    assert sequences.speculation.num_drafts == 3 * len(states)
    gc.collect()
    # The next sequence would drop the last two.
    assert [state() is None for state in states] == [True] * 8 + [False] * 2


def test_only_later_sequences_count_and_drafts_are_optional(engine):
    async def answer(draft_metrics):
        names, _ = engine.add("a")
        engine.send_outputs(*names, draft_metrics=draft_metrics)

    asyncio.run(answer(DRAFT_METRICS))
    sequences = Sequences()
    sequences.listen()
    assert (sequences.speculation, sequences.first_token_at) == (None, None)
    asyncio.run(answer(None))
    assert sequences.speculation is None
    assert sequences.first_token_at == pytest.approx(time.time(), abs=5)
