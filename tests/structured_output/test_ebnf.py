"""EBNF against a naive recognizer: random grammars, all short texts."""

import itertools
from contextlib import suppress
from dataclasses import dataclass

import pytest
from grammar_walks import byte_table, compiled
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks.structured_output.suite import allows
from tgis.errors import GrammarError
from tgis.ipc.lookups import GrammarKind
from tgis.structured_output.ebnf import ebnf_to_lark

TABLE = byte_table()
MAX_LENGTH = 3  # of the texts over the alphabet


@dataclass(frozen=True)
class Node:
    """A piece of a grammar: how it is written, and all ends of its matches from a place of a text."""

    kind: str
    text: str = ""
    parts: tuple["Node", ...] = ()
    least: int = 1
    most: int | None = 1

    def __str__(self) -> str:
        match self.kind:
            case "literal":
                return f'"{self.text}"'
            case "class":
                return f"[{self.text}]"
            case "sequence":
                return " ".join(map(str, self.parts))
            case "choice":
                return f"({' | '.join(map(str, self.parts))})"
            case "repeat":
                return f"({self.parts[0]}){{{self.least},{'' if self.most is None else self.most}}}"
        return self.kind  # the name of a rule

    def ends(self, text: str, at: int, rules: dict[str, "Node"]) -> set[int]:
        match self.kind:
            case "literal":
                return {at + len(self.text)} if text.startswith(self.text, at) else set()
            case "class":
                negated, chars = self.text.startswith("^"), self.text.removeprefix("^")
                return {at + 1} if at < len(text) and (text[at] in chars) is not negated else set()
            case "sequence":
                found = {at}
                for part in self.parts:
                    found = {end for start in found for end in part.ends(text, start, rules)}
                return found
            case "choice":
                return {end for part in self.parts for end in part.ends(text, at, rules)}
            case "repeat":
                return self._repeated(text, at, rules)
        return rules[self.kind].ends(text, at, rules)

    def _repeated(self, text: str, at: int, rules: dict[str, "Node"]) -> set[int]:
        found, reached = set(), {at}
        for count in range(len(text) + self.least + 2):
            if count >= self.least and (self.most is None or count <= self.most):
                found |= reached
            reached = {end for start in reached for end in self.parts[0].ends(text, start, rules)}
        return found


names = st.sampled_from(["root", "x", "some-Name"])
leaves = st.one_of(
    st.builds(Node, st.just("literal"), st.sampled_from(["a", "b", "ab", "abc", "ba", "cab", ""])),
    st.builds(Node, st.just("class"), st.sampled_from(["ab", "bc", "^a", "^bc"])),
    st.builds(Node, names),
)
nodes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(
            Node, st.sampled_from(["sequence", "choice"]), parts=st.lists(inner, min_size=2, max_size=3).map(tuple)
        ),
        st.builds(
            lambda part, least, more: Node(
                "repeat", parts=(part,), least=least, most=None if more is None else least + more
            ),
            inner,
            st.integers(0, 2),
            st.sampled_from([None, 1, 2]),
        ),
    ),
    max_leaves=6,
)


@given(st.tuples(nodes, nodes, nodes))
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.filter_too_much]
)  # by chance, in one run of some hundreds
def test_short_texts_match_as_a_naive_recognizer_says(trees: tuple[Node, Node, Node]) -> None:
    assume(not any(map(_may_be_left_recursive, trees)))  # the naive recognizer would never end
    rules = dict(zip(["root", "x", "some-Name"], trees, strict=True))
    text = "\n".join(f"{name} ::= {tree}" for name, tree in rules.items())
    texts = ["".join(chars) for length in range(MAX_LENGTH + 1) for chars in itertools.product("abc", repeat=length)]
    expected = {word for word in texts if len(word) in rules["root"].ends(word, 0, rules)}
    assume(expected)
    matcher = compiled(GrammarKind.GRAMMAR, text, TABLE)
    assert {word for word in texts if allows(matcher, word)} == expected


def _may_be_left_recursive(tree: Node) -> bool:
    """Whether a rule may be called before anything is matched."""
    match tree.kind:
        case "literal" | "class":
            return False
        case "sequence":
            return any(_may_be_left_recursive(part) for part in tree.parts[:1]) or (
                _may_be_empty(tree.parts[0]) and any(_may_be_left_recursive(part) for part in tree.parts)
            )
        case "choice" | "repeat":
            return any(map(_may_be_left_recursive, tree.parts))
    return True


def _may_be_empty(tree: Node) -> bool:
    return 0 in tree.ends("", 0, {}) if tree.kind != "repeat" else True


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
