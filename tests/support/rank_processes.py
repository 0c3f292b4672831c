"""Processes that share a model, forked from one that has imported what they need."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tgis.engines.distributed import ranks

_IMPORTED = ["rank_processes", "lockstep", "gguf_files", "quantized_formats", "tgis.engines.padded.engine"]
_SECONDS = 120


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function of a module returns on each of so many ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with tempfile.NamedTemporaryFile() as store:
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        calls = [(rank, count, store.name, pipe, function, args) for rank, (_, pipe) in enumerate(pipes)]
        processes = [context.Process(target=_run, args=call, daemon=True) for call in calls]
        for process, (_, pipe) in zip(processes, pipes, strict=True):
            process.start()
            pipe.close()
        try:
            found = [pipe.recv() if pipe.poll(_SECONDS) else TimeoutError() for pipe, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def _run(rank: int, count: int, store: str, pipe: Connection, function: Callable[..., Any], args: Any) -> None:
    try:
        with open(store, "rb+") as file:
            ranks.init_ranks(rank, count, ranks.open_store(str(file.fileno()), count))
            pipe.send(function(*args))
    except Exception as error:  # noqa: BLE001 - the process ends next
        pipe.send(error)
    finally:
        pipe.close()
        os._exit(0)
