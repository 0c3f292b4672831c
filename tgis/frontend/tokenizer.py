"""A model's tokenizer: text to ids, truncation, offsets, and the vocabulary.

Everything comes from `tokenizer.json` through the `tokenizers` library; truncation and padding configured in
that file are switched off, since each request decides them. Ids to text is `detokenizer.py`.
"""

import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from tgis.errors import InvalidRequest, StartError
from tgis.models.added_tokens import add_tokens
from tgis.models.files import read_json, special_tokens
from tgis.utils.thread_pool import WorkPool

# The library raises nothing more specific than Exception, and its panics are not even that.
_NOT_OF_LIBRARY = (KeyboardInterrupt, SystemExit, StartError)

# Pre-tokenizers whose output does not have all of the text.
_DROPS_TEXT = ('"Removed"', '"Whitespace"', '"WhitespaceSplit"', '"BertPreTokenizer"', '"CharDelimiterSplit"')
_U32: Final = "I"


@dataclass(frozen=True, slots=True)
class Encoding:
    """One tokenized text, added special tokens included.

    Packed into 32-bit integers: millions of Python objects would keep the garbage collector busy.
    """

    packed_ids: "array[int]"  # the last ones, if not all were wanted
    packed_offsets: "array[int]"  # begin and end of each of these tokens; empty unless requested
    num_tokens: int  # length of the complete text

    @classmethod
    def of_ids(cls, ids: Sequence[int], keep_last: int) -> "Encoding":
        """The encoding of a text that comes tokenized."""
        return cls(array(_U32, ids[-keep_last:]), array(_U32), len(ids))

    @property
    def ids(self) -> list[int]:
        return self.packed_ids.tolist()

    @property
    def offsets(self) -> Iterator[tuple[int, int]]:
        """Spans in UTF-8 bytes of the text, end exclusive; (0, 0) for added special tokens."""
        bounds = iter(self.packed_offsets)
        return zip(bounds, bounds, strict=True)


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """How to tokenize the texts of a call, and which tokens to return."""

    offsets: bool = False
    keep_last: int = sys.maxsize  # return this many tokens of each text
    special_tokens: bool = True  # let the tokenizer add its special tokens
    max_tokens: int | None = None  # refuse to return more tokens than this, of all texts together


class Tokenizer:
    """The tokenizer of one model; safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        description: dict[str, Any],
        workers: int,
        eos_id: int | None,
        *,
        add_special_tokens: bool,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._add_special_tokens = add_special_tokens
        self.pool = WorkPool(workers, "tokenizer")
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size()  # number of ids, added tokens included
        # the highest id, if those of the model itself have no gaps; added tokens may have any
        self.max_token_id: int = max([backend.get_vocab_size(with_added_tokens=False) - 1, *added])
        self.decoder_types = tuple(_decoder_types(description.get("decoder")))  # outermost first; empty: none
        self.bos_token_id = _bos_token_id(backend) if add_special_tokens else None
        self.max_bytes_per_token = _max_bytes_per_token(description)
        self.eos_ids = () if eos_id is None else (eos_id,)

    @classmethod
    def load(cls, directory: Path, workers: int, *, add_special_tokens: bool = True) -> "Tokenizer":
        """Read `tokenizer.json` in a directory; StartError names a file that is missing or broken."""
        path = directory / "tokenizer.json"
        read_json(path)  # says more about what is wrong than the library
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            add_tokens(backend, directory)
            description = json.loads(backend.to_str())  # the file may leave types out
        except _NOT_OF_LIBRARY:
            raise
        except BaseException as error:
            raise StartError(f"{path} is not a tokenizer: {error}") from error
        eos_id = backend.token_to_id(special_tokens(directory).get("eos_token", ""))
        return cls(backend, description, workers, eos_id, add_special_tokens=add_special_tokens)

    def close(self) -> None:
        """Stop the threads, without waiting for texts that are being tokenized."""
        self.pool.close()

    async def encode(self, texts: Sequence[str], options: EncodeOptions) -> list[Encoding]:
        """Tokenize the texts of one call; InvalidRequest if one cannot be tokenized, or there are too many tokens."""
        size = len(texts) + sum(map(len, texts))
        if (encodings := await self.pool.run(size, partial(self._encode, texts, options))) is None:
            reason = f"the text has more than {options.max_tokens} tokens: send less, or ask for less about it"
            raise InvalidRequest("", reason)
        return encodings

    def _encode(self, texts: Sequence[str], options: EncodeOptions) -> list[Encoding] | None:
        """Return None for too many tokens: an exception would keep the encodings, up to 1 GiB, in its frames."""
        # Both release the GIL, unlike `encode`. Their async variants copy the added vocabulary for every call.
        encode = self._backend.encode_batch if options.offsets else self._backend.encode_batch_fast
        try:
            encodings = encode(texts, add_special_tokens=self._add_special_tokens and options.special_tokens)
        except BaseException as error:  # panics of the library are not Exceptions
            raise InvalidRequest("text", f"tokenizer error {error}") from error
        num_kept = sum([min(len(encoding), options.keep_last) for encoding in encodings])
        if options.max_tokens is not None and num_kept > options.max_tokens:
            return None
        return [_packed(text, encoding, options) for text, encoding in zip(texts, encodings, strict=True)]

    def encode_without_special_tokens(self, text: str) -> list[int]:
        """Tokenize a short text in the calling thread."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def count(self, texts: Sequence[str]) -> int:
        """The number of tokens of all texts, in the calling thread."""
        encodings = self._encode(texts, EncodeOptions(keep_last=0, special_tokens=False))
        return sum(encoding.num_tokens for encoding in encodings or ())

    def truncate(self, ids: list[int], limit: int) -> list[int]:
        """Keep the last `limit` ids, the first replaced by BOS if the tokenizer adds one; 0 keeps all."""
        if not limit or len(ids) <= limit:
            return ids
        kept = ids[-limit:]
        if self.bos_token_id is not None:
            kept[0] = self.bos_token_id
        return kept

    def to_json(self) -> str:
        """The tokenizer as `tokenizer.json`, the tokens that stand beside the file included."""
        return self._backend.to_str()

    def token_text(self, token_id: int) -> str:
        """The raw vocabulary string, such as `Ġfirst` or `</s>`; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def special_token_id(self, text: str) -> int | None:
        """The id of a special token; None if the text is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id if token_id in self._special else None

    async def decode_batch(self, texts: list[list[int]]) -> list[str]:
        """Decode whole texts with their special tokens."""
        decode = partial(self._backend.decode_batch, texts, skip_special_tokens=False)
        return await self.pool.run(sum(map(len, texts)), decode)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Decode the ids as one whole text; unknown ids are dropped."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def reply_too_large(max_bytes: int) -> InvalidRequest:
    """The error for texts whose tokens do not fit into a reply."""
    return InvalidRequest("", f"the reply has more than {max_bytes} bytes: send less text, or ask for less about it")


