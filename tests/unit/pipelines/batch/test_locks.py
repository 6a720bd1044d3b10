import asyncio

from pipelines.batch.locks import SharedExclusiveLock, WeightedSemaphore


def test_exclusive_holder_excludes_shared_holders():
    async def main():
        lock, events = SharedExclusiveLock(), []

        async def shared(name, seconds):
            async with lock.shared():
                events.append(f"{name} in")
                await asyncio.sleep(seconds)
                events.append(f"{name} out")

        async def exclusive(name):
            async with lock.exclusive():
                events.append(f"{name} in")
                await asyncio.sleep(0.02)
                events.append(f"{name} out")

        first = asyncio.create_task(shared("a", 0.05))
        await asyncio.sleep(0.01)
        others = [asyncio.create_task(exclusive(name)) for name in ("x", "y")]
        await asyncio.sleep(0.01)
        late = asyncio.create_task(shared("b", 0))
        await asyncio.gather(first, *others, late)
        return events

    assert asyncio.run(main()) == ["a in", "a out", "x in", "x out", "y in", "y out", "b in", "b out"]


def test_cancelled_exclusive_waiter_lets_others_in():
    async def main():
        lock = SharedExclusiveLock()

        async def exclusive():
            async with lock.exclusive():
                raise AssertionError("acquired although a shared holder is inside")

        async with lock.shared():
            waiting = asyncio.create_task(exclusive())
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            async with lock.shared():
                return True

    assert asyncio.run(asyncio.wait_for(main(), 5))


def test_semaphore_is_fifo():
    async def main():
        slots, events = WeightedSemaphore(3), []

        async def hold(name, number, seconds=0.02):
            async with slots.acquire(number):
                events.append(f"{name} in")
                await asyncio.sleep(seconds)
                events.append(f"{name} out")

        holders = [("a", 2, 0.05), ("b", 3), ("c", 1), ("d", 9)]
        await asyncio.gather(*(hold(*holder) for holder in holders))
        return events

    in_order = [f"{name} {way}" for name in "abcd" for way in ("in", "out")]
    assert asyncio.run(asyncio.wait_for(main(), 5)) == in_order


def test_cancelled_semaphore_waiter_lets_others_in():
    async def main():
        slots = WeightedSemaphore(2)

        async def hold(number):
            async with slots.acquire(number):
                return number

        async with slots.acquire(1):
            waiting = asyncio.create_task(hold(2))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert await hold(1) == 1
        return await hold(2)

    assert asyncio.run(asyncio.wait_for(main(), 5)) == 2
