"""What the batcher asks: which tokens to propose for the sequences of a step."""

from collections.abc import Sequence

from tgis.speculation.chances import Chances
from tgis.speculation.lookup import Lookup
from tgis.speculation.policy import Policy


class Speculator:
    """Proposes by lookup, or has a model of the engine draft tokens, as far as it pays."""

    def __init__(
        self, max_tokens: int, max_rows: int, vocab_size: int, max_drafted: int = 0, max_drafting: int = 0
    ) -> None:
        """At most `max_tokens` for a sequence, all below `vocab_size`, in steps of at most `max_rows` rows. A model
        drafts up to `max_drafted` of them in steps of up to `max_drafting` sequences.
        """
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._max_drafted, self._max_drafting = min(max_drafted, max_tokens), max_drafting
        self._chances, self._draft_chances = Chances(), Chances()
        self._policy = Policy(max_rows)

    def may_pay(self, rows: int) -> bool:
        """Whether to look for tokens in a step of so many sequences."""
        return self._policy.may_pay(rows)

    def propose(self, rows: int, lookups: Sequence[tuple[Lookup, int]]) -> Sequence[list[int] | int]:
        """Tokens for some of the `rows` sequences of a step that only decodes, at most so many for each; or how many
        the model is to draft.
        """
        survival, drafts = [], []
        for lookup, most in lookups:
            lookup.advance(self._chances)
            survival.append(lookup.survival(self._chances, min(most, self._max_tokens)))
            drafted = min(most, self._max_drafted if rows <= self._max_drafting else 0)
            drafts.append(lookup.drafts.survival_of_draft(self._draft_chances, drafted))
        drafting = {at for at, (own, draft) in enumerate(zip(survival, drafts, strict=True)) if sum(draft) > sum(own)}
        gain, counts = self._policy.best(rows, survival)
        mixed = [drafts[at] if at in drafting else own for at, own in enumerate(survival)]
        if drafting and (other := self._policy.best(rows, mixed, drafting))[0] > gain:
            counts = other[1]
        else:
            drafting = set()
            self._draft_chances.doubt()
        return [
            count if at in drafting else self._tokens(lookup, count)
            for at, ((lookup, _), count) in enumerate(zip(lookups, counts, strict=True))
        ]

    def step_succeeded(self, rows: int, seconds: float, passes: int = 0) -> None:
        """A step that only decodes took so long, with one row for each sequence and each token that was proposed, and
        so many passes of the model that drafts.
        """
        self._policy.step_succeeded(rows, seconds, passes)

    def drafted(self, lookup: Lookup, tokens: Sequence[int], came: Sequence[int]) -> None:
        """The model has drafted tokens for a sequence, and these have come."""
        for chances in (lookup.drafts, self._draft_chances):
            chances.add_draft(tokens, came)

    def _tokens(self, lookup: Lookup, count: int) -> list[int]:
        tokens = lookup.expected(count) if count else []
        unknown = next((at for at, token in enumerate(tokens) if token >= self._vocab_size), count)
        return tokens[:unknown]  # inputs have tokens that no output has
