"""Who may wait for a CUDA device: torch forbids it to all threads of a process or to none."""

import threading

may_wait = threading.Lock()  # held while a thread other than the engine's waits, and while waiting is forbidden
