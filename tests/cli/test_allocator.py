"""`reuse_large_blocks` of tgis.cli.serve, in a process of its own."""

import subprocess
import sys

CHILD = """
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


def test_large_blocks_are_used_again() -> None:
    def page_faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", CHILD, how], check=True, capture_output=True, text=True)
        return int(done.stdout)

    assert 10 * page_faults("reuse") < page_faults("default")


THREADS = """
import ctypes
import threading
from tgis.cli.serve import reuse_large_blocks

reuse_large_blocks()
barrier = threading.Barrier(4)

def receive():
    message = bytes(4 << 20)
    barrier.wait()

threads = [threading.Thread(target=receive) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


def test_all_threads_share_one_heap() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], check=True, capture_output=True, text=True)
    assert done.stdout.count("<heap ") == 1, done.stdout
