"""tgis.api.grpc.threads in a process of its own."""

import json
import subprocess
import sys

CHILD = """
import asyncio
import json
import os
import threading
from pathlib import Path

from tgis.config import prepare_command

prepare_command()

import grpc

from tgis.api.grpc.threads import let_event_loop_go_first
from tgis.utils import event_loop


def niceness():
    tasks = list(Path("/proc/self/task").iterdir())
    # The 19th field of stat; comm, the second one, may have spaces.
    return {task.name: int((task / "stat").read_text().rpartition(")")[2].split()[16]) for task in tasks}


async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    before = niceness()
    let_event_loop_go_first()
    await (await asyncio.create_subprocess_exec("true")).wait()
    for _ in range(50):  # wake those that sleep, and let gRPC start more
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
    (poller,) = set(threading.enumerate()) - {threading.main_thread()}
    names = {task.name: (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    print(json.dumps([before[str(os.getpid())], str(os.getpid()), str(poller.native_id), niceness(), names]))
    await server.stop(0)


event_loop.run(main())
"""


def test_reading_threads_yield_to_the_event_loop() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True)
    before, main, poller, niceness, names = json.loads(done.stdout)
    reading = [niceness[task] for task, name in names.items() if name == "event_engine"]
    assert reading
    assert set(reading) == {min(before + 10, 19)}
    assert niceness[main] == niceness[poller] == before  # they hold Python's lock
