"""`reuse_large_blocks` of tgis.cli.serve, in processes of its own."""

import subprocess
import sys

RECEIVE = """
import ctypes
import resource
import sys
from tgis.cli.serve import reuse_large_blocks

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: of huge pages there are few faults
if sys.argv[1] == "reuse":
    reuse_large_blocks()

def receive():
    messages = [bytes(4 << 20) for _ in range(5)]
    copies = [message + b"x" for message in messages]

receive()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    receive()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
THREADS = """
import ctypes
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from tgis.cli.serve import reuse_large_blocks

reuse_large_blocks()
barrier = Barrier(4)
with ThreadPoolExecutor(4) as pool:
    kept = list(pool.map(lambda _: (bytes(4 << 20), barrier.wait()), range(4)))
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


def run(*argv: str) -> str:
    return subprocess.run([sys.executable, "-c", *argv], check=True, capture_output=True, text=True).stdout


def test_large_blocks_are_used_again() -> None:
    assert 10 * int(run(RECEIVE, "reuse")) < int(run(RECEIVE, "default"))


def test_all_threads_share_one_heap() -> None:
    assert run(THREADS).count("<heap ") == 1
