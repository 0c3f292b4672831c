"""Random walks through grammars, as a model would take them whose every allowed token is equally likely."""

import random
from collections.abc import Iterable, Mapping, Sequence

from tgis.ipc.lookups import GrammarKind, GrammarSpec, Vocabulary
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.matcher import GrammarMatcher, TokenTable

EOS = 0


def token_table(texts: Iterable[bytes], first: dict[int, bytes] | None = None) -> TokenTable:
    """EOS, then tokens of these texts from 1 on."""
    tokens = [b"", *texts]
    return TokenTable(Vocabulary(tokens, first or {}), len(tokens), [EOS])


def digits(vocab_size: int) -> TokenTable:
    """EOS, then the digits over and over."""
    return token_table([b"%d" % (number % 10) for number in range(1, vocab_size)])


def byte_table(more: Iterable[bytes] = ()) -> TokenTable:
    """Byte b is token b + 1; then come more tokens."""
    return token_table([*(bytes([byte]) for byte in range(256)), *more])


def compiled(kind: GrammarKind, text: str, table: TokenTable, *, choices: Sequence[str] = ()) -> GrammarMatcher:
    return compile_grammar(GrammarSpec(kind, text, tuple(choices)), table)


def accepts(matcher: GrammarMatcher, text: str, special: Mapping[str, int] = {}) -> bool | int:
    """Whether an output may be the text, in tokens of `byte_table` and special ones; if it is no beginning of an
    output, how many of its tokens are.
    """
    tokens, rest = list[int](), text.encode()
    while rest:
        mark = next((mark for mark in special if rest.startswith(mark.encode())), "")
        token = special[mark] if mark else rest[0] + 1
        if token not in matcher.allowed_ids(tokens):
            return len(tokens)
        tokens.append(token)
        rest = rest[len(mark.encode()) or 1 :]
    return EOS in matcher.allowed_ids(tokens)


def walk(matcher: GrammarMatcher, rng: random.Random, limit: int, eager: float = 0.5) -> tuple[list[int], bool]:
    """Allowed tokens, and whether the end was among them; it is taken as soon as it may be with this probability."""
    tokens: list[int] = []
    while len(tokens) < limit:
        allowed = matcher.allowed_ids(tokens)
        assert allowed
        if EOS in allowed and (len(allowed) == 1 or rng.random() < eager):
            return tokens, True
        tokens.append(rng.choice([token for token in allowed if token != EOS]))
    return tokens, False
