"""What the batcher asks: which tokens to propose for the sequences of a step."""

from collections.abc import Sequence

from tgis.speculation.chances import Chances
from tgis.speculation.lookup import Lookup
from tgis.speculation.policy import Policy


class Speculator:
    """Proposes by lookup, as far as it pays."""

    def __init__(self, max_tokens: int, max_rows: int, vocab_size: int) -> None:
        """At most `max_tokens` for a sequence, all below `vocab_size`, in steps of at most `max_rows` rows."""
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._chances = Chances()
        self._policy = Policy(max_rows)

    def may_pay(self, rows: int) -> bool:
        """Whether to look for tokens in a step of so many sequences."""
        return self._policy.may_pay(rows)

    def propose(self, rows: int, lookups: Sequence[tuple[Lookup, int]]) -> list[list[int]]:
        """Tokens for some of the `rows` sequences of a step that only decodes, at most so many for each."""
        survival = []
        for lookup, most in lookups:
            lookup.advance(self._chances)
            survival.append(lookup.survival(self._chances, min(most, self._max_tokens)))
        counts = self._policy.counts(rows, survival)
        return [self._tokens(lookup, count) for (lookup, _), count in zip(lookups, counts, strict=True)]

    def step_succeeded(self, rows: int, seconds: float) -> None:
        """A step that only decodes took so long, with one row for each sequence and each token that was proposed."""
        self._policy.step_succeeded(rows, seconds)

    def _tokens(self, lookup: Lookup, count: int) -> list[int]:
        tokens = lookup.expected(count) if count else []
        unknown = next((at for at, token in enumerate(tokens) if token >= self._vocab_size), count)
        return tokens[:unknown]  # inputs have tokens that no output has
