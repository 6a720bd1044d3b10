import asyncio
import contextlib
import json
import os
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from peagle.economics.ledger import RequestReader
from peagle.errors import EngineError
from pipelines.online.replica import account
from pipelines.online.replica.relay import Pace, coalesce, convert_errors, in_pieces, relay
from pipelines.online.wire import Context, StreamEnd, events

CONTEXT = Context(request_id="r1", key="alice")
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
DRAFTS = {"speculative_decoding": {"acceptance_histogram": [1, 1], "num_draft_tokens": 2}}


def make_event(**fields):
    return f"data: {json.dumps(fields)}\n\n"


def token_event(text, count):
    return make_event(choices=[{"delta": {"content": text}}], usage={"prompt_tokens": 5, "completion_tokens": count})


STREAM = [
    [token_event("Hé", 1), token_event("llo", 2)],
    [make_event(choices=[], usage=USAGE, metrics=DRAFTS), "data: [DONE]\n\n"],
]


async def is_healthy():
    """Do nothing, like the health check of a live engine."""


async def generate(items, error=None):
    for item in items:
        yield item
    if error:
        raise error


def is_usage_report(item):
    """Return whether the item reports usage without any text."""
    return isinstance(item, StreamEnd) and not item.text


def relayed_items(engine_account, answers, **options):
    async def collect():
        relayed = relay(answers, partial(engine_account.begin, CONTEXT), **options)
        return [item async for item in relayed if not is_usage_report(item)]

    return asyncio.run(collect())


def read_record(tmp_path):
    (request,) = RequestReader(tmp_path / "ledger").new()
    return request


@pytest.mark.parametrize("shown_usage", ["never", "last", "each"])
def test_stream_reports_its_usage_to_the_gate(engine_account, shown_usage):
    def read(pace):
        async def collect():
            answers = relay(generate(STREAM), partial(engine_account.begin, CONTEXT), shown_usage=shown_usage)
            return [item async for item in in_pieces(answers, pace)]

        return asyncio.run(collect())

    for pieces in (read(Pace(0.0)), read(Pace(0.2))):  # the end is a separate piece, or joined with others
        (end,) = (piece for piece in pieces if isinstance(piece, StreamEnd))
        assert pieces[-1] is end
        assert (end.reported["usage"], end.reported["metrics"]) == (USAGE, DRAFTS)
        assert end.reported["peagle"]["request_id"] == "r1"
        texts = [piece.text if piece is end else piece[0] for piece in pieces]
        sent_events = [event for text in texts for event in events(text)]
        assert sent_events[-1] == "data: [DONE]\n\n"
        assert [event["usage"]["completion_tokens"] for event in sent_events[:-1] if "usage" in event] == {
            "never": [], "last": [2], "each": [1, 2, 2]
        }[shown_usage]  # fmt: skip
        assert len(sent_events) == (3 if shown_usage == "never" else 4)


def test_record_of_a_stream_has_times_cost_and_tokens(engine_account, clock, tmp_path):
    engine_account.ready()

    async def slow_answers():
        clock.now += 2
        yield STREAM[0]
        clock.now += 3
        yield STREAM[1]

    relayed_items(engine_account, slow_answers(), shown_usage="last")
    record = read_record(tmp_path)
    assert (
        record.request_id,
        record.key,
        record.model,
        record.drafter,
        record.outcome,
    ) == ("r1", "alice", "m", "head", "ok")
    assert record.ttft_s == pytest.approx(2)
    assert record.usage.busy_s == pytest.approx(5)
    assert record.usd == pytest.approx(5 * 2 * 0.01)
    assert (
        record.usage.num_prompt_tokens,
        record.usage.num_cached_tokens,
        record.usage.num_output_tokens,
    ) == (5, 4, 2)
    assert record.usage.speculation.accepted_per_position == (1,)


async def test_disconnected_stream_is_billed(engine_account, tmp_path):
    closed = []

    async def answers():
        try:
            yield STREAM[0]
            yield STREAM[1]
        finally:
            closed.append(True)

    stream = relay(answers(), partial(engine_account.begin, CONTEXT), shown_usage="last")
    async for _ in stream:
        break
    await stream.aclose()
    assert (read_record(tmp_path).outcome, read_record(tmp_path).usage.num_output_tokens, closed) == ("cut", 2, [True])


