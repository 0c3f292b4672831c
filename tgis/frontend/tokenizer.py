"""A model's tokenizer: text to ids in threads, truncation, offsets, and the vocabulary.

Everything comes from `tokenizer.json` through the `tokenizers` library; truncation and padding configured in
that file are switched off, since each request decides them. Ids to text is `detokenizer.py`.

A long text is tokenized in parts where that is certain to give the same tokens: no thread is busy for long, and a
request that truncates the text needs only its end. Other long texts have a thread of their own.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import tokenizers

from tgis.errors import InvalidRequest, StartError
from tgis.frontend.tokenizer_pool import SizedTurns, TokenizerPool
from tgis.frontend.tokenizer_properties import CutRule, cut_rule, max_bytes_per_token
from tgis.models.files import read_json
from tgis.utils.run_together import run_together
from tgis.utils.slices import Slicer

# The library raises nothing more specific than Exception, and its panics are not even that.
_NOT_OF_LIBRARY = (KeyboardInterrupt, SystemExit)

SHORT = 1 << 8  # characters, for 0.1 ms at most
PART = 1 << 14  # likewise, for some milliseconds of a thread
LONG = 4 * PART
_CUT_TRIES = 256
_CHARS_PER_TEXT = 32  # as much as those in it: to hand a text to the library and take its tokens takes the GIL
_OFFSETS_PER_UNIT = 16  # of a slice

_U32: Final = "I"


@dataclass(frozen=True, slots=True)
class Encoding:
    """One tokenized text, added special tokens included.

    As numbers of 32 bits, since there may be millions of tokens: objects would keep the garbage collector busy.
    """

    packed_ids: "memoryview[int]"  # the last ones, if not all were wanted
    packed_offsets: "memoryview[int]"  # begin and end of each of these tokens; empty unless requested
    num_tokens: int  # of the whole text, or more than enough

    @classmethod
    def of_ids(cls, ids: list[int], keep: int) -> "Encoding":
        """Of a text that comes tokenized."""
        return cls(_packed(ids[-keep:]), _packed(()), len(ids))

    @property
    def ids(self) -> list[int]:
        return self.packed_ids.tolist()

    @property
    def offsets(self) -> Iterator[tuple[int, int]]:
        """In UTF-8 bytes of the text, end exclusive; (0, 0) for added special tokens."""
        numbers = iter(self.packed_offsets)
        return zip(numbers, numbers, strict=True)

    def keep_last(self, limit: int) -> "Encoding":
        """Truncate by plain slicing, as the Tokenize RPC does; 0 keeps all."""
        if not limit:
            return self
        return Encoding(self.packed_ids[-limit:], self.packed_offsets[-2 * limit :], min(self.num_tokens, limit))


@dataclass(frozen=True, slots=True)
class ReplyLimit:
    """What a reply about the tokens may have, to refuse texts before all of them is tokenized."""

    max_bytes: int
    token_bytes: Callable[[int], int]  # that a token takes at least which begins at this byte, or later


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call needs to know about its texts."""

    offsets: bool = False
    keep: int | None = None  # ids and offsets of the last so many tokens; None: of all
    enough: int | None = None  # whether there are more tokens than this, not how many
    special_tokens: bool = True  # those that the tokenizer adds
    reply: ReplyLimit | None = None  # about the tokens that are kept, of all texts


EVERYTHING = Wanted()


@dataclass(frozen=True, slots=True)
class _Encoded:
    """What threads make. Offsets are still to be read, one by one: to read all at once holds the GIL for milliseconds.

    That is for the event loop: threads would take the GIL whenever the loop lets go of it, for half a millisecond.
    """

    packed_ids: "memoryview[int]"  # the last ones, if not all were wanted
    num_tokens: int
    encoding: tokenizers.Encoding | None  # for the offsets, if they are wanted
    starts: Sequence[int]  # the byte at which each character of the text begins; nothing if it has only ASCII
    base: int = 0  # the byte at which the text begins

    async def with_offsets(self, slicer: Slicer) -> Encoding:
        """Read them, if they are wanted."""
        offsets = array(_U32)
        if self.encoding is not None:
            first = self.num_tokens - len(self.packed_ids)
            async for some in slicer.slices(range(first, self.num_tokens, _OFFSETS_PER_UNIT)):
                offsets.extend(self._offsets(some[0], min(some[-1] + _OFFSETS_PER_UNIT, self.num_tokens)))
        return Encoding(self.packed_ids, memoryview(offsets), self.num_tokens)

    def _offsets(self, first: int, end: int) -> Iterable[int]:
        """Spans in UTF-8 bytes; those of the Python binding are in characters."""
        assert self.encoding is not None
        to_chars, starts, base = self.encoding.token_to_chars, self.starts, self.base
        chars = chain.from_iterable([to_chars(index) or (0, 0) for index in range(first, end)])
        if starts:
            return [starts[char] + base for char in chars]
        return [char + base for char in chars] if base else chars


