"""The memory allocator of the C library."""

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # that glibc takes
_KEPT_BYTES = 64 << 20


def reuse_large_blocks() -> None:
    """Let blocks be used again for others, and the end of the heap go back to the system only where it is large.

    By default glibc gives the system nearly every block of a megabyte or more, and gets the next one from there: to
    clear its pages takes several times as long as to copy a message into it. Beside 64 hostile clients with messages
    of 4 MiB that doubles the time to the first token of others. What is kept after such a flood is about 100 MiB.
    """
    with contextlib.suppress(AttributeError):  # only glibc has it
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_ARENA_MAX, 1)
