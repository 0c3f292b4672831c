"""Prompt lookup: the tokens that followed an earlier occurrence of the last tokens probably follow again.

Each sequence has an index. It chains the end of a pair of tokens to the end of its previous occurrence. The longest
matches are kept, and the most frequent continuation among them is proposed until a sampled token differs from it.

A client's prediction of the output stands before the input. It is proposed from its beginning, and after a sampled
token that differs from it, from where the index finds the last tokens again.
"""

from array import array
from collections.abc import Sequence

from tgis.speculation.acceptance import AcceptanceRates, kind_of_match

_MATCH_LENGTHS = (2, 4, 8, 16, 32)
_MAX_OCCURRENCES = 16  # the newest ones
_MAX_COMPARED = 8  # tokens of each continuation
_MAX_INDEXED = 1 << 15  # tokens before the output: about 130 bytes each
_MAX_ADVANCE = 2048  # tokens indexed in one step: about 2 ms
_MIN_PROBABILITY = 0.05  # tokens after a less probable one do not pay
_NONE = -1
_PREDICTED_MATCH = 64  # length that a prediction counts as from its beginning on: of the most reliable kind
_TRUST = 16  # tokens that count as accepted before the first one of a prediction is
_NO_TOKEN = 1 << 31  # between a prediction and the input


class Lookup:
    """The index of one sequence, and the position that is expected to repeat."""

    def __init__(self, tokens: list[int], start: int, prediction: Sequence[int] = (), output_start: int = 0) -> None:
        """`tokens` is the growing list of the sequence; those before `start` are placeholders. What follows
        from `output_start` on is expected to be the prediction.
        """
        self._source = self._tokens = tokens
        self._start = max(start, len(tokens) - _MAX_INDEXED)
        if prediction:
            self._tokens, self._start = [*prediction, _NO_TOKEN, *tokens[self._start :]], 0
        self._predicted = len(prediction) or _NONE  # its end
        self._shift = len(self._tokens) - len(tokens)
        self._checked = self._shift + output_start
        self._end = self._start  # end of the index
        self._last: dict[tuple[int, int], int] = {}  # a pair -> its last end
        self._previous = array("i", [_NONE])  # the end of a pair -> its previous end
        self._expected = 0 if prediction else _NONE  # index of the token expected next
        self._match_length = _PREDICTED_MATCH if prediction else 0
        self.rates = AcceptanceRates(per_sequence=True)
        for _ in range(_TRUST if prediction else 0):
            self.rates.add(kind_of_match(_PREDICTED_MATCH), hit=True)
        self.draft_rates = AcceptanceRates(per_sequence=True)

    @property
    def predicts(self) -> bool:
        """Whether the token expected next is of the prediction."""
        return _NONE < self._expected < self._predicted

    def advance(self, shared: AcceptanceRates) -> None:
        """Index the new tokens, and count how often they were expected."""
        self._tokens += self._source[len(self._tokens) - self._shift :]
        for token in self._tokens[self._checked :]:
            if self._expected != _NONE:
                self._check(token, shared)
        self._checked, first = len(self._tokens), self._end
        self._end = min(len(self._tokens), first + _MAX_ADVANCE)
        for at in range(first, self._end):
            previous_end = _NONE
            if at > self._start:
                pair = self._tokens[at - 1], self._tokens[at]
                previous_end, self._last[pair] = self._last.get(pair, _NONE), at + 1
            self._previous.append(previous_end)

    def cumulative(self, shared: AcceptanceRates, count: int) -> list[float]:
        """The probabilities that the first, the first two, ... of at most `count` expected tokens are accepted."""
        if self._expected == _NONE and self._end == len(self._tokens):
            self._find()
        if self._expected == _NONE:
            return []
        if self._expected <= self._predicted:  # nothing follows the prediction
            count = min(count, self._predicted - self._expected)
        probability, cumulative = 1.0, []
        for ahead in range(count):
            probability *= self.rates.rate(kind_of_match(self._match_length + ahead), shared)
            cumulative.append(probability)
            if probability < _MIN_PROBABILITY:
                break
        return cumulative

    def expected(self, count: int) -> list[int]:
        """The next `count` tokens of the match, which repeats itself beyond the last known token."""
        period = len(self._tokens) - self._expected
        return [self._tokens[self._expected + ahead % period] for ahead in range(count)]

    def _check(self, token: int, shared: AcceptanceRates) -> None:
        hit = self._tokens[self._expected] == token
        kind = kind_of_match(self._match_length)
        self.rates.add(kind, hit)
        shared.add(kind, hit)
        self._expected = self._expected + 1 if hit else _NONE
        self._match_length += 1

    def _find(self) -> None:
        """Look for earlier occurrences of the last pair, the newest first."""
        ends, end = list[int](), self._previous[self._end - self._start]
        while end != _NONE and len(ends) < _MAX_OCCURRENCES:
            ends.append(end)
            end = self._previous[end - self._start]
        if ends:
            self._expected = self._most_frequent(self._longest_matches(ends))

    def _longest_matches(self, ends: list[int]) -> list[int]:
        tokens, longest = self._tokens, list[int]()
        for length in _MATCH_LENGTHS:
            tail = tokens[-length:]
            ends = [end for end in ends if end - length >= self._start and tokens[end - length : end] == tail]
            if not ends:
                break
            longest, self._match_length = ends, length
        assert all(end < self._end for end in longest)
        return longest

    def _most_frequent(self, ends: list[int]) -> int:
        """The newest end with the most frequent continuation."""
        tokens, total = self._tokens, self._end
        for ahead in range(_MAX_COMPARED):
            following = [tokens[end + ahead] for end in ends if end + ahead < total]
            if len(following) < 2:
                break
            most = max(following, key=following.count)
            ends = [end for end in ends if end + ahead < total and tokens[end + ahead] == most]
        return ends[0]
