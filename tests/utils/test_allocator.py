"""tgis.utils.allocator in a process of its own."""

import subprocess
import sys

MiB = 1 << 20
CHILD = """
import sys
from pathlib import Path
from tgis.utils.allocator import return_large_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "return":
    return_large_blocks()
largest = b"x" * (16 << 20)
del largest
before, blocks, pins = resident(), [], []
for number in range(50):
    blocks.append(b"x" * (4 << 20))
    pins.append(bytearray(2000))
del blocks
print(resident() - before)
"""


def test_large_blocks_go_back_to_the_system() -> None:
    def kept(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", CHILD, how], check=True, capture_output=True, text=True)
        return int(done.stdout)

    assert kept("return") < 20 * MiB < 100 * MiB < kept("keep")
