"""EBNF against regular expressions: random grammars, all short texts."""

import itertools
from contextlib import suppress
from typing import Any

import pytest
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


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= "yes" | "no"', "no"),
        ('root ::= x "b"\nx ::= [ab]+', "aabb"),
        ('root ::= "a" "b" "c" | "ab" "d"', "abc"),
        ('root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"', "(1+22)+3"),
        ('root ::= "\\u00e9\\x41\\U0001F600" [^\\n"]{1,3}', "éA😀x]y"),
        (
            '# a comment\nroot ::= "a" # "another"\n  | fooBar foo_bar foo-bar\n'
            'fooBar ::= "1"\nfoo_bar::="2"\nfoo-bar ::= \'3\'',
            "123",
        ),
        ("root ::= [\\]\\-a-c^] . [-x]", "]\n-"),
        ("root ::= [+--] [^[&~/] '[&&~/-\\''", ",x[&&~/-'"),
        ('root ::= ("a" | ) "b"? ""', "b"),
        (
            'root ::= select\nselect ::= "SELECT " column " from " table " where " condition\n'
            'column ::= "col_1 " | "col_2 "\ntable ::= "table_1 " | "table_2 "\n'
            'condition ::= column "= " number\nnumber ::= "1 " | "2 "',
            "SELECT col_1  from table_2  where col_1 = 1 ",
        ),
    ],
)
def test_what_users_write(grammar: str, text: str) -> None:
    assert allows(compiled(GrammarKind.GRAMMAR, grammar, TABLE), text)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('rot ::= "a"', "no rule is named root"),
        ("root ::= foo", "unknown name in line 1"),
        ('root ::= "a"\nroot ::= "b"', "duplicate rule in line 2"),
        ('root ::= x\n  | "c"\n\nx ::= ("a" y\n  "secret")', "unknown name in line 4"),
        ('root ::= "a" )', "expecting rule, token or statement (at (')')) in line 1"),
        ('root ::= "a', "unexpected '\"' in line 1, column 10"),
        ("root ::= \n  @", "unexpected '@' in line 2, column 3"),
        ('root ::= "a\\q"', "unexpected '\"' in line 1, column 10"),
        ('root ::= "\\ud800"', "invalid regex: hexadecimal literal is not a Unicode scalar value in line 1"),
        (
            "root ::= [z-a]",
            "invalid regex: invalid character class range, the start must be <= the end in line 1",
        ),
        ('root ::= "a" "secret"* ::=', "unexpected ':' in line 1, column 24"),
        ("root ::= " + "(" * 60_000, "lark grammar too deeply nested (at ('(')) in line 1"),
    ],
)
def test_errors_name_the_place_and_no_text(grammar: str, problem: str) -> None:
    with pytest.raises(GrammarError) as error:
        compiled(GrammarKind.GRAMMAR, grammar, TABLE)
    assert str(error.value) == problem


@given(st.text("root ::=xyz\"'[]^-(){},|*+?.\\nu0#\n ", max_size=40))
@settings(max_examples=500)
def test_any_text_is_a_grammar_or_an_error(text: str) -> None:
    for grammar in (text, f"root ::= {text}"):
        with suppress(GrammarError):
            ebnf_to_lark(grammar)
