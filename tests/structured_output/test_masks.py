"""Masks against brute force: every token of a vocabulary tried with another library's matcher."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from unittest import mock

import pytest
import regex
from grammar_walks import EOS, byte_table, compiled, token_table, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.structured_output.suite import allows
from tgis.engine_core.lookups import LookupTable
from tgis.errors import GrammarError
from tgis.ipc.lookups import Acquire, Acquired, GrammarKind, GrammarSpec, Vocabulary
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.matcher import TokenTable, low_priority_pool

REGEXES = [
    r"[a-c]{2,4}(x|yz)*",
    r"(foo|bar)+ \d{1,3}",
    r"a.b|.{3}",
    r"[^a]*a?",
    r"\w+@\w+\.(com|org)",
    r"é(ü|世界)*|[äö]{2}",
    r"(?i:abc)-\p{Lu}\p{Ll}+",
    r"/\*[^*]*\*/",
    r"^-?(0|[1-9]\d*)(\.\d+)?$",
]
PIECES = [
    *"abcdefghijklmnoprstuvxyzABCÄÖäöéü世界0123456789@.-/* \n",
    *[
        "ab",
        "abc",
        "yz",
        "zz",
        "foo",
        "foo ",
        "bar 1",
        "12",
        ".com",
        "ü世",
        "/*",
        "*/",
        "0.5",
        "AB",
        "bC",
        "-Ä",
        "a\nb",
    ],
]
TABLE = token_table([piece.encode() for piece in PIECES])


@given(st.sampled_from(REGEXES), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_masks_are_those_of_a_naive_matcher(pattern: str, rng: random.Random) -> None:
    matcher, naive = compiled(GrammarKind.REGEX, pattern, TABLE), regex.compile(pattern)
    tokens, _ = walk(matcher, rng, 6, eager=0.2)
    for length in range(len(tokens) + 1):
        text = "".join(PIECES[token - 1] for token in tokens[:length])
        expected = [EOS] if naive.fullmatch(text) else []
        texts = enumerate((text + piece for piece in PIECES), 1)
        expected += [token for token, more in texts if naive.fullmatch(more, partial=True)]
        assert matcher.allowed_ids(tokens[:length]) == expected, (pattern, text)


@pytest.mark.parametrize("examples", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_grammar_begins_after_the_token_that_a_model_forces(examples: int) -> None:
    """Its masks are those of the tokens after it, forwards and backwards."""
    forced = len(PIECES)
    table = TokenTable(Vocabulary([b"", *(piece.encode() for piece in PIECES)]), 1 + len(PIECES), [EOS], forced)

    @given(st.sampled_from(REGEXES), st.randoms(use_true_random=False))
    @settings(max_examples=examples, deadline=None)
    def check(pattern: str, rng: random.Random) -> None:
        plain, shifted = (compiled(GrammarKind.REGEX, pattern, tokens) for tokens in (TABLE, table))
        tokens, _ = walk(plain, rng, 6, eager=0.2)
        for matcher in (shifted.copy(), shifted):
            for length in [0, *(rng.randint(0, 1 + len(tokens)) for _ in range(5))]:
                expected = plain.allowed_ids(tokens[: length - 1]) if length else [forced]
                assert matcher.allowed_ids([forced, *tokens][:length]) == expected
                more = rng.choices(tokens or [1], k=2)
                if length:
                    assert matcher.num_allowed([forced, *tokens][:length], more) == plain.num_allowed(
                        tokens[: length - 1], more
                    )

    check()


def test_characters_may_be_split_between_tokens() -> None:
    table = byte_table(["世".encode()[:2], "界".encode()[1:], "é".encode()])
    matcher = compiled(GrammarKind.REGEX, "[世é]界", table)
    first, second = matcher.allowed_ids([]), matcher.allowed_ids([257])
    assert first == [0xC3 + 1, 0xE4 + 1, 257, 259]
    assert second == ["世".encode()[2] + 1]
    assert matcher.allowed_ids([257, "世".encode()[2] + 1, "界".encode()[0] + 1]) == ["界".encode()[1] + 1, 258]


def test_the_first_token_may_add_other_bytes() -> None:
    """As of an encoder-decoder with sentencepiece, whose output begins without the space of its first word."""
    table = token_table([b" yes", b" no", b"no", b" ", b"es"], first={1: b"yes", 2: b"no", 4: b""})
    matcher = compiled(GrammarKind.CHOICE, "", table, choices=["yes", "no", "no no", " no"])
    assert matcher.allowed_ids([]) == [1, 2, 3]
    assert matcher.allowed_ids([2]) == [EOS, 2, 4]
    assert matcher.allowed_ids([3, 4]) == [3]
    assert matcher.allowed_ids([1]) == [EOS]


def test_texts_may_have_any_character() -> None:
    choices = [f"a{chr(code)}" for code in (*range(0x180), 0x2028, 0xFEFF, 0x1F600, 0x10FFFF)]
    matcher = compiled(GrammarKind.CHOICE, "", byte_table(), choices=choices)
    assert all(allows(matcher, choice) for choice in choices)
    literals = " | ".join(f'"a\\U{ord(choice[1]):08x}"' for choice in choices)
    matcher = compiled(GrammarKind.GRAMMAR, f"root ::= {literals}", byte_table())
    assert all(allows(matcher, choice) for choice in choices)


def test_a_text_that_no_token_continues_fails() -> None:
    """Again and again, but not the output if such a text was only a guess."""
    compiled_once = compiled(GrammarKind.CHOICE, "", token_table([b"a", b"b", b"c"]), choices=["abx", "ac"])
    for matcher in (compiled_once.copy(), compiled_once):
        for _ in range(2):
            assert matcher.allowed_ids([1]) == [2, 3]
            for _ in range(2):
                with pytest.raises(GrammarError, match="no text of the model's tokens matches"):
                    matcher.allowed_ids([1, 2])
            assert matcher.num_allowed([1, 2], [3]) == 0
            assert matcher.num_allowed([1], [3, EOS]) == 2
            assert matcher.allowed_ids([1, 3]) == [EOS]


def test_special_tokens_and_ids_beyond_the_model_are_never_allowed() -> None:
    table = token_table([b"a", b"", b"b", b""])
    assert compiled(GrammarKind.REGEX, "(?s:.*)", table).allowed_ids([]) == [EOS, 1, 3]


def test_an_end_that_has_a_text_is_no_text() -> None:
    """Such as a line break that ends an output."""
    table = TokenTable(Vocabulary([b"a", b"", b"\n", b"b"]), 4, [1, 2])
    matcher = compiled(GrammarKind.REGEX, r"a\n*b", table)
    assert matcher.allowed_ids([0]) == [3]
    assert matcher.allowed_ids([0, 3]) == [1, 2]


def test_a_matcher_follows_a_sequence_back() -> None:
    matcher = compiled(GrammarKind.CHOICE, "", byte_table(), choices=["abcd", "abxy"])
    a, b, c, x = (byte + 1 for byte in b"abcx")
    assert matcher.forced_tokens([a], 9) == [b]
    assert matcher.allowed_ids([a, b]) == [c, x]
    assert matcher.forced_tokens([a, b, c], 9) == [ord("d") + 1, EOS]
    assert matcher.forced_tokens([a, b, c], 1) == [ord("d") + 1]
    assert matcher.allowed_ids([]) == [a]
    copied = matcher.copy()
    with mock.patch.object(copied, "_compute", None):  # the first mask is made once for all copies
        assert copied.allowed_ids([]) == [a]


def test_a_matcher_follows_guesses_and_what_comes_instead() -> None:
    table, draw = byte_table(), random.Random(1)
    matcher = compiled(GrammarKind.REGEX, "(ab|ba|c){3,9}x?", table)
    output: list[int] = []
    for _ in range(300):
        fresh = compiled(GrammarKind.REGEX, "(ab|ba|c){3,9}x?", table)
        allowed = fresh.allowed_ids(output)
        assert matcher.allowed_ids(output) == allowed
        guess = [draw.choice((*b"abcx", EOS - 1)) + 1 for _ in range(3)]
        count = matcher.num_allowed(output, guess)
        follows = [guess[n] in fresh.allowed_ids(output + guess[:n]) for n in range(count)]
        assert all(follows)
        assert count == 3 or guess[count] not in set(fresh.allowed_ids(output + guess[:count])) - {EOS}
        for ahead in range(draw.randint(0, count)):
            matcher.mask(output + guess[:ahead])
        ended = EOS in (output := [*output, draw.choice(allowed)])
        output = output[: draw.randint(0, len(output))] if ended or draw.random() < 0.1 else output


SIZE = 1 << 16
HOSTILE = [
    (GrammarKind.GRAMMAR, "\n" * SIZE),
    (GrammarKind.GRAMMAR, " \n" * (SIZE // 2)),
    (GrammarKind.GRAMMAR, "a\n" * (SIZE // 2)),
    (GrammarKind.GRAMMAR, 'root ::= "a"' + "\n" * SIZE + "x"),
    (GrammarKind.GRAMMAR, 'root ::= "a"{1,' + " " * SIZE + "x"),
    (GrammarKind.GRAMMAR, 'root ::= "a"{' + "1" * SIZE + "}"),
    (GrammarKind.GRAMMAR, "root ::= [" + "a" * SIZE + "]"),
    (GrammarKind.GRAMMAR, 'root ::= "' + "a" * SIZE + '"'),
    (GrammarKind.GRAMMAR, "start: /a{" + " " * (SIZE // 2) + "," + " " * (SIZE // 2) + "x/"),
    (GrammarKind.GRAMMAR, "start: /(" + " " * SIZE + "/"),
    (GrammarKind.GRAMMAR, "start: /(" + "\n" * SIZE + "/"),
    *((GrammarKind.GRAMMAR, text * (SIZE // len(text))) for text in ("{", "{,", '"', '"\\', "/\\", "<", "%json 1 ")),
    (GrammarKind.REGEX, "a{" + " " * (SIZE // 2) + "," + " " * (SIZE // 2) + "x"),
    (GrammarKind.REGEX, "a{," + "1" * SIZE),
    (GrammarKind.REGEX, "(" + " " * SIZE),
    (GrammarKind.REGEX, "(" + "\n" * SIZE),
    (GrammarKind.JSON_SCHEMA, " " * SIZE),
]


@pytest.mark.parametrize(("kind", "text"), HOSTILE, ids=[repr(text[:12]) for _, text in HOSTILE])
def test_no_text_takes_long_to_read(kind: GrammarKind, text: str) -> None:
    """The GIL is held until a regular expression is done: one that backtracks from each place takes minutes."""
    started = time.process_time()
    with suppress(GrammarError):
        compiled(kind, text, TABLE)
    assert time.process_time() - started < 20


AMBIGUOUS = "root ::= x\n" + "\n".join(f"{a} ::= {a} {b} | {b} {a} | x y | y | [ab]" for a, b in ("xy", "yx"))


def test_masks_that_may_take_long_are_made_in_threads() -> None:
    """Masks of context-free grammars may take long, and those of an output that had a slow one."""
    letter = ord("a") + 1
    ambiguous, regular = (
        compiled(GrammarKind.GRAMMAR, AMBIGUOUS, byte_table()),
        compiled(GrammarKind.REGEX, "a*", TABLE),
    )
    assert (ambiguous.in_thread, regular.in_thread) == (True, False)
    matcher, tokens = ambiguous.copy(), [letter]
    with ThreadPoolExecutor(1) as executor:
        blocker = threading.Event()
        executor.submit(blocker.wait)
        matcher.prepare(tokens, executor)
        assert not matcher.ready
        blocker.set()
        assert set(matcher.allowed_ids(tokens)) == {EOS, letter, letter + 1}
    assert matcher.ready
    matcher.in_thread = False
    with suppress(GrammarError):  # more items than a mask may have
        while not matcher.in_thread:
            tokens.append(letter)
            matcher.mask(tokens)
    assert matcher.in_thread


def test_masks_that_nobody_waits_for_any_more_are_not_begun() -> None:
    matchers = [compiled(GrammarKind.GRAMMAR, AMBIGUOUS, byte_table()) for _ in range(3)]
    with ThreadPoolExecutor(1) as executor:
        blocker = threading.Event()
        executor.submit(blocker.wait)
        futures = [matcher.prepare([ord("a") + 1], executor) for matcher in matchers]
        matchers[1].abandon()
        blocker.set()
    assert [future.cancelled() for future in futures] == [False, True, False]


def test_the_end_of_the_process_waits_for_no_compilation_that_is_not_begun() -> None:
    answers: list[Acquired] = []
    lookups, blocker = LookupTable(answers.append), threading.Event()
    threads, _ = lookups.finders[GrammarSpec] = low_priority_pool("grammars"), partial(compile_grammar, table=TABLE)
    for _ in range(2):
        threads.submit(blocker.wait)
    lookups.acquire(Acquire(1, GrammarSpec(GrammarKind.REGEX, "a")))
    lookups.close()
    blocker.set()
    threads.shutdown(wait=True)
    assert not answers


def test_schemas_in_lark_are_those_of_a_json_schema() -> None:
    """Also a directive in a string of one, and with bounded blanks."""
    grammar = '''start: "<" %json {
      "const": "%json {}"
    } %json {"type": "array", "maxItems": 1} ">"'''
    text = [byte + 1 for byte in b'<"%json {}"[\n']
    matcher = compiled(GrammarKind.GRAMMAR, grammar, byte_table())
    assert all(token in matcher.allowed_ids(text[:at]) for at, token in enumerate(text))
    blank = ord(" ") + 1
    assert blank in matcher.allowed_ids([*text, *[blank] * 31])
    assert blank not in matcher.allowed_ids([*text, *[blank] * 32])


@pytest.mark.parametrize("before", ['"/"', '/"/', '"a" //"\n', '"\\\\" "//"', '/["#]/'])
def test_schemas_in_lark_are_checked_whatever_is_before_them(before: str) -> None:
    with pytest.raises(GrammarError, match="unsupported keyword x-guidance"):
        compiled(GrammarKind.GRAMMAR, f'start: {before} %json {{"x-guidance": {{}}}}', TABLE)


def test_the_strings_of_a_schema_in_lark_are_no_grammar() -> None:
    schema = '{"const": "x", "description": "a ::= b{99999} ' + "(" * 99 + '"}'
    matcher = compiled(GrammarKind.GRAMMAR, f"start: %json {schema}", byte_table())
    assert matcher.allowed_ids([]) == [ord('"') + 1]


def test_lark_grammars_are_taken_as_they_are() -> None:
    matcher = compiled(GrammarKind.GRAMMAR, 'start: "a" x?\nx: /[0-9]+/', byte_table())
    assert matcher.allowed_ids([ord("a") + 1]) == [EOS, *(ord(digit) + 1 for digit in "0123456789")]


def test_compilations_have_less_priority_than_their_process() -> None:
    threads = low_priority_pool("grammars")
    assert threads.submit(compile_grammar, GrammarSpec(GrammarKind.REGEX, "a"), TABLE).result().ready
    priority = threads.submit(os.getpriority, os.PRIO_PROCESS, 0).result()
    assert priority == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
