"""tgis.frontend.engine_client: the engine process as a process. Its messages are tested with what they are about."""

import asyncio
import signal
import subprocess
from types import SimpleNamespace

from harness import run_async

from tgis.frontend.engine_client import EngineClient

ENGINE_WITH_COMPILER = "sleep 1000 & echo started; wait"


@run_async
async def test_a_kill_ends_what_the_engine_process_has_started() -> None:
    client = EngineClient()
    client._process = process = await asyncio.create_subprocess_exec(
        "sh", "-c", ENGINE_WITH_COMPILER, stdout=asyncio.subprocess.PIPE, process_group=0
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"started\n"
    client.kill("a test")
    assert await process.wait() == -signal.SIGKILL
    assert await process.stdout.read() == b""  # once nobody is left who has the writing end open
    client.kill("again")


@run_async
async def test_a_kill_may_come_after_the_end_that_asyncio_has_not_noticed_yet() -> None:
    client = EngineClient()
    with subprocess.Popen(["true"], process_group=0) as process:
        process.wait()
    client._process = SimpleNamespace(pid=process.pid, returncode=None)  # type: ignore[assignment]
    client.kill("a test")