@dataclass(slots=True)
class _Call:
    """Texts that are tokenized together."""

    wanted: Wanted
    size: int  # characters
    slicer: Slicer
    reply_bytes: int = 0  # so far, at least

    async def finished(self, encoded: _Encoded, start: int = 0) -> Encoding:
        """Of a text, or of the part that begins at this character; InvalidRequest if the reply becomes too large.

        That is the byte at which it begins, or an earlier one.
        """
        if (reply := self.wanted.reply) is not None:
            self.reply_bytes += len(encoded.packed_ids) * reply.token_bytes(start)
            if self.reply_bytes > reply.max_bytes:
                raise reply_too_large(reply.max_bytes)
        return await encoded.with_offsets(self.slicer)


class Tokenizer:
    """The tokenizer of one model; safe to use from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, description: dict[str, Any], workers: int, *, add_special_tokens: bool
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._add_special_tokens = add_special_tokens
        self._workers = workers
        self._pool = TokenizerPool(workers, "tokenizer")
        self._long_pool = TokenizerPool(1, "tokenizer-long")
        self._offset_turns = SizedTurns(workers)  # of encodings whose offsets are to be read: they are large
        self._special = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.decoder_types = tuple(_decoder_types(description.get("decoder")))  # outermost first; empty: none
        self._added = _added_special_tokens(backend) if add_special_tokens else ([], [])
        self.bos_token_id = self._added[0][0] if self._added and self._added[0] else None
        self._cut_rule = cut_rule(description) if self._added else None
        self.max_bytes_per_token = max_bytes_per_token(description)  # None: nobody knows

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
        return cls(backend, description, workers, add_special_tokens=add_special_tokens)

    def close(self) -> None:
        """Stop the worker threads; queued texts are dropped."""
        self._pool.close()
        self._long_pool.close()

    async def encode(
        self, texts: Sequence[str], wanted: Wanted = EVERYTHING, slicer: Slicer | None = None
    ) -> list[Encoding]:
        """Tokenize the texts of one call; InvalidRequest if one cannot be tokenized, or there are too many tokens.

        `slicer` is that of all long work on the event loop.
        """
        call = _Call(wanted, sum(map(len, texts)), slicer or Slicer())
        groups = list(_groups(texts))
        if len(groups) == 1:
            return await self._encode_group(groups[0], call)
        encodings: list[list[Encoding]] = [[] for _ in groups]
        remaining = iter(enumerate(groups))

        async def work() -> None:
            for index, group in remaining:
                encodings[index] = await self._encode_group(group, call)

        await run_together([work() for _ in groups[: self._workers]])
        return list(chain.from_iterable(encodings))

    async def _encode_group(self, texts: list[str], call: _Call) -> list[Encoding]:
        if len(texts) == 1 and len(texts[0]) <= SHORT:  # takes less than handing it to a thread
            return [await call.finished(one) for one in self._encode(texts, call.wanted)]
        rule = self._cut_rule
        if len(texts[0]) > LONG and rule and (rule.keeps_offsets or not call.wanted.offsets):
            return [await self._encode_in_parts(texts[0], rule, call)]
        pool = self._long_pool if len(texts[0]) > LONG else self._pool
        return await self._run(pool, partial(self._encode, texts, call.wanted), call)

    async def _run(
        self, pool: TokenizerPool, job: Callable[[], list[_Encoded]], call: _Call, start: int = 0
    ) -> list[Encoding]:
        """`start` is the character at which the part of a text begins."""
        async with self._offset_turns.turn(call.size) if call.wanted.offsets else nullcontext():
            return [await call.finished(one, start) for one in await pool.run(call.size, job)]

    async def _encode_in_parts(self, text: str, rule: CutRule, call: _Call) -> Encoding:
        """From the last part on: it may be enough."""
        wanted = call.wanted
        if wanted.offsets and wanted.reply:  # the event loop need not read those of a reply that is refused
            await self._encode_in_parts(text, rule, replace(call, wanted=replace(wanted, offsets=False)))
        assert self._added
        before, after = self._added if wanted.special_tokens else ([], [])
        parts = [_unplaced(after)]
        num_tokens, missing = len(after), wanted.keep
        for start, end in _parts_from_end(text):
            pool = self._long_pool if end - start > LONG else self._pool
            job = partial(self._encode_part, text, start, end, rule, Wanted(wanted.offsets, missing))
            parts += await self._run(pool, job, call, start)
            num_tokens += parts[-1].num_tokens
            missing = None if missing is None else max(missing - parts[-1].num_tokens, 0)
            if wanted.enough is not None and num_tokens > wanted.enough:
                break
        else:
            parts.append(_unplaced(before))
            num_tokens += len(before)
        return await self._pool.run(call.size, partial(_joined, parts[::-1], num_tokens, wanted))

    def _encode_part(self, text: str, start: int, end: int, rule: CutRule, wanted: Wanted) -> list[_Encoded]:
        part = text[start + (rule.drops_space and start > 0) : end]
        (encoded,) = self._encode([part], wanted, add_special_tokens=False)
        if encoded.encoding is not None:
            encoded = replace(encoded, base=start if text.isascii() else len(text[:start].encode()))
        return [encoded]

    def _encode(
        self, texts: Sequence[str], wanted: Wanted, *, add_special_tokens: bool | None = None
    ) -> list[_Encoded]:
        # Never `encode`: unlike `encode_batch` and `encode_batch_fast`, it holds the GIL.
        encode = self._backend.encode_batch if wanted.offsets else self._backend.encode_batch_fast
        add = self._add_special_tokens and wanted.special_tokens if add_special_tokens is None else add_special_tokens
        try:
            encodings = encode(texts, add_special_tokens=add)
        except BaseException as error:  # panics of the library are not Exceptions
            raise InvalidRequest("text", f"tokenizer error {error}") from error
        made = []
        for text, encoding in zip(texts, encodings, strict=True):
            ids = _kept(_packed(encoding.ids if wanted.keep != 0 else ()), wanted.keep)
            placed = encoding if wanted.offsets and wanted.keep != 0 else None
            made.append(_Encoded(ids, len(encoding), placed, () if placed is None else _char_starts(text)))
        return made

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

    def special_token_id(self, text: str) -> int | None:
        """None if the text is no special token."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id if token_id in self._special else None

    async def decode_batch(self, texts: list[list[int]]) -> list[str]:
        """Decode whole texts with their special tokens, in a thread."""
        decode = partial(self._backend.decode_batch, texts, skip_special_tokens=False)
        return await self._pool.run(sum(map(len, texts)), decode)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Decode the ids as one whole text; unknown ids are dropped."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def reply_too_large(max_bytes: int) -> InvalidRequest:
    """For texts of so many tokens."""
    return InvalidRequest("", f"the reply has more than {max_bytes} bytes: send less text, or ask for less about it")


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Short texts together, as far as they are one after the other; each long one alone."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > PART:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text) + _CHARS_PER_TEXT
    if group:
        yield group


