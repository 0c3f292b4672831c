"""Ids to text, token by token; the same for unary calls, streams and stop sequences.

A token is some bytes and the text is their UTF-8 decoding, so that a character may span any number of tokens at a
constant cost per token. `stop_strings.py` decides which text may be sent already.
"""

import codecs
import re
from collections.abc import Collection
from functools import lru_cache
from itertools import chain

from tgis.errors import StartError
from tgis.frontend.tokenizer import Tokenizer
from tgis.ipc.lookups import Vocabulary

_Utf8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROGATES_TO_REPLACEMENT = dict.fromkeys(range(0xDC80, 0xDD00), _REPLACEMENT)
_CACHED_TOKENS = 1 << 16
_KEEP_FIRST_SPACE = {"ByteLevel", "CTC", "BPEDecoder"}  # decoders that keep a space before the first token
_DROP_FIRST_SPACE = {"Metaspace", "WordPiece", "Sequence", "none"}
_CONTEXT_DEPENDENT = {"CTC", "BPEDecoder"}  # what a token adds depends on the previous one


class TokenDecoder:
    """The bytes that a token adds to an output, cached; one decoder per model, shared by its requests.

    They are what the library's decoding adds when the token follows another one: in general a placeholder, which
    keeps the space before the first word; for the first token of an encoder-decoder none, which drops it.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: Collection[int], *, encoder_decoder: bool, output_special_tokens: bool
    ) -> None:
        types = tokenizer.decoder_types or ("none",)
        self._eos_ids, self._encoder_decoder = eos_ids, encoder_decoder
        if not encoder_decoder and types[0] not in _KEEP_FIRST_SPACE | _DROP_FIRST_SPACE:
            raise StartError(f"unsupported tokenizer type: decoder {types[0]}")
        self.tokenizer = tokenizer
        self._skip_special = not output_special_tokens
        self._byte_level = "ByteLevel" in types
        self._byte_fallback = "ByteFallback" in types
        self._context_dependent = not _CONTEXT_DEPENDENT.isdisjoint(types)
        # whether a token is not part of the output: unknown, or special unless those are wanted
        self.skips = lru_cache(_CACHED_TOKENS)(self._is_skipped)
        self._placeholder = self._find_placeholder()
        plain = encoder_decoder or self._context_dependent or types[0] in _KEEP_FIRST_SPACE
        self._before_first = None if plain else self._placeholder
        self._cached_bytes = lru_cache(_CACHED_TOKENS)(self._compute_bytes)
        self.splits_graphemes = types[0] in {"ByteLevel", "Sequence"}
        self.replaces_each_byte = self._byte_fallback  # one U+FFFD per invalid byte, else per invalid sequence
        self.hidden_eos_ids = frozenset(eos_ids if output_special_tokens else ())

    def variant(self, *, output_special_tokens: bool, hide_eos: bool = True) -> "TokenDecoder":
        """A decoder of the same tokenizer, with or without special tokens and a final EOS in the text."""
        return TokenDecoder(
            self.tokenizer,
            self._eos_ids if hide_eos else (),
            encoder_decoder=self._encoder_decoder,
            output_special_tokens=output_special_tokens,
        )

    def _is_skipped(self, token_id: int) -> bool:
        if self._skip_special and self.tokenizer.is_special(token_id):
            return True
        return not self.tokenizer.token_text(token_id)

    def token_bytes(self, previous: int | None, token_id: int) -> bytes:
        """The bytes that a token adds after `previous`, the last token not skipped; None for the first token."""
        if previous is None:
            return self._cached_bytes(self._before_first, token_id)
        return self._cached_bytes(previous if self._context_dependent else self._placeholder, token_id)

    def vocabulary(self) -> Vocabulary:
        """What each token adds to an output; nothing where that depends on the token before."""
        if self._context_dependent:
            return Vocabulary([])
        tokenizer = self.tokenizer
        ids = range(tokenizer.max_token_id + 1)
        text_ids = [token for token in ids if tokenizer.token_text(token) and not tokenizer.is_special(token)]
        later = {token: self._compute_bytes(self._placeholder, token) for token in text_ids}
        first = later if self._before_first is not None else {t: self._compute_bytes(None, t) for t in text_ids}
        return Vocabulary(
            [later.get(token, b"") for token in ids], {t: data for t, data in first.items() if data != later[t]}
        )

    def _compute_bytes(self, context: int | None, token_id: int) -> bytes:
        before = [] if context is None else [context]
        head, text = self._decode(before), self._decode([*before, token_id])
        text = text[len(head) :] if text.startswith(head) else self._decode([token_id])
        return self._raw_bytes(token_id, text) if _REPLACEMENT in text else text.encode()

    def _raw_bytes(self, token_id: int, text: str) -> bytes:
        """The bytes of a token that is not valid text by itself."""
        token = self.tokenizer.token_text(token_id)
        if self._byte_level:
            alphabet = _byte_alphabet()
            return bytes(alphabet[c] for c in token) if alphabet.keys() >= set(token) else token.encode()
        byte = _FALLBACK_BYTE.fullmatch(token) if self._byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else text.encode()

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def _find_placeholder(self) -> int:
        candidates = chain(self.tokenizer.encode_without_special_tokens("A"), range(self.tokenizer.vocab_size))
        return next((token_id for token_id in candidates if not self.skips(token_id)), 0)


class Detokenizer:
    """The text of one output, without one final EOS and without U+FFFD at the end."""

    __slots__ = ("_decoder", "_held_eos", "_held_replacements", "_previous", "_utf8")

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._utf8 = _Utf8("surrogateescape" if decoder.replaces_each_byte else "replace")
        self._previous: int | None = None
        self._held_eos: int | None = None  # text only if something follows it
        self._held_replacements = 0  # text only if something else follows them

    def add(self, token_id: int) -> str:
        """Return the text that the next token completes; what is never completed is not part of the output."""
        if self._decoder.skips(token_id):
            return ""
        data = b""
        if self._held_eos is not None:
            data = self._decoder.token_bytes(self._previous, self._held_eos)
            self._previous, self._held_eos = self._held_eos, None
        if token_id in self._decoder.hidden_eos_ids:
            self._held_eos = token_id
        else:
            data += self._decoder.token_bytes(self._previous, token_id)
            self._previous = token_id
        text = self._utf8.decode(data)
        return self._hold_back_replacements(
            text.translate(_SURROGATES_TO_REPLACEMENT) if self._decoder.replaces_each_byte else text
        )

    def _hold_back_replacements(self, text: str) -> str:
        body = text.rstrip(_REPLACEMENT)
        held = self._held_replacements
        if not body:
            self._held_replacements = held + len(text)
            return ""
        self._held_replacements = len(text) - len(body)
        return _REPLACEMENT * held + body if held else body


@lru_cache(1)
def _byte_alphabet() -> dict[str, int]:
    """The byte that each character stands for in byte-level vocabularies, GPT-2's and all others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}
