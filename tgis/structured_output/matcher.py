"""Compiled grammars, their state for each output, and the tokens that they allow next."""

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress

import llguidance
import numpy as np
from numpy.typing import NDArray

from tgis.errors import GrammarError
from tgis.ipc.lookups import Vocabulary
from tgis.structured_output.lark import problem_of

_WORD_BITS = 32  # llguidance writes whole words
_SPECIAL = b"\xff"  # not the beginning of any text
_MAX_FORCED_TOKENS = 64  # per step
_THREADS = 2  # so that one expensive grammar does not delay all others
_NICENESS = 5  # lowers these threads' priority: if cores are few, steps get three times as much of them
_PATIENCE = 0.003  # seconds for masks that were just begun: usual ones are ready then, and miss no step
_MAX_WAIT = 0.01  # seconds until messages are read again
_SLOW_SECONDS = 0.003  # CPU time of a mask; those of usual grammars stay below

Mask = NDArray[np.uint8]  # one bit per token, the lowest first


class TokenTable:
    """The tokens of a model for llguidance.

    Tokens that add other bytes at the beginning of an output have a second id for it, above all others.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int], bos: int | None = None) -> None:
        """`vocab_size` is the width of the logits; ids from there on cannot be generated. Grammars begin after
        `bos`, if the model forces every output to begin with that.
        """
        padded_size = -(-vocab_size // _WORD_BITS) * _WORD_BITS
        first_tokens = {token: data for token, data in vocabulary.first_tokens.items() if token < vocab_size}
        tokens = vocabulary.tokens[:vocab_size]
        tokens += [b""] * (padded_size - len(tokens))
        self.eos_ids = [token for token in eos_ids if 0 <= token < vocab_size]
        for token in self.eos_ids:
            tokens[token] = b""  # it ends the output, whatever its text
        self.ids_at_start = {token: padded_size + index for index, token in enumerate(first_tokens)}
        self._mask_size = padded_size // 8
        self._full_mask_size = -(-(padded_size + len(first_tokens)) // _WORD_BITS) * _WORD_BITS // 8
        texts = _Tokens([*tokens, *first_tokens.values()], self.eos_ids)
        wrapper = llguidance.TokenizerWrapper(texts)
        self.tokenizer = llguidance.LLTokenizer(wrapper, eos_token=self.eos_ids)
        wrapper.tokens = texts.tokens = []  # llguidance has copied them
        self._first_ids = np.fromiter(first_tokens, np.int64)
        self.forced_ids = [] if bos is None else [bos]
        self._only_forced = _packed(np.isin(np.arange(padded_size), self.forced_ids))
        self._not_eos = _packed(np.isin(np.arange(padded_size), self.eos_ids, invert=True))

    def new_mask(self) -> Mask:
        return np.zeros(self._mask_size, np.uint8)

    def fill(self, matcher: llguidance.LLMatcher, mask: Mask, index: int) -> None:
        """Write the tokens that are allowed next, as that of this index of the output, to `mask`."""
        if index < len(self.forced_ids):
            mask[:] = self._only_forced
            return
        if not self.ids_at_start:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            return
        full_mask = np.zeros(self._full_mask_size, np.uint8)
        matcher.unsafe_compute_mask_ptr(full_mask.ctypes.data, full_mask.nbytes)
        mask[:] = full_mask[: self._mask_size]
        if index == len(self.forced_ids):
            allowed = np.unpackbits(full_mask, bitorder="little")
            ids = allowed[: 8 * self._mask_size]
            ids[self._first_ids] = allowed[len(ids) : len(ids) + len(self._first_ids)]
            mask[:] = _packed(ids)

    def only_eos(self, mask: Mask) -> bool:
        return not (mask & self._not_eos).any()

    def only_token(self, mask: Mask) -> int | None:
        """The allowed token if there is a single one."""
        places = mask.nonzero()[0]
        bits = int(mask[places[0]]) if len(places) == 1 else 0
        return int(places[0]) * 8 + bits.bit_length() - 1 if bits.bit_count() == 1 else None


class GrammarMatcher:
    """The state of one output in its grammar; it follows the tokens of a sequence, also backwards."""

    def __init__(self, matcher: llguidance.LLMatcher, table: TokenTable, *, in_thread: bool) -> None:
        """With `in_thread`, `prepare` makes masks in parallel to steps. A slow mask turns it on."""
        self.table = table
        self.in_thread = in_thread
        self._start = matcher  # stays before the first token
        self._matcher = matcher.deep_copy()
        self._consumed: list[int] = []
        self._mask = table.new_mask()
        self._has_mask = False  # whether the mask is that after the consumed tokens
        self._prepared: Future[None] | None = None

    def copy(self) -> "GrammarMatcher":
        """A matcher for another output, before its first token."""
        assert self._consumed == self.table.forced_ids
        copied = GrammarMatcher(self._matcher, self.table, in_thread=self.in_thread)
        copied._consumed = [*self._consumed]
        copied._mask[:] = self._mask
        copied._has_mask = self._has_mask
        return copied

    @property
    def ready(self) -> bool:
        """Whether `mask` need not wait for a thread."""
        return self._prepared is None or self._prepared.done()

    def prepare(self, tokens: Sequence[int], executor: Executor) -> Future[None]:
        """Start to make the mask after these tokens in a thread; no other call is allowed until it is `ready`."""
        self._prepared = executor.submit(self._compute, tokens)
        return self._prepared

    def abandon(self) -> None:
        """Cancel a mask that no thread has started: the output is gone."""
        if self._prepared:
            self._prepared.cancel()

    def mask(self, tokens: Sequence[int]) -> Mask:
        """The tokens that may follow those generated; valid until the next call. GrammarError above the limits."""
        if self._prepared:
            prepared, self._prepared = self._prepared, None
            prepared.result()
        if not self._has_mask or self._consumed != tokens:
            self._compute(tokens)
        return self._mask

    def allowed_ids(self, tokens: Sequence[int]) -> list[int]:
        return np.flatnonzero(np.unpackbits(self.mask(tokens), bitorder="little")).tolist()

    def num_allowed(self, tokens: Sequence[int], proposed: list[int]) -> int:
        """The number of proposed tokens, all before an end, that may follow those generated; 0 above the limits."""
        try:
            self._advance(tokens)
            count: int = self._matcher.validate_tokens(proposed)
            self._check()
        except GrammarError:
            return 0
        return count

    def forced_tokens(self, tokens: list[int], limit: int) -> list[int]:
        """The next tokens while only one is allowed, the end included, up to a limit.

        There are none if masks are made in a thread, since a step waits for one mask only.
        """
        forced: list[int] = []
        while (
            not self.in_thread
            and len(forced) < min(limit, _MAX_FORCED_TOKENS)
            and (tokens + forced)[-1] not in self.table.eos_ids
        ):
            token = self.table.only_token(self.mask(tokens + forced))
            if token is None:
                break
            forced.append(token)
        return forced

    def _compute(self, tokens: Sequence[int]) -> None:
        started = time.thread_time()
        self._advance(tokens)
        self.table.fill(self._matcher, self._mask, len(tokens))
        self._check()
        self._has_mask = True
        self.in_thread = self.in_thread or time.thread_time() - started > _SLOW_SECONDS

    def _advance(self, tokens: Sequence[int]) -> None:
        kept = min(len(tokens), len(self._consumed))
        if self._consumed[:kept] != tokens[:kept]:
            kept = next(at for at, pair in enumerate(zip(self._consumed, tokens, strict=False)) if pair[0] != pair[1])
        start = len(self.table.forced_ids)
        back = max(len(self._consumed) - max(kept, start), 0)
        failed = self._matcher.is_error()  # perhaps at a token that was only proposed
        if failed or (back and (self._matcher.is_stopped() or not self._matcher.rollback(back))):
            self._matcher, kept = self._start.deep_copy(), 0  # neither errors nor ends can be rolled back
        self._has_mask = self._has_mask and kept == len(self._consumed) == len(tokens)
        for index in range(max(kept, start), len(tokens)):
            token = tokens[index]
            self._matcher.consume_token(token if index > start else self.table.ids_at_start.get(token, token))
        self._consumed = [*tokens]
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(problem_of(self._matcher.get_error()))


def low_priority_pool(name: str) -> ThreadPoolExecutor:
    """Threads of lower priority than the steps."""
    return ThreadPoolExecutor(_THREADS, name, _lower_priority)


def _lower_priority() -> None:
    """Lower the priority of this thread alone: Linux has one for each."""
    with suppress(OSError):  # some containers forbid it
        os.nice(_NICENESS)


class MaskThreads:
    """Makes masks that may take long in threads of lower priority: only their own outputs wait for them."""

    def __init__(self) -> None:
        self._pool = low_priority_pool("masks")
        self._open: set[Future[None]] = set()

    def prepare(self, outputs: Iterable[tuple[GrammarMatcher, Sequence[int]]]) -> None:
        """Begin with the masks after these tokens, and wait for a moment."""
        begun = {matcher.prepare(tokens, self._pool) for matcher, tokens in outputs if matcher.in_thread}
        self._open = wait(begun, _PATIENCE).not_done | {future for future in self._open if not future.done()}

    def wait(self) -> None:
        """Wait until one more mask is ready, but not for long."""
        self._open = wait(self._open, _MAX_WAIT, FIRST_COMPLETED).not_done

    def close(self) -> None:
        """Drop the masks that no thread has begun with; the process ends when the others are made."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Tokens:
    """A tokenizer for llguidance, which never tokenizes since bytes are not forced."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_ids: list[int]) -> None:
        self.tokens = [data or _SPECIAL + str(token).encode() for token, data in enumerate(tokens)]
        self.special_token_ids = [token for token, data in enumerate(tokens) if not data]
        self.eos_token_id = eos_ids[0] if eos_ids else None

    def __call__(self, _text: bytes) -> list[int]:
        raise AssertionError("a mask has been restricted to one spelling")


def _packed(bits: NDArray[np.uint8] | NDArray[np.bool_]) -> Mask:
    return np.packbits(bits, bitorder="little")
