"""Processes forked from one that has imported what they need, and has computed nothing; some share a model."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import FileStore

from tgis.engines.distributed import ranks

_IMPORTED = ["forked_processes", "lockstep", "gguf_files", "quantized_formats", "tgis.engines.padded.engine"]
_SECONDS = 300


def forked(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of a module returns in a process where nothing else has run."""
    return _forked([(function, args)])[0]


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function of a module returns on each of so many ranks."""
    with tempfile.NamedTemporaryFile() as store:
        return _forked([(_run_rank, (rank, count, store.name, function, args)) for rank in range(count)])


def _forked(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    pipes = [context.Pipe(duplex=False) for _ in calls]
    processes = [
        context.Process(target=_run, args=(pipe, *call), daemon=True)
        for call, (_, pipe) in zip(calls, pipes, strict=True)
    ]
    for process, (_, pipe) in zip(processes, pipes, strict=True):
        process.start()
        pipe.close()
    try:
        results = [pipe.recv() if pipe.poll(_SECONDS) else TimeoutError() for pipe, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _run_rank(rank: int, count: int, store: str, function: Callable[..., Any], args: Any) -> Any:
    ranks.init_ranks(rank, count, FileStore(store, count), count)
    return function(*args)


def _run(pipe: Connection, function: Callable[..., Any], args: Any) -> None:
    try:
        pipe.send(function(*args))
    except Exception as error:  # noqa: BLE001 - the process ends next
        pipe.send(error)
    finally:
        pipe.close()
        os._exit(0)
