"""The number of files, sockets included, that this process and its children may have open."""

import logging
import resource

MAX_OPEN_FILES = 1 << 16  # more than connections ever need; containers often have a hard limit of a billion

log = logging.getLogger(__name__)


def raise_file_limit() -> None:
    """Raise the soft limit, which is often 1,024 for the sake of select(), to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("limit of open files raised from %d to %d", soft, wanted)
