"""How much of the configured limits may be used: less after a step ran out of memory, and slowly more again."""

from tgis.batcher.memory_model import Limits

_SHRINK = 0.9  # of what was too much
_RECOVERY_STEPS = 256  # that succeed before
_RECOVERY_SHARE = 64  # one part in so many is given back


class Allowance:
    """The limits at present, in tokens.

    A failure in thousands of steps costs little; a limit that never came back would cost for ever.
    """

    def __init__(self, limits: Limits) -> None:
        self.most_context = limits.memory.context_limit(limits.padded)
        self.most_prefill = limits.prefill_tokens
        self.context = self.most_context
        self.prefill_tokens = self.most_prefill
        self._good_steps = 0

    def shrink_prefill(self, tokens: int) -> None:
        """A prefill of several rows with so many tokens ran out of memory."""
        self.prefill_tokens = max(1, min(self.prefill_tokens, tokens // 2))
        self._good_steps = 0

    def shrink_context(self, tokens: int) -> None:
        """A step ran out of memory while the batch held so many tokens of context."""
        self.context = max(1, min(self.context, int(tokens * _SHRINK)))
        self._good_steps = 0

    def succeeded(self) -> None:
        """A step has succeeded."""
        self._good_steps += 1
        if self._good_steps % _RECOVERY_STEPS == 0:
            self.context = _raised(self.context, self.most_context)
            self.prefill_tokens = _raised(self.prefill_tokens, self.most_prefill)


def _raised(value: int, most: int) -> int:
    return min(most, value + value // _RECOVERY_SHARE + 1)
