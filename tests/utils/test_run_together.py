"""Several coroutines of one call at a time."""

import asyncio

import pytest
from harness import run_async
from tgis.utils.run_together import run_together


class Worker:
    """Runs until it is told how to end."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started, self.cancelled = asyncio.Event(), asyncio.Event()

    async def work(self) -> None:
        self.started.set()
        try:
            await self.end
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@run_async
async def test_it_ends_with_the_last() -> None:
    workers = [Worker() for _ in range(3)]
    all_of_them = asyncio.create_task(run_together([worker.work() for worker in workers]))
    for worker in workers:
        await worker.started.wait()
        assert not all_of_them.done()
        worker.end.set_result(None)
    await all_of_them


@pytest.mark.parametrize("count", [1, 3])
@run_async
async def test_the_first_error_is_raised_and_ends_the_others(count: int) -> None:
    workers = [Worker() for _ in range(count)]
    error = ValueError("no")
    workers[0].end.set_exception(error)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - it is this very one
        await run_together([worker.work() for worker in workers])
    assert caught.value is error
    for worker in workers[1:]:
        await worker.cancelled.wait()


@run_async
async def test_to_cancel_it_is_to_cancel_all() -> None:
    workers = [Worker() for _ in range(3)]
    all_of_them = asyncio.create_task(run_together([worker.work() for worker in workers]))
    for worker in workers:
        await worker.started.wait()
    all_of_them.cancel()
    with pytest.raises(asyncio.CancelledError):
        await all_of_them
    assert all(worker.cancelled.is_set() for worker in workers)
