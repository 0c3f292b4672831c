"""Lookup: what followed an earlier occurrence of the last tokens will probably follow again.

An index of one sequence, which nothing else shares. Ends of short n-grams are chained to the ends of the same n-grams
before them; of the occurrences that are found so, the longest matches count, and of these the continuation that is most
frequent. While it comes true, nothing is looked up.
"""

from array import array

from tgis.speculation.chances import Chances, kind_of_match

_SIZES = (4, 2)  # of the n-grams that are found
_LENGTHS = (2, 4, 8, 16, 32)  # of matches, as they are told apart
_MAX_OCCURRENCES = 8  # that are compared, the newest first
_MAX_COMPARED = 8  # tokens of their continuations
_MAX_INDEXED = 1 << 15  # tokens before the output: about 250 bytes each
_MAX_ADVANCE = 2048  # tokens that are indexed at once, in about 2 ms
_LEAST_CHANCE = 0.05  # what follows a token less likely than this does not pay
_NONE = -1


class Lookup:
    """The index of one sequence, and what it expects next."""

    def __init__(self, tokens: list[int], start: int) -> None:
        """`tokens` grow; those before `start` are placeholders."""
        self._tokens = tokens
        self._start = max(start, len(tokens) - _MAX_INDEXED)
        self._end = self._start  # of the tokens that are indexed
        self._last: tuple[dict[int, int], ...] = tuple({} for _ in _SIZES)  # hash of an n-gram -> its last end
        self._previous = tuple(array("i", [_NONE]) for _ in _SIZES)  # of each end: that of the same n-gram before
        self._at = _NONE  # the place of the token that is expected next; none: nothing is expected
        self._length = 0  # of the match
        self.chances = Chances(few=True)  # that what this sequence expects is right
        self.drafts = Chances(few=True)  # that what a model drafts for it is right

    def advance(self, shared: Chances) -> None:
        """Take the tokens that have come, and tell how often they were expected."""
        first = self._end
        self._end = min(len(self._tokens), first + _MAX_ADVANCE)
        for at in range(first, self._end):
            if self._at != _NONE:
                self._check(self._tokens[at], shared)
            for size, last, previous in zip(_SIZES, self._last, self._previous, strict=True):
                found = _NONE
                if at + 1 - self._start >= size:
                    key = hash(tuple(self._tokens[at + 1 - size : at + 1]))
                    found, last[key] = last.get(key, _NONE), at + 1
                previous.append(found)

    def survival(self, shared: Chances, most: int) -> list[float]:
        """The chances that the first, the first two, ... of the next tokens are as expected, up to `most`; none if
        nothing is expected.
        """
        if self._at == _NONE and self._end == len(self._tokens):
            self._find()
        if self._at == _NONE:
            return []
        chance, found = 1.0, []
        for ahead in range(most):
            kind = kind_of_match(self._length + ahead)
            chance *= self.chances.mixed(kind, shared)
            found.append(chance)
            if chance < _LEAST_CHANCE:
                break
        return found

    def expected(self, count: int) -> list[int]:
        """The next tokens, of which there are some; what is expected after the last known one repeats."""
        period = len(self._tokens) - self._at
        return [self._tokens[self._at + ahead % period] for ahead in range(count)]

    def _check(self, token: int, shared: Chances) -> None:
        hit = self._tokens[self._at] == token
        kind = kind_of_match(self._length)
        self.chances.add(kind, hit)
        shared.add(kind, hit)
        self._at = self._at + 1 if hit else _NONE
        self._length += 1

    def _find(self) -> None:
        for previous in self._previous:
            if ends := self._longest_matches(self._chain(previous)):
                self._at = self._most_frequent(ends)
                return

    def _chain(self, previous: "array[int]") -> list[int]:
        """The ends of earlier occurrences of the last n-gram, the newest first; hashes may mistake others for it."""
        ends, end = list[int](), previous[self._end - self._start]
        while end != _NONE and len(ends) < _MAX_OCCURRENCES:
            ends.append(end)
            end = previous[end - self._start]
        return ends

    def _longest_matches(self, ends: list[int]) -> list[int]:
        tokens, total, found = self._tokens, self._end, list[int]()
        for length in _LENGTHS:
            tail = tokens[-length:]
            ends = [end for end in ends if end - length >= self._start and tokens[end - length : end] == tail]
            if not ends:
                break
            found, self._length = ends, length
        assert all(end < total for end in found)
        return found

    def _most_frequent(self, ends: list[int]) -> int:
        """The newest of those that are followed by the tokens that follow most often."""
        tokens, total = self._tokens, self._end
        for ahead in range(_MAX_COMPARED):
            following = [tokens[end + ahead] for end in ends if end + ahead < total]
            if len(following) < 2:
                break
            most = max(following, key=following.count)
            ends = [end for end in ends if end + ahead < total and tokens[end + ahead] == most]
        return ends[0]