@pytest.mark.parametrize(("choices_per_prompt", "num_prompt_tokens"), [(1, 5 + 7 + 9), (2, 5 + 9)])
async def test_disconnected_stream_is_billed_for_every_prompt(
    engine_account, tmp_path, choices_per_prompt, num_prompt_tokens
):
    def choice_event(index, prompt_tokens, count):
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
        return make_event(choices=[{"index": index, "text": "x"}], usage=usage)

    # With two choices per prompt, choices 0 and 1 belong to the same prompt.
    second_prompt_tokens = 7 if choices_per_prompt == 1 else 5
    answers = generate(
        [
            [choice_event(2, 9, 1), choice_event(0, 5, 1)],
            [choice_event(1, second_prompt_tokens, 2), choice_event(0, 5, 3)],
            STREAM[1],
        ]
    )
    begin = partial(engine_account.begin, CONTEXT, choices_per_prompt=choices_per_prompt)
    stream = relay(answers, begin, shown_usage="last")
    await anext(stream)
    await anext(stream)
    await stream.aclose()
    assert (read_record(tmp_path).outcome, read_record(tmp_path).usage.num_output_tokens) == ("cut", 6)
    assert read_record(tmp_path).usage.num_prompt_tokens == num_prompt_tokens


class EngineDeadError(Exception):
    """A fake of vLLM's exception, which is recognised by its name."""


FAILURE = make_event(error={"message": "See stack trace", "type": "InternalServerError", "param": None, "code": 500})


@pytest.mark.parametrize(
    "failure_events", [[[FAILURE], ["data: [DONE]\n\n"]], [[token_event("!", 3), FAILURE, "data: [DONE]\n\n"]]]
)
@pytest.mark.parametrize("is_dead", [True, False])
def test_failure_events_of_vllm_are_raised(engine_account, tmp_path, failure_events, is_dead):
    engine_account.ready()
    seen = []

    async def check_health():
        if is_dead:
            raise EngineDeadError

    async def read():
        answers = convert_errors(generate([*STREAM[:1], *failure_events]), check_health)
        async for item in relay(answers, partial(engine_account.begin, CONTEXT), shown_usage="last"):
            seen.extend([] if is_usage_report(item) else item)

    with pytest.raises(EngineDeadError if is_dead else EngineError) as error:
        asyncio.run(read())
    assert len(seen) == len(STREAM[0])
    assert "stack trace" not in str(error.value)
    assert [record.outcome for record in RequestReader(tmp_path / "ledger").new()] == ([] if is_dead else ["failed"])


@pytest.mark.parametrize(
    "text",
    [
        make_event(error={"message": "no"}),
        make_event(error="no"),
        token_event('{"error": {"code": 500}}', 1),
        'data: "error"\n\n',
    ],
)
def test_other_events_are_not_failures(text):
    async def read():
        return [item async for item in convert_errors(generate([[text]]), is_healthy)]

    assert asyncio.run(read()) == [[text]]


def test_failed_request_is_billed(engine_account, clock, tmp_path):
    engine_account.ready()

    async def usage_reports(items, error):
        async def slow_answers():
            requests[0].sequences.add(SEQUENCE, {})
            clock.now += 2
            async for item in generate(items, error):
                yield item

        requests = []

        def begin():
            requests.append(engine_account.begin(CONTEXT))
            return requests[0]

        reports = []
        with contextlib.suppress(RuntimeError):
            reports.extend(
                [item async for item in relay(slow_answers(), begin, shown_usage="last") if is_usage_report(item)]
            )
        return reports

    refusal = SimpleNamespace(error=SimpleNamespace(code=400))
    for items, error, num_reports in (([], RuntimeError("boom"), 0), ([refusal], None, 1)):
        reports = asyncio.run(usage_reports(items, error))
        record = RequestReader(tmp_path / "ledger").new()[-1]
        assert (record.outcome, record.usage.busy_s, record.usd) == (
            "failed",
            pytest.approx(2),
            pytest.approx(2 * 2 * 0.01),
        )
        assert (record.usage.num_prompt_tokens, record.usage.num_output_tokens) == (800, 3)
        for report in reports[:num_reports]:
            assert report.reported["usage"] == {"prompt_tokens": 800, "completion_tokens": 3}
            assert report.reported["peagle"]["usd"] == pytest.approx(record.usd)


SEQUENCE = SimpleNamespace(
    request_id="s", prompt_len=800, request_index=0, spec_decode_metrics=None,
    stats=SimpleNamespace(num_generation_tokens=3, first_token_ts=0.0),
)  # fmt: skip


@pytest.mark.parametrize("constraint", ["response_format", None])
def test_generation_error_is_a_refusal_only_with_a_constraint(constraint):
    from vllm.exceptions import GenerationError

    async def read(answers):
        return [answer async for answer in convert_errors(answers, is_healthy, constraint=constraint)]

    for answers in (generate([[FAILURE]]), generate([], GenerationError())):
        if constraint is None:
            with pytest.raises(EngineError):
                asyncio.run(read(answers))
        else:
            (refusal,) = asyncio.run(read(answers))
            assert (refusal.error.code, refusal.error.param) == (400, constraint)


