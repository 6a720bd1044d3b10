import asyncio
import contextlib

import pytest

from pipelines.online.replica.relay import Pace, coalesce, in_pieces

INTERVAL_S = 0.05
SILENCE_S = 0.4  # much longer than delays on a busy machine


async def steps(*groups, pause_s=0.0, error=None):
    """Yield each group immediately, with a pause between groups."""
    for number, group in enumerate(groups):
        if number:
            await asyncio.sleep(pause_s)
        for item in group:
            yield item
    if error:
        raise error


def collected(pieces):
    async def collect():
        return [piece async for piece in pieces]

    return asyncio.run(collect())


def test_first_piece_is_sent_immediately():
    async def watch():
        clock = asyncio.get_running_loop().time
        began, seen = clock(), []
        async for piece in coalesce(steps([1], [2], [3], [4], pause_s=0.02), Pace(5)):
            seen.append((piece, clock() - began))
        return seen

    (first, at), (rest, later) = asyncio.run(watch())
    assert (first, rest) == ([1], [2, 3, 4])
    assert at < 2
    assert later < 4, "the end of the source ends the wait"


def test_piece_after_a_pause_is_sent_immediately():
    async def watch():
        clock = asyncio.get_running_loop().time
        waits = []

        async def source():
            for item in range(3):
                yield item, clock()
                await asyncio.sleep(1.2 * SILENCE_S)

        async for piece in coalesce(source(), Pace(SILENCE_S)):
            waits += [clock() - sent_at for _, sent_at in piece]
        return waits

    waits = asyncio.run(watch())
    assert len(waits) == 3
    assert max(waits) < SILENCE_S / 2


def test_each_step_is_a_piece_without_interval():
    assert collected(coalesce(steps([1], [2], [3], pause_s=0.01), Pace(0))) == [[1], [2], [3]]


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


def test_streams_share_the_rate_of_pieces():
    pieces_per_s, run_s = 40, 1.0

    async def source(end):
        while asyncio.get_running_loop().time() < end:
            yield 1
            await asyncio.sleep(0.002)

    async def count(pace, end):
        return len([piece async for piece in coalesce(source(end), pace)])

    async def listen():
        pace, end = Pace(0.01, pieces_per_s), asyncio.get_running_loop().time() + run_s
        return await asyncio.gather(*(count(pace, end) for _ in range(8)))

    counts = asyncio.run(listen())
    # The first and last piece of each stream are not limited.
    assert sum(counts) <= pieces_per_s * run_s + 2 * len(counts)
    assert min(counts) >= 3


def test_answers_without_output_do_not_count():
    async def scene():
        pace, end = Pace(INTERVAL_S, pieces_per_s=1), asyncio.Event()

        async def whole():
            await end.wait()
            yield {"choices": []}

        async def ask():
            return [answer async for answer in in_pieces(whole(), pace)]

        whole_answers = [asyncio.create_task(ask()) for _ in range(8)]
        await asyncio.sleep(0.01)
        stream = coalesce(steps([1], [2]), pace)
        await anext(stream)
        during = pace.interval_s
        end.set()
        answers = await asyncio.gather(*whole_answers)
        after = pace.interval_s
        await stream.aclose()
        return during, after, pace.interval_s, answers

    assert asyncio.run(scene()) == (1, 1, INTERVAL_S, [[{"choices": []}]] * 8)


@pytest.mark.parametrize("items", [[], [1, 2]])
def test_error_follows_earlier_items(items):
    async def watch():
        seen, pieces = [], coalesce(steps(items, error=ValueError("broken")), Pace(INTERVAL_S))
        if items:
            seen += await anext(pieces)
        with pytest.raises(ValueError, match="broken"):
            await anext(pieces)
        return seen

    assert asyncio.run(watch()) == items


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_closing_ends_the_source(is_cancelled):
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

    async def leave():
        pieces, received = coalesce(source(), Pace(INTERVAL_S)), asyncio.Event()
        if is_cancelled:
            listener = asyncio.create_task(listen(pieces, received))
            await received.wait()
            listener.cancel()
            await asyncio.wait([listener])
        else:
            await anext(pieces)
        await pieces.aclose()

    asyncio.run(leave())
    assert closed == [True]


def test_only_texts_are_joined():
    answers = steps([["a", "b"]], [["c"], ["d"], {"error": 1}, ["e"]], pause_s=0.001)
    assert collected(in_pieces(answers, Pace(INTERVAL_S))) == [["ab"], ["cd"], {"error": 1}, ["e"]]
