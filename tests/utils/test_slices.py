"""Long work on the event loop: one slice in an iteration of the loop, whoever has work."""

import asyncio
import itertools
import time
from collections.abc import Iterator

import pytest
from harness import run_async
from tgis.utils.slices import LITTLE, LONG_ITERATIONS, SLICE, SLICE_SECONDS, Slicer


class Work:
    """Items that count themselves when they are made."""

    def __init__(self) -> None:
        self.units = 0

    def items(self, count: int, cost: int) -> Iterator[int]:
        for number in range(count):
            self.units += cost
            yield number


async def _iterations(work: Work, tasks: "list[asyncio.Task[list[int]]]") -> list[int]:
    """Units of work in each iteration of the loop until the tasks are done."""
    done = []
    while not all(task.done() for task in tasks):
        before = work.units
        await asyncio.sleep(0)
        done.append(work.units - before)
    return done


@run_async
async def _runs_in_slices(callers: int, count: int, cost: int) -> None:
    slicer, work = Slicer(), Work()

    async def all_items() -> list[int]:
        return [item async for part in slicer.slices(work.items(count, cost), cost) for item in part]

    tasks = [asyncio.create_task(all_items()) for _ in range(callers)]
    units = await _iterations(work, tasks)
    assert all(task.result() == list(range(count)) for task in tasks)
    assert max(units) < SLICE + cost
    assert sum(units) == callers * count * cost


@pytest.mark.parametrize(("callers", "count", "cost"), [(1, 5000, 1), (40, 600, 1), (100, 3, 11), (7, 20, 1000)])
def test_an_iteration_of_the_loop_does_one_slice(callers: int, count: int, cost: int) -> None:
    _runs_in_slices(callers, count, cost)


@run_async
async def test_work_in_one_piece_is_alone_in_its_iteration() -> None:
    slicer, work = Slicer(), Work()

    async def one() -> list[int]:
        await slicer.turn(10 * SLICE)
        return list(work.items(1, 10 * SLICE))

    units = await _iterations(work, [asyncio.create_task(one()) for _ in range(5)])
    assert (max(units), sum(units)) == (10 * SLICE, 50 * SLICE)


@run_async
async def test_long_work_leaves_iterations_of_the_loop_to_others() -> None:
    slicer, work = Slicer(), Work()

    async def one() -> list[int]:
        await slicer.turn(SLICE)
        return list(work.items(1, SLICE))

    units = await _iterations(work, [asyncio.create_task(one()) for _ in range(5)])
    at = [iteration for iteration, done in enumerate(units) if done]
    assert min(later - earlier for earlier, later in itertools.pairwise(at)) >= LONG_ITERATIONS


@run_async
async def test_little_work_does_not_wait() -> None:
    slicer = Slicer()
    parts = slicer.slices(range(SLICE))
    with pytest.raises(StopIteration):  # as a coroutine that never suspends
        anext(parts).__await__().send(None)


@run_async
async def test_little_work_does_not_wait_for_long_work() -> None:
    slicer = Slicer()
    await slicer.turn(10 * SLICE)
    waiting = [asyncio.create_task(slicer.turn(SLICE)) for _ in range(3)]
    with pytest.raises(StopIteration):  # as a coroutine that never suspends
        anext(slicer.slices(range(1000))).__await__().send(None)
    with pytest.raises(StopIteration):
        slicer.turn(1).__await__().send(None)
    assert not any(task.done() for task in waiting)
    await asyncio.gather(*waiting)


@run_async
async def test_who_is_cancelled_leaves_the_turn_to_others() -> None:
    slicer, work = Slicer(), Work()

    async def all_items() -> list[int]:
        return [item async for part in slicer.slices(work.items(5000, 1)) for item in part]

    first, second, third = [asyncio.create_task(all_items()) for _ in range(3)]
    for _ in range(4):
        await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    assert await third == list(range(5000))


@run_async
async def test_work_that_takes_longer_than_it_should_is_alone_in_its_iteration() -> None:
    slicer, work = Slicer(), Work()

    async def slow() -> list[int]:
        await slicer.turn(LITTLE + 1)
        until = time.monotonic() + SLICE_SECONDS
        while time.monotonic() <= until:
            pass
        return list(work.items(1, LITTLE + 1))

    units = await _iterations(work, [asyncio.create_task(slow()) for _ in range(5)])
    assert (max(units), sum(units)) == (LITTLE + 1, 5 * (LITTLE + 1))
