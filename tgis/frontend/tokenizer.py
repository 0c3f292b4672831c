"""A model's tokenizer: text to ids, truncation, offsets, and the vocabulary.

Everything comes from `tokenizer.json` through the `tokenizers` library; truncation and padding configured in
that file are switched off, since each request decides them. Ids to text is `detokenizer.py`.
"""

import json
import sys
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import tokenizers

from tgis.errors import InvalidRequest, StartError
from tgis.frontend.tokenizer_properties import CutRule, cut_rule, max_bytes_per_token
from tgis.models.files import read_json, special_tokens
from tgis.utils.thread_pool import WorkPool, leave_gil

# The library raises nothing more specific than Exception, and its panics are not even that.
_NOT_OF_LIBRARY = (KeyboardInterrupt, SystemExit)

CHARS_PER_MICROSECOND = 2
PART = 1 << 14  # characters that the library tokenizes at once, if longer texts can be cut
_PART_WITH_OFFSETS = 1 << 11  # to read offsets takes the GIL often, for 0.3 ms in all
_AWAY_SECONDS = 0.004  # between steps with offsets
_CHARS_PER_TEXT = 32  # what handing a text to the library and taking its tokens costs, in characters
_CUT_TRIES = 256

_U32: Final = "I"


@dataclass(frozen=True, slots=True)
class Encoding:
    """One tokenized text, added special tokens included.

    As numbers of 32 bits, since there may be millions of tokens: objects would keep the garbage collector busy.
    """

    packed_ids: "array[int]"  # the last ones, if not all were wanted
    packed_offsets: "array[int]"  # begin and end of each of these tokens; empty unless requested
    num_tokens: int  # of the whole text, or of as much of its end as was enough

    @classmethod
    def of_ids(cls, ids: list[int], keep: int) -> "Encoding":
        """The encoding of a text that comes tokenized; the last `keep` ids."""
        return cls(array(_U32, ids[-keep:]), array(_U32), len(ids))

    @property
    def ids(self) -> list[int]:
        return self.packed_ids.tolist()

    @property
    def offsets(self) -> Iterator[tuple[int, int]]:
        """Spans in UTF-8 bytes of the text, end exclusive; (0, 0) for added special tokens."""
        numbers = iter(self.packed_offsets)
        return zip(numbers, numbers, strict=True)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call needs to know about its texts."""

    offsets: bool = False
    keep: int = sys.maxsize  # ids and offsets of the last so many tokens
    enough: int = sys.maxsize  # the end of a text is enough if it has more tokens than this
    special_tokens: bool = True  # add those that the tokenizer adds
    max_tokens: int | None = None  # of which ids and offsets are kept, of all texts


class Tokenizer:
    """The tokenizer of one model; safe to use from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, description: dict[str, Any], workers: int, *, add_special_tokens: bool
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._add_special_tokens = add_special_tokens
        self.pool = WorkPool(workers + 1, "tokenizer")
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size()  # number of ids, added tokens included
        # the highest id, if those of the model itself have no gaps; added tokens may have any
        self.max_token_id: int = max([backend.get_vocab_size(with_added_tokens=False) - 1, *added])
        self.decoder_types = tuple(_decoder_types(description.get("decoder")))  # outermost first; empty: none
        self._added = _added_special_tokens(backend) if add_special_tokens else ([], [])
        self.bos_token_id = self._added[0][0] if self._added and self._added[0] else None
        self._cut_rule = cut_rule(description) if self._added else None
        self.max_bytes_per_token = max_bytes_per_token(description)  # None: nobody knows
        self.eos_ids: tuple[int, ...] = ()  # of the token that the files call so

    @classmethod
    def load(cls, directory: Path, workers: int, *, add_special_tokens: bool = True) -> "Tokenizer":
        """Read `tokenizer.json` in a directory; StartError names a file that is missing or broken."""
        path = directory / "tokenizer.json"
        read_json(path)  # says more about what is wrong than the library
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            description = json.loads(backend.to_str())  # the file may leave types out
        except _NOT_OF_LIBRARY:
            raise
        except BaseException as error:
            raise StartError(f"{path} is not a tokenizer: {error}") from error
        tokenizer = cls(backend, description, workers, add_special_tokens=add_special_tokens)
        eos_id = backend.token_to_id(special_tokens(directory).get("eos_token", ""))
        tokenizer.eos_ids = () if eos_id is None else (eos_id,)
        return tokenizer

    def close(self) -> None:
        """Stop the worker threads; queued texts are dropped."""
        self.pool.close()

    async def encode(self, texts: Sequence[str], wanted: Wanted) -> list[Encoding]:
        """Tokenize the texts of one call; InvalidRequest if one cannot be tokenized, or there are too many tokens."""
        cost = sum(len(text) + _CHARS_PER_TEXT for text in texts) / CHARS_PER_MICROSECOND
        steps = self._encode_in_steps(texts, wanted)
        later = partial(_step_after_pause, steps) if wanted.offsets else steps.__next__
        encodings = await self.pool.run(cost, steps.__next__)
        while len(encodings) < len(texts):  # smaller calls go in between
            encodings += await self.pool.run(cost, later)
        if wanted.max_tokens is not None:
            _check_num_tokens(sum(len(one.packed_ids) for one in encodings), wanted.max_tokens)
        return encodings

    def _encode_in_steps(self, texts: Sequence[str], wanted: Wanted) -> Iterator[list[Encoding]]:
        """The encodings that each step completes; it takes about PART characters, or one text that cannot be cut."""
        rule, special_tokens = self._cut_rule, self._add_special_tokens and wanted.special_tokens
        done, size = list[Encoding](), 0
        for text in texts:
            if len(text) > 2 * PART and rule is not None and (rule.keeps_offsets or not wanted.offsets):
                done.append((yield from self._encode_in_parts(text, rule, wanted)))
            else:
                found = self._encode_at_once(text, wanted, special_tokens=special_tokens)
                done.append(_packed_encoding(text, found, wanted))
            size += len(text) + _CHARS_PER_TEXT
            if size > PART:
                yield done
                done, size = [], 0
        yield done

    def _encode_at_once(self, text: str, wanted: Wanted, *, special_tokens: bool) -> tokenizers.Encoding:
        # Never `encode`: unlike `encode_batch` and `encode_batch_fast`, it holds the GIL.
        encode = self._backend.encode_batch if wanted.offsets else self._backend.encode_batch_fast
        try:
            return encode([text], add_special_tokens=special_tokens)[0]
        except BaseException as error:  # panics of the library are not Exceptions
            raise InvalidRequest("text", f"tokenizer error {error}") from error

    def _encode_in_parts(self, text: str, rule: CutRule, wanted: Wanted) -> Generator[list[Encoding], None, Encoding]:
        """Tokenize a long text from its end, which may be enough; each part is a step.

        The library's encoding of the whole would take a hundred bytes for each token, and the GIL to be freed.
        """
        assert self._added is not None
        before, after = self._added if wanted.special_tokens else ([], [])
        parts = [_special_tokens(after, wanted)]  # the last one first
        num_tokens, first_byte = len(after), len(text.encode())
        for start, end in _parts_from_end(text, _PART_WITH_OFFSETS if wanted.offsets else PART):
            first_byte -= len(text[start:end].encode())
            part = text[start + (rule.drops_space and start > 0) : end]
            found = self._encode_at_once(part, wanted, special_tokens=False)
            parts.append(_packed_encoding(part, found, wanted, first_byte))
            num_tokens += len(found)
            if wanted.max_tokens is not None:
                _check_num_tokens(min(num_tokens, wanted.keep), wanted.max_tokens)
            if num_tokens > wanted.enough:
                break
            yield []
        else:
            parts.append(_special_tokens(before, wanted))
            num_tokens += len(before)
        return _joined(parts[::-1], num_tokens, wanted)

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


