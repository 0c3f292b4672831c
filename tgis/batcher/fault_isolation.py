"""Finding the sequence that breaks steps: those of a failed step are retried in halves, down to one alone."""

from tgis.batcher.sequence import Sequence

_MAX_SOLO_FAILURES = 2  # one may be an accident


class FaultIsolator:
    """Numbers the groups of sequences that are retried apart. A sequence that gets a token leaves its group."""

    def __init__(self) -> None:
        self._last_group = 0

    def split(self, seqs: list[Sequence]) -> list[Sequence]:
        """A step of these sequences failed: divide them into retry groups; return those to fail instead."""
        if len(seqs) > 1:
            middle = len(seqs) // 2
            self._regroup(seqs[:middle])
            self._regroup(seqs[middle:])
            return []
        self._regroup(seqs)
        seqs[0].solo_failures += 1
        return seqs if seqs[0].solo_failures >= _MAX_SOLO_FAILURES else []

    def _regroup(self, seqs: list[Sequence]) -> None:
        self._last_group += 1
        for seq in seqs:
            seq.retry_group = self._last_group
