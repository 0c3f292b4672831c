"""EBNF against regular expressions: random grammars, all short texts."""

import itertools
from contextlib import suppress
from typing import Any

import regex
from grammar_walks import byte_table, compiled
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.structured_output.suite import allows
from tgis.errors import GrammarError
from tgis.ipc.lookups import GrammarKind
from tgis.structured_output.ebnf import ebnf_to_lark

TABLE = byte_table()
MAX_LENGTH = 3  # of the texts over the alphabet
Piece = tuple[str, str]


def binary(template: str, separators: tuple[str, str]) -> Any:
    """Joins pieces in a grammar and in a regular expression."""
    return lambda parts: tuple(
        template % separator.join(part[at] for part in parts) for at, separator in enumerate(separators)
    )


# Pieces of grammars, each with a regular expression that matches the same texts.
LEAVES = st.one_of(
    st.sampled_from(["a", "b", "ab", "abc", "ba", "cab", ""]).map(lambda text: (f'"{text}"', text)),
    st.sampled_from(["[ab]", "[bc]", "[^a]", "[^bc]"]).map(lambda text: (text, text)),
)


def larger(inner: st.SearchStrategy[Piece]) -> st.SearchStrategy[Piece]:
    several = st.lists(inner, min_size=2, max_size=3)
    counts = st.sampled_from(["{0,}", "{1,}", "{2,}", "{0,1}", "{1,2}", "{2,4}", "?", "*", "+"])
    return st.one_of(
        several.map(binary("(%s)", (" ", ""))),
        several.map(binary("(%s)", (" | ", "|"))),
        st.builds(lambda piece, count: (f"({piece[0]}){count}", f"({piece[1]}){count}"), inner, counts),
    )


PIECES = st.recursive(LEAVES, larger, max_leaves=6)
PIECES_WITH_RULES = st.recursive(LEAVES | st.just(("some-Name", "(?&rule)")), larger, max_leaves=6)


@given(PIECES_WITH_RULES, PIECES)
@settings(max_examples=60)
def test_short_texts_match_as_a_regular_expression_says(root: Piece, rule: Piece) -> None:
    texts = ["".join(chars) for length in range(MAX_LENGTH + 1) for chars in itertools.product("abc", repeat=length)]
    pattern = regex.compile(root[1].replace("(?&rule)", f"({rule[1]})"))
    expected = {text for text in texts if pattern.fullmatch(text)}
    assume(expected)
    matcher = compiled(GrammarKind.GRAMMAR, f"root ::= {root[0]}\nsome-Name ::= {rule[0]}", TABLE)
    assert {text for text in texts if allows(matcher, text)} == expected


@given(st.text("root ::=xyz\"'[]^-(){},|*+?.\\nu0#\n ", max_size=40))
@settings(max_examples=500)
def test_any_text_is_a_grammar_or_an_error(text: str) -> None:
    for grammar in (text, f"root ::= {text}"):
        with suppress(GrammarError):
            ebnf_to_lark(grammar)
