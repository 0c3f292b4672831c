"""Matching of stop sequences in the text of an output; text that may still change is held back.

Works on the text that `detokenizer.py` appends per token. All other stop reasons are decided in the batcher; the
caller says for each token whether a stop sequence may end the output there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import regex

_GRAPHEME = regex.compile(r"\X")
# Longer than any emoji sequence, and than a letter with the 30 marks of stream-safe text (UAX #15).
MAX_GRAPHEME_LENGTH = 64


@dataclass(slots=True)
class StopStringMatcher:
    """Releases the text of one output as soon as it is final.

    It holds back the last grapheme cluster (with `hold_last_grapheme`) and, without `include_stop_sequence`, the
    longest suffix of the text that is a prefix of a stop sequence. Matching characters is the same as matching
    UTF-8 bytes: no UTF-8 string occurs inside another one off a character boundary.
    """

    stop_sequences: Sequence[str] = ()
    include_stop_sequence: bool = field(kw_only=True)
    hold_last_grapheme: bool = field(kw_only=True)
    matched: str | None = field(default=None, init=False)  # the stop sequence that ended the output
    _held: str = field(default="", init=False)  # the end of the text, not released yet
    _partial_match: str = field(default="", init=False)  # longest suffix that is a proper prefix of a stop sequence
    _max_stop_length: int = field(init=False)

    def __post_init__(self) -> None:
        self._max_stop_length = max(map(len, self.stop_sequences), default=0)

    def add(self, text: str, *, may_stop: bool) -> str:
        """Append the text of a token, and return the text that is final now.

        Without `may_stop` no stop sequence that ends in `text` is ever matched. After a match only `flush` may be
        called.
        """
        assert self.matched is None
        if not text:
            return ""
        self._held += text
        if self.stop_sequences:
            window = self._partial_match + text
            if may_stop and self._match(window):
                return ""
            self._partial_match = self._longest_partial_match(window)
        limit = len(self._held) if self.include_stop_sequence else len(self._held) - len(self._partial_match)
        if self.hold_last_grapheme:
            start = _last_grapheme_start(self._held, limit)
            limit = start if limit - start <= MAX_GRAPHEME_LENGTH else limit
        final, self._held = self._held[:limit], self._held[limit:]
        return final

    def flush(self) -> str:
        """Return the rest of the output, up to the cut if a stop sequence was matched."""
        rest, self._held = self._held, ""
        return rest

    def _match(self, window: str) -> bool:
        """Cut the text at the last new occurrence of the first stop sequence in the list that has one."""
        known = len(self._partial_match)
        for stop in self.stop_sequences:
            start = window.rfind(stop, max(0, known + 1 - len(stop)))
            if start >= 0:
                cut = start + len(stop) if self.include_stop_sequence else start
                self._held = self._held[: len(self._held) - len(window) + cut]
                self.matched = stop
                return True
        return False

    def _longest_partial_match(self, window: str) -> str:
        # Nothing before the last partial match can start another one: linear over all tokens.
        for start in range(max(0, len(window) + 1 - self._max_stop_length), len(window)):
            suffix = window[start:]
            if any(stop.startswith(suffix) and stop != suffix for stop in self.stop_sequences):
                return suffix
        return ""


def _last_grapheme_start(text: str, limit: int) -> int:
    """Index of the last grapheme cluster that starts at or before `limit`; `text` starts with a whole one."""
    if text.isascii():
        start = min(limit, len(text) - 1)
        return start - 1 if text[start - 1 : start + 1] == "\r\n" else start
    start = 0
    for cluster in _GRAPHEME.finditer(text):
        if cluster.start() > limit:
            break
        start = cluster.start()
    return start
