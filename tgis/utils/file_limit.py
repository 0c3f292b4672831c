"""The number of files, sockets included, that this process and its children may have open."""

import fcntl
import logging
import os
import resource

MAX_OPEN_FILES = 1 << 16  # more than connections ever need; containers often have a hard limit of a billion
TABLE_SIZE = 1 << 13

log = logging.getLogger(__name__)


def raise_file_limit() -> None:
    """Raise the soft limit, which is often 1,024 for the sake of select(), to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("limit of open files raised from %d to %d", soft, wanted)


def enlarge_file_table() -> None:
    """Have the kernel's table of open files as large as many connections need; call it before threads are started.

    It grows when a file is opened, and where there are threads that waits for all CPUs: up to a second, in accept().
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    size = TABLE_SIZE if soft == resource.RLIM_INFINITY else min(soft, TABLE_SIZE)
    with open(os.devnull) as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, size - 1))