def _parts_from_end(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each part, cut where tokenizer_properties.py says; the first part is as long as it must be."""
    end = len(text)
    while end > 2 * PART and (cut := _last_cut(text, end - 2 * PART, end - PART)):
        yield cut, end
        end = cut
    yield 0, end


def _last_cut(text: str, start: int, end: int) -> int | None:
    """Where a text can be cut; nobody looks for it very long."""
    for _ in range(_CUT_TRIES):
        if (end := text.rfind(" ", start, end)) <= 0:
            return None
        if _is_ascii_alnum(text[end - 1]) and _is_ascii_alnum(text[end + 1]):
            return end
    return None


def _is_ascii_alnum(char: str) -> bool:
    return char.isascii() and char.isalnum()


def _unplaced(ids: list[int]) -> Encoding:
    return Encoding(_packed(ids), _packed([0, 0] * len(ids)), len(ids))


def _joined(parts: list[Encoding], num_tokens: int, wanted: Wanted) -> Encoding:
    """Of millions of tokens: to be called in a thread."""
    ids = b"".join([part.packed_ids.tobytes() for part in parts])
    offsets = b"".join([part.packed_offsets.tobytes() for part in parts if wanted.offsets])
    kept = _kept(memoryview(ids).cast(_U32), wanted.keep)
    return Encoding(kept, memoryview(offsets).cast(_U32)[-2 * len(kept) :] if kept else _packed(()), num_tokens)


def _packed(numbers: Iterable[int]) -> "memoryview[int]":
    return memoryview(array(_U32, numbers).tobytes()).cast(_U32)


def _kept(ids: "memoryview[int]", keep: int | None) -> "memoryview[int]":
    return ids if keep is None or keep >= len(ids) else ids[len(ids) - keep :]


def _char_starts(text: str) -> Sequence[int]:
    """In UTF-8 bytes, that of the end included; nothing if it has only ASCII."""
    if text.isascii():
        return ()
    data = text.encode()
    return array(_U32, [*(index for index, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data)])


def _added_special_tokens(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Those put before and after every text, found by trying rather than from a configuration file; None: unclear."""
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