def test_stream_with_an_error_event_is_recorded_as_failed(engine_account, tmp_path):
    items = relayed_items(engine_account, generate([[make_event(error={"message": "no"})]]), shown_usage="last")
    assert next(events(items[0][0])) == {"error": {"message": "no"}}
    assert read_record(tmp_path).outcome == "failed"


class FakeWholeAnswer(SimpleNamespace):
    def model_dump(self, include):
        return {name: getattr(self, name) for name in include}

    def model_dump_json(self):
        return json.dumps(vars(self))


@pytest.mark.parametrize(
    "answer",
    [
        FakeWholeAnswer(usage=USAGE, metrics=DRAFTS),
        SimpleNamespace(error=SimpleNamespace(code=400)),
        [make_event(error={"message": "no"})],
    ],
)
def test_no_ttft_without_a_first_token(engine_account, clock, tmp_path, answer):
    async def slow_answers():
        clock.now += 2
        yield answer

    relayed_items(engine_account, slow_answers(), shown_usage="last")
    assert read_record(tmp_path).ttft_s is None


def test_whole_answer_contains_cost_and_acceptance(engine_account, tmp_path):
    (answer,) = relayed_items(
        engine_account, generate([FakeWholeAnswer(usage=USAGE, metrics=DRAFTS)]), shown_usage="last"
    )
    assert answer.reported["peagle"]["acceptance_length"] == 1.5
    assert json.loads(answer.body) == answer.reported
    assert read_record(tmp_path).usage.num_output_tokens == 2


async def test_cancelled_whole_answer_is_billed(engine_account, clock, tmp_path):
    engine_account.ready()

    async def answers():
        clock.now += 2
        with contextlib.suppress(asyncio.CancelledError):  # like vLLM's `chat_completion_full_generator`
            await asyncio.sleep(60)
        yield SimpleNamespace(error=SimpleNamespace(code=400, message="Client disconnected"))

    reader = asyncio.create_task(anext(relay(answers(), partial(engine_account.begin, CONTEXT), shown_usage="last")))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()
    record = read_record(tmp_path)
    assert (record.outcome, record.usage.num_output_tokens, record.usd) == ("cut", 0, pytest.approx(2 * 2 * 0.01))


def test_crashed_engine_leaves_no_record(engine_account, tmp_path):
    with pytest.raises(EngineDeadError):
        relayed_items(engine_account, generate(STREAM[:1], EngineDeadError()), shown_usage="last")
    assert not RequestReader(tmp_path / "ledger").new()


# --- durable records


async def test_answer_ends_after_its_record_is_on_disk(engine_account, tmp_path, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: may_end.wait(20))

    answers = [asyncio.create_task(collect_answer(engine_account, name)) for name in ("r1", "r2")]
    for _ in range(20):
        await asyncio.sleep(0.01)  # the event loop is not blocked
    ended_before = [task.done() for task in answers]
    may_end.set()
    await asyncio.gather(*answers)
    assert ended_before == [False, False]
    assert len(RequestReader(tmp_path / "ledger").new()) == 2


@pytest.mark.parametrize(("disk", "message"), [("fails", "Input/output error"), ("hangs", "the disk did not respond")])
def test_answer_ends_if_the_disk_fails_or_hangs(engine_account, monkeypatch, caplog, disk, message):
    may_end = threading.Event()

    def sync(_):
        if disk == "fails":
            raise OSError(5, "Input/output error")
        may_end.wait(20)

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(account, "_DISK_TIMEOUT_S", 0.2)
    asyncio.run(collect_answer(engine_account, "r"))
    may_end.set()
    assert message in caplog.text


async def collect_answer(engine_account, name):
    answers = generate(STREAM)
    begin = partial(engine_account.begin, Context(request_id=name, key="a"))
    return [item async for item in relay(answers, begin, shown_usage="last")]


REFUSAL = make_event(error={"message": "no", "code": 400})


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([[REFUSAL, "data: [DONE]\n\n"]], [("refused", 400)]),
        ([[REFUSAL], ["data: [DONE]\n\n"]], [("refused", 400)]),
        (STREAM, STREAM),
        ([[token_event("a", 1)], [REFUSAL]], [[token_event("a", 1)], [REFUSAL]]),
        ([[]], [[]]),
    ],
)
async def test_refusal_in_the_first_event_becomes_the_answer(items, expected):
    answers = convert_errors(
        generate(items), is_healthy, event_to_error_response=lambda event: ("refused", event["code"])
    )
    assert [item async for item in answers] == expected


# --- pieces of streams

INTERVAL_S = 0.05
SILENCE_S = 0.4  # much longer than delays on a busy machine


