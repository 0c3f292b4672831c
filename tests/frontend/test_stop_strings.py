"""tgis.frontend.stop_strings: against a naive search over the whole text, in bytes, as TGIS specifies it."""

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from tgis.frontend.stop_strings import MAX_GRAPHEME_LENGTH, StopStringMatcher

ALPHABET = ["a", "b", "\n", "\r", "é", "你", "😀", "\u0301", "\u200d", "🇩", "🇫", "\u1112", "\u1161"]
CLUSTERS = regex.compile(r"\X")
tokens = st.lists(st.text("ab\né", max_size=4), max_size=20)
wild_tokens = st.lists(st.text(ALPHABET, max_size=4), max_size=20)
stop_sequences = st.lists(st.text("ab\né", min_size=1, max_size=5), max_size=3)
wild_stop_sequences = st.lists(st.text(ALPHABET, min_size=1, max_size=3), max_size=3)
pieces_and_minimum = st.tuples(tokens | wild_tokens, st.integers(0, 6))


def naive(pieces: list[str], stops: list[str], include: bool, minimum: int = 0) -> tuple[str, str | None]:
    """The final text and the matched stop sequence."""
    output = b""
    for count, piece in enumerate(pieces, 1):
        new = len(piece.encode())
        output += piece.encode()
        if not new or count < minimum:
            continue
        for stop in stops:
            needle = stop.encode()
            first = max(0, len(output) + 1 - new - len(needle))
            places = [p for p in range(first, len(output)) if output[p : p + len(needle)] == needle]
            if places:
                return output[: places[-1] + (len(needle) if include else 0)].decode(), stop
    return output.decode(), None


def assemble(
    pieces: list[str], stops: list[str], include: bool, hold: bool, minimum: int = 0
) -> tuple[list[str], str | None]:
    """The text released after each token and at the end, and the matched stop sequence."""
    assembler = StopStringMatcher(stops, include_stop_sequence=include, hold_last_grapheme=hold)
    deltas = []
    for count, piece in enumerate(pieces, 1):
        deltas.append(assembler.add(piece, may_stop=count >= minimum))
        if assembler.matched is not None:
            break
    return [*deltas, assembler.flush()], assembler.matched


def partial_match(output: str, stops: list[str]) -> int:
    """Length of the longest suffix of the output that is a proper prefix of a stop sequence."""
    lengths = range(len(output), 0, -1)
    return next((n for n in lengths if any(s.startswith(output[-n:]) and len(s) > n for s in stops)), 0)


@example((["ab", "x"], 2), ["ab", "abc"], False, False)
@given(pieces_and_minimum, stop_sequences | wild_stop_sequences, st.booleans(), st.booleans())
def test_equals_naive_search(output: tuple[list[str], int], stops: list[str], include: bool, hold: bool) -> None:
    pieces, minimum = output
    deltas, matched = assemble(pieces, stops, include, hold, minimum)
    assert ("".join(deltas), matched) == naive(pieces, stops, include, minimum)


@given(wild_tokens, wild_stop_sequences, st.booleans(), st.booleans())
def test_releases_all_text_that_is_final(pieces: list[str], stops: list[str], include: bool, hold: bool) -> None:
    assembler = StopStringMatcher(stops, include_stop_sequence=include, hold_last_grapheme=hold)
    output = emitted = ""
    for piece in pieces:
        output += piece
        emitted += assembler.add(piece, may_stop=False)
        limit = len(output) - (0 if include else partial_match(output, stops))
        cuts = {cluster.start() for cluster in CLUSTERS.finditer(output)} if hold else range(limit + 1)
        assert emitted == output[: max((cut for cut in cuts if cut <= limit), default=0)]


def test_a_stop_sequence_at_the_last_allowed_token_is_not_trimmed() -> None:
    assembler = StopStringMatcher(["stop"], include_stop_sequence=False, hold_last_grapheme=True)
    deltas = [assembler.add("x st", may_stop=True), assembler.add("op", may_stop=False), assembler.flush()]
    assert ("".join(deltas), assembler.matched) == ("x stop", None)


@pytest.mark.parametrize("mark", ["\u0301", "\u200d", "\U000e0067"])
def test_an_endless_grapheme_cluster_is_released(mark: str) -> None:
    assembler = StopStringMatcher(["zz"], include_stop_sequence=False, hold_last_grapheme=True)
    emitted = assembler.add("e", may_stop=True)
    for count in range(2, 2000):
        emitted += assembler.add(mark, may_stop=True)
        assert count - len(emitted) <= MAX_GRAPHEME_LENGTH
