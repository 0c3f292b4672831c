"""Judges from heartbeats and steps whether the engine process runs and makes progress; every method gets `now`.

It counts only time in which the front end itself runs. After a pause (docker pause, a debugger, a frozen VM), what the
engine has sent is still unread, or the engine was paused as well: neither says anything about it.
"""

TICK_SECONDS = 0.25
HEARTBEAT_TIMEOUT = 3.0
_MAX_TICK_SECONDS = 2 * TICK_SECONDS  # that a tick counts for, however late it is


class EngineWatchdog:
    """Call `tick` every TICK_SECONDS."""

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self._awake = 0.0  # seconds counted until then; so are the times below
        self._last_progress = 0.0
        self._last_heartbeats = {0: 0.0}  # by rank; those of the others start while the model loads

    def tick(self, now: float) -> float:
        """Return by how many seconds this one is late."""
        elapsed = now - self._ticked_at
        self._awake, self._ticked_at = self._time(now), now
        return max(elapsed - _MAX_TICK_SECONDS, 0.0)

    def heartbeat(self, rank: int, now: float) -> None:
        self._last_heartbeats[rank] = self._time(now)

    def progress(self, now: float) -> None:
        """The engine has finished a step, or has got its first request."""
        self._last_progress = self._time(now)

    def seconds_stalled(self, now: float) -> float:
        """Time since the last progress."""
        return self._time(now) - self._last_progress

    def silence(self, now: float) -> str | None:
        """Which process of the engine has stopped sending heartbeats, and for how long."""
        rank = min(self._last_heartbeats, key=self._last_heartbeats.__getitem__)
        if (seconds := self._time(now) - self._last_heartbeats[rank]) <= HEARTBEAT_TIMEOUT:
            return None
        return f"no heartbeat of {f'rank {rank} of the engine' if rank else 'the engine process'} for {seconds:.0f} s"

    def _time(self, now: float) -> float:
        return self._awake + min(now - self._ticked_at, _MAX_TICK_SECONDS)
