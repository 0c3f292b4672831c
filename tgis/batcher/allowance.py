"""How much of the configured limits may be used: less after a step ran out of memory, and slowly more again."""

from tgis.batcher.memory_model import BatchLimits

_SHRINK_FACTOR = 0.9  # of what was too much
_RECOVERY_STEPS = 256  # that succeed before
_RECOVERY_DIVISOR = 64  # one part in so many is given back


class CapacityLimits:
    """The limits at present, in tokens.

    A failure in thousands of steps costs little; a limit that never came back would cost for ever.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.max_context_tokens = limits.memory.context_limit(limits.padded)
        self.max_prefill_tokens = limits.prefill_tokens
        self.context_tokens = self.max_context_tokens
        self.prefill_tokens = self.max_prefill_tokens
        self._steps_since_shrink = 0

    def shrink_prefill(self, tokens: int) -> None:
        """A prefill of several rows with so many tokens ran out of memory."""
        self.prefill_tokens = max(1, min(self.prefill_tokens, tokens // 2))
        self._steps_since_shrink = 0

    def shrink_context(self, tokens: int) -> None:
        """A step ran out of memory while the batch held so many tokens of context."""
        self.context_tokens = max(1, min(self.context_tokens, int(tokens * _SHRINK_FACTOR)))
        self._steps_since_shrink = 0

    def step_succeeded(self) -> None:
        """A step has succeeded."""
        self._steps_since_shrink += 1
        if self._steps_since_shrink % _RECOVERY_STEPS == 0:
            self.context_tokens = _grow(self.context_tokens, self.max_context_tokens)
            self.prefill_tokens = _grow(self.prefill_tokens, self.max_prefill_tokens)


def _grow(value: int, maximum: int) -> int:
    return min(maximum, value + value // _RECOVERY_DIVISOR + 1)
