"""The memory allocator of the C library."""

import contextlib
import ctypes

LARGE_BYTES = 512 << 10  # above the 256 KiB that asyncio allocates for each read of a socket
_M_MMAP_THRESHOLD = -3  # malloc.h


def return_large_blocks() -> None:
    """Let large blocks go back to the system as soon as they are freed.

    By default glibc keeps those up to the size of the largest that has ever been freed, 32 MiB at most: after a flood
    of large messages that is several times their size.
    """
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
