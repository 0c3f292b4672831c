"""A model's tokenizer: text to ids in a thread pool, truncation, offsets, and the vocabulary.

Everything comes from `tokenizer.json` through the `tokenizers` library; truncation and padding configured in
that file are switched off, since each request decides them. Ids to text is `detokenizer.py`.
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from tgis.errors import InvalidRequest, StartError
from tgis.models.files import read_json


@dataclass(frozen=True, slots=True)
class Encoding:
    """One tokenized text, added special tokens included; `offsets` is empty unless requested."""

    ids: list[int]
    offsets: list[tuple[int, int]]  # UTF-8 bytes of the text, end exclusive; (0, 0) for added special tokens

    def keep_last(self, limit: int) -> "Encoding":
        """Truncate by plain slicing, as the Tokenize RPC does; 0 keeps all."""
        return Encoding(self.ids[-limit:], self.offsets[-limit:]) if limit else self


class Tokenizer:
    """The tokenizer of one model; safe to use from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, decoder_types: tuple[str, ...], workers: int, *, add_special_tokens: bool
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._add_special_tokens = add_special_tokens
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")
        self._special = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.decoder_types = decoder_types  # outermost first, then its members; empty: none
        self.bos_token_id = _bos_token_id(backend) if add_special_tokens else None

    @classmethod
    def load(cls, directory: Path, workers: int, *, add_special_tokens: bool = True) -> "Tokenizer":
        """Read `tokenizer.json` in a directory; StartError names a file that is missing or broken."""
        path = directory / "tokenizer.json"
        description = read_json(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise StartError(f"{path} is not a tokenizer: {error}") from error
        return cls(
            backend, tuple(_decoder_types(description.get("decoder"))), workers, add_special_tokens=add_special_tokens
        )

    def close(self) -> None:
        """Stop the worker threads; queued texts are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def encode(self, texts: Sequence[str], *, offsets: bool = False) -> list[Encoding]:
        """Tokenize the texts of one call; InvalidRequest if one cannot be tokenized."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, texts, offsets)

    def _encode(self, texts: Sequence[str], offsets: bool) -> list[Encoding]:
        # Never `encode`: unlike `encode_batch` and `encode_batch_fast`, it holds the GIL.
        encode = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
        try:
            encodings = encode(texts, add_special_tokens=self._add_special_tokens)
        except BaseException as error:  # panics of the library are not Exceptions
            raise InvalidRequest("text", f"tokenizer error {error}") from error
        if not offsets:
            return [Encoding(encoding.ids, []) for encoding in encodings]
        pairs = zip(texts, encodings, strict=True)
        return [Encoding(encoding.ids, _byte_offsets(text, encoding)) for text, encoding in pairs]

    def encode_without_special_tokens(self, text: str) -> list[int]:
        """Tokenize a short text in the calling thread."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def truncate(self, ids: list[int], limit: int) -> list[int]:
        """Keep the last `limit` ids, the first replaced by BOS if the tokenizer adds one; 0 keeps all."""
        if not limit or len(ids) <= limit:
            return ids
        kept = ids[-limit:]
        if self.bos_token_id is not None:
            kept[0] = self.bos_token_id
        return kept

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        size: int = self._backend.get_vocab_size()
        return size

    @property
    def max_token_id(self) -> int:
        """The highest id, if those of the model itself have no gaps; added tokens may have any."""
        size: int = self._backend.get_vocab_size(with_added_tokens=False)
        return max([size - 1, *self._backend.get_added_tokens_decoder()])

    def token_text(self, token_id: int) -> str:
        """The raw vocabulary string, such as `Ġfirst` or `</s>`; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Decode the ids as one whole text; unknown ids are dropped."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def _byte_offsets(text: str, encoding: tokenizers.Encoding) -> list[tuple[int, int]]:
    """Spans in UTF-8 bytes; those of the Python binding are in characters."""
    # One by one: `encoding.offsets` holds the GIL while it makes the whole list.
    spans = (encoding.token_to_chars(index) or (0, 0) for index in range(len(encoding)))
    if text.isascii():
        return list(spans)
    data = text.encode()
    starts = [index for index, byte in enumerate(data) if byte & 0xC0 != 0x80]  # of each character
    starts.append(len(data))
    return [(starts[start], starts[end]) for start, end in spans]


def _bos_token_id(backend: tokenizers.Tokenizer) -> int | None:
    """The special token put before every text, found by trying rather than from a configuration file."""
    try:
        encoding = backend.encode("A")
    except Exception as error:  # the library raises nothing more specific
        raise StartError(f"the tokenizer cannot encode the letter A: {error}") from error
    added = encoding.special_tokens_mask
    leading = 0 in added and added.index(0) > 0  # before the letter, not after it as in T5
    return encoding.ids[0] if leading else None


def _decoder_types(decoder: dict[str, Any] | None) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for member in decoder.get("decoders", ()):
            yield from _decoder_types(member)
