"""What checks tell and starts measure of memory: `measured_starts.py OPTIONS`, JSON lists of changed EngineOptions.

Each has a process of its own, forked before anything was computed: what ran before it would change what it takes.
"""

import io
import json
import logging
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import msgspec
from batches import engine_options

from tgis.engines import describe_memory, load_engine
from tgis.engines.memory.profiler import profile
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.messages import EngineOptions
from tgis.utils.memory import trim_heap

ROWS = 16


def main(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.map(start, starts, chunksize=1)


def start(changes: dict[str, Any]) -> dict[str, Any]:
    """The lines of a check, and what a start logs and says of its engine."""
    given = engine_options(Path(changes["model_path"]), ROWS)
    options, log = msgspec.structs.replace(given, **changes), io.StringIO()
    logging.basicConfig(level=logging.INFO, stream=log, format="%(message)s")
    load(msgspec.structs.replace(options, max_batch_size=1, max_sequence_length=8))  # libraries are read once
    trim_heap()
    log.truncate(0)
    lines = describe_memory(options)
    PagedEngine._step_bytes = lambda engine: profile(engine, options, engine.runner.device)  # as on a GPU
    info = load(options)
    paths = filter(None, (options.model_path, options.speculator_path))
    files = [sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) for path in paths]
    return {"check": lines, "log": log.getvalue(), "info": info, "files": files}


def load(options: EngineOptions) -> Any:
    """What an engine says of itself once it is warm."""
    engine, _ = load_engine(options, sys.exit, print)
    engine.warm_up()
    engine.close()
    return msgspec.to_builtins(engine.info)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
