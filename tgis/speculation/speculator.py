"""Chooses the tokens to propose for the sequences of a step, for the batcher."""

from collections.abc import Sequence

from tgis.speculation.acceptance import AcceptanceRates
from tgis.speculation.lookup import Lookup
from tgis.speculation.policy import Policy


class Speculator:
    """Proposes tokens by prompt lookup, or asks the engine's draft model for some, if that is expected to pay."""

    def __init__(
        self, max_tokens: int, max_rows: int, vocab_size: int, max_drafted: int = 0, max_drafting: int = 0
    ) -> None:
        """Propose at most `max_tokens` tokens a sequence, of a prediction more where that pays, all below `vocab_size`,
        in steps of at most `max_rows` rows.
        The draft model makes up to `max_drafted` of them in steps of up to `max_drafting` sequences.
        """
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._vocab_size = vocab_size
        self._max_drafted, self._max_drafting = min(max_drafted, max_tokens), max_drafting
        self._rates, self._draft_rates = AcceptanceRates(), AcceptanceRates()
        self.policy = Policy(max_rows)

    def propose(self, rows: int, lookups: Sequence[tuple[Lookup, int]]) -> Sequence[list[int] | int]:
        """Tokens to propose, or the number to draft, for some of the `rows` sequences of a step that only decodes.
        `lookups` have the most tokens that each sequence may get.
        """
        looked_up, drafted = [], []
        for lookup, limit in lookups:
            lookup.advance(self._rates)
            most = self._max_rows if lookup.predicts else self._max_tokens
            looked_up.append(lookup.cumulative(self._rates, min(limit, most)))
            count = min(limit, self._max_drafted if rows <= self._max_drafting else 0)
            drafted.append(lookup.draft_rates.cumulative_of_draft(self._draft_rates, count))
        pairs = enumerate(zip(looked_up, drafted, strict=True))
        drafting = {at for at, (by_lookup, by_draft) in pairs if sum(by_draft) > sum(by_lookup)}
        gain, counts = self.policy.best(rows, looked_up)
        mixed = [drafted[at] if at in drafting else by_lookup for at, by_lookup in enumerate(looked_up)]
        if drafting and (with_drafts := self.policy.best(rows, mixed, drafting))[0] > gain:
            counts = with_drafts[1]
        else:
            drafting = set()
            self._draft_rates.decay_to_prior()
        return [
            count if at in drafting else self._tokens(lookup, count)
            for at, ((lookup, _), count) in enumerate(zip(lookups, counts, strict=True))
        ]

    def drafted(self, lookup: Lookup, tokens: Sequence[int], sampled: Sequence[int]) -> None:
        """Learn from the drafted tokens of a sequence and the sampled ones."""
        for rates in (lookup.draft_rates, self._draft_rates):
            rates.add_draft(tokens, sampled)

    def _tokens(self, lookup: Lookup, count: int) -> list[int]:
        tokens = lookup.expected(count) if count else []
        unknown = next((at for at, token in enumerate(tokens) if token >= self._vocab_size), count)
        return tokens[:unknown]  # inputs may have tokens beyond the output vocabulary