def _packed(text: str, encoding: tokenizers.Encoding, options: EncodeOptions) -> Encoding:
    num_tokens = len(encoding)
    first = max(num_tokens - options.keep_last, 0)
    offsets = _byte_offsets(text, encoding, first) if options.offsets else ()
    return Encoding(array(_U32, encoding.ids[first:]), array(_U32, offsets), num_tokens)


def _byte_offsets(text: str, encoding: tokenizers.Encoding, first: int) -> Iterable[int]:
    """Spans of the tokens from the first one on, in UTF-8 bytes; the Python binding has them in characters."""
    # Token by token, since `encoding.offsets` of 4 million tokens keeps the GIL for 0.7 s.
    spans = (encoding.token_to_chars(index) or (0, 0) for index in range(first, len(encoding)))
    chars = chain.from_iterable(spans)
    if text.isascii():
        return chars
    data = text.encode()
    starts = array(_U32, (index for index, byte in enumerate(data) if byte & 0xC0 != 0x80))
    starts.append(len(data))
    return map(starts.__getitem__, chars)


def _max_bytes_per_token(description: dict[str, Any]) -> int | None:
    """The most bytes of text in one token; None unless the tokenizer is byte-level BPE that keeps all text."""
    model, steps, added = description["model"], json.dumps(description["pre_tokenizer"]), description["added_tokens"]
    changes_text = description["normalizer"] or any(token["lstrip"] or token["rstrip"] for token in added)
    if model["type"] != "BPE" or changes_text or any(step in steps for step in _DROPS_TEXT):
        return None
    if not model["vocab"].keys() >= set(ByteLevel.alphabet()) or '"ByteLevel"' not in steps:
        return None
    return max(map(len, [*model["vocab"], *(token["content"].encode() for token in added)]))


def _bos_token_id(backend: tokenizers.Tokenizer) -> int | None:
    """The special token that is put before every text, found by trying, not from a configuration file."""
    try:
        encoding = backend.encode("A")
    except _NOT_OF_LIBRARY:
        raise
    except BaseException as error:
        raise StartError(f"the tokenizer cannot encode the letter A: {error}") from error
    mask = encoding.special_tokens_mask
    return encoding.ids[0] if mask[:1] == [1] and 0 in mask else None


def _decoder_types(decoder: dict[str, Any] | None) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for member in decoder.get("decoders", ()):
            yield from _decoder_types(member)