async def grouped_items(*groups, pause_s=0.0, error=None):
    """Yield the items of each group without a pause, and pause between groups."""
    for number, group in enumerate(groups):
        if number:
            await asyncio.sleep(pause_s)
        for item in group:
            yield item
    if error:
        raise error


def all_pieces(pieces):
    async def collect():
        return [piece async for piece in pieces]

    return asyncio.run(collect())


async def test_first_piece_is_sent_immediately():
    clock = asyncio.get_running_loop().time
    started_at, seen = clock(), []
    async for piece in coalesce(grouped_items([1], [2], [3], [4], pause_s=0.02), Pace(5)):
        seen.append((piece, clock() - started_at))
    (first, first_s), (second, second_s) = seen
    assert (first, second) == ([1], [2, 3, 4])
    assert first_s < 2
    assert second_s < 4, "the end of the source ends the wait"


async def test_piece_after_a_pause_is_sent_immediately():
    clock = asyncio.get_running_loop().time
    waits = []

    async def source():
        for item in range(3):
            yield item, clock()
            await asyncio.sleep(1.2 * SILENCE_S)

    async for piece in coalesce(source(), Pace(SILENCE_S)):
        waits += [clock() - sent_at for _, sent_at in piece]
    assert len(waits) == 3
    assert max(waits) < SILENCE_S / 2


def test_without_interval_each_item_is_a_piece():
    assert all_pieces(coalesce(grouped_items([1], [2], [3], pause_s=0.01), Pace(0))) == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("interval_s", "num_streams", "expected"), [(0.05, 1, 0.05), (0.05, 2, 0.05), (0.05, 8, 0.2), (0, 8, 0)]
)
def test_interval_grows_with_the_number_of_streams(interval_s, num_streams, expected):
    pace = Pace(interval_s, pieces_per_s=40)
    with contextlib.ExitStack() as streams:
        for _ in range(num_streams):
            streams.enter_context(pace.stream())
        assert pace.interval_s == expected
    assert pace.interval_s == interval_s


async def test_streams_share_the_rate_of_pieces():
    pieces_per_s, run_s = 40, 1.0

    async def source(end):
        while asyncio.get_running_loop().time() < end:
            yield 1
            await asyncio.sleep(0.002)

    async def count(pace, end):
        return len([piece async for piece in coalesce(source(end), pace)])

    pace, end = Pace(0.01, pieces_per_s), asyncio.get_running_loop().time() + run_s
    counts = await asyncio.gather(*(count(pace, end) for _ in range(8)))
    # The first and last piece of each stream are not limited.
    assert sum(counts) <= pieces_per_s * run_s + 2 * len(counts)
    assert min(counts) >= 3


async def test_answers_without_output_do_not_slow_streams():
    pace, end = Pace(INTERVAL_S, pieces_per_s=1), asyncio.Event()

    async def whole_answer():
        await end.wait()
        yield {"choices": []}

    async def collect():
        return [answer async for answer in in_pieces(whole_answer(), pace)]

    whole_answers = [asyncio.create_task(collect()) for _ in range(8)]
    await asyncio.sleep(0.01)
    stream = coalesce(grouped_items([1], [2]), pace)
    await anext(stream)
    interval_during = pace.interval_s
    end.set()
    answers = await asyncio.gather(*whole_answers)
    interval_after = pace.interval_s
    await stream.aclose()
    assert (interval_during, interval_after, pace.interval_s, answers) == (1, 1, INTERVAL_S, [[{"choices": []}]] * 8)


@pytest.mark.parametrize("items", [[], [1, 2]])
async def test_error_follows_earlier_items(items):
    seen, pieces = [], coalesce(grouped_items(items, error=ValueError("broken")), Pace(INTERVAL_S))
    if items:
        seen += await anext(pieces)
    with pytest.raises(ValueError, match="broken"):
        await anext(pieces)
    assert seen == items


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_closing_ends_the_source(is_cancelled):
    closed = []

    async def source():
        try:
            while True:
                yield 1
                await asyncio.sleep(0.001)
        finally:
            closed.append(True)

    async def listen(pieces, received):
        async for _ in pieces:
            received.set()

    pieces, received = coalesce(source(), Pace(INTERVAL_S)), asyncio.Event()
    if is_cancelled:
        listener = asyncio.create_task(listen(pieces, received))
        await received.wait()
        listener.cancel()
        await asyncio.wait([listener])
    else:
        await anext(pieces)
    await pieces.aclose()
    assert closed == [True]


def test_only_texts_are_joined():
    answers = grouped_items([["a", "b"]], [["c"], ["d"], {"error": 1}, ["e"]], pause_s=0.001)
    assert all_pieces(in_pieces(answers, Pace(INTERVAL_S))) == [["ab"], ["cd"], {"error": 1}, ["e"]]
