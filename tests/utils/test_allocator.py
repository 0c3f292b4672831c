"""tgis.utils.allocator in a process of its own."""

import subprocess
import sys

CHILD = """
import ctypes
import resource
import sys
from tgis.utils.allocator import reuse_large_blocks

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