def _step_after_pause(steps: Iterator[list[Encoding]]) -> list[Encoding]:
    """Pause in the thread of large calls, so that none of them takes the GIL instead, and step."""
    leave_gil(_AWAY_SECONDS)
    return next(steps)


def reply_too_large(max_bytes: int) -> InvalidRequest:
    """The error for texts whose tokens do not fit into a reply."""
    return InvalidRequest("", f"the reply has more than {max_bytes} bytes: send less text, or ask for less about it")


def _parts_from_end(text: str, size: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each part, cut where tokenizer_properties.py says; the first part is as long as it must be."""
    end = len(text)
    while end > 2 * size and (cut := _last_cut(text, end - 2 * size, end - size)):
        yield cut, end
        end = cut
    yield 0, end


def _last_cut(text: str, start: int, end: int) -> int:
    """Where a text can be cut; 0 if no such place is found soon."""
    for _ in range(_CUT_TRIES):
        if (end := text.rfind(" ", start, end)) <= 0:
            break
        if _is_ascii_alnum(text[end - 1]) and _is_ascii_alnum(text[end + 1]):
            return end
    return 0


def _is_ascii_alnum(char: str) -> bool:
    return char.isascii() and char.isalnum()


def _check_num_tokens(num_tokens: int, most: int) -> None:
    """InvalidRequest if there are more tokens than a reply has room for."""
    if num_tokens > most:
        raise InvalidRequest("", f"the text has more than {most} tokens: send less, or ask for less about it")


def _packed_encoding(text: str, encoding: tokenizers.Encoding, wanted: Wanted, first_byte: int = 0) -> Encoding:
    """The encoding of a text, or of a part that begins at this byte."""
    num_tokens = len(encoding)
    kept = min(wanted.keep, num_tokens)
    ids = array(_U32, encoding.ids[num_tokens - kept :] if kept else ())
    offsets = _byte_offsets(text, encoding, num_tokens - kept, first_byte) if wanted.offsets else ()
    return Encoding(ids, array(_U32, offsets), num_tokens)


def _special_tokens(ids: list[int], wanted: Wanted) -> Encoding:
    return Encoding(array(_U32, ids), array(_U32, [0, 0] * len(ids) if wanted.offsets else ()), len(ids))


def _joined(parts: list[Encoding], num_tokens: int, wanted: Wanted) -> Encoding:
    ids, offsets = array(_U32), array(_U32)
    for part in parts:
        ids += part.packed_ids
        offsets += part.packed_offsets
    first = max(len(ids) - wanted.keep, 0)
    return Encoding(ids[first:], offsets[2 * first :], num_tokens)


def _byte_offsets(text: str, encoding: tokenizers.Encoding, first: int, first_byte: int) -> Iterable[int]:
    """Spans of the tokens from the first one on, in UTF-8 bytes; the Python binding has them in characters."""
    chars = chain.from_iterable(encoding.offsets[first:])
    if text.isascii():
        return map(first_byte.__add__, chars)
    data = text.encode()
    starts = array(_U32, (index + first_byte for index, byte in enumerate(data) if byte & 0xC0 != 0x80))
    starts.append(len(data) + first_byte)
    return map(starts.__getitem__, chars)


def _added_special_tokens(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """What is put before and after every text, found by trying, not from a configuration file; None: unclear."""
    try:
        encoding = backend.encode("A")
    except _NOT_OF_LIBRARY:
        raise
    except BaseException as error:
        raise StartError(f"the tokenizer cannot encode the letter A: {error}") from error
    special = encoding.special_tokens_mask
    if 0 not in special:
        return None
    before, after = special.index(0), special[::-1].index(0)
    return encoding.ids[:before], encoding.ids[len(encoding.ids) - after :]


def _decoder_types(decoder: dict[str, Any] | None) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for member in decoder.get("decoders", ()):
            yield from _decoder_types(member)
