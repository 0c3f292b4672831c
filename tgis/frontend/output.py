"""From generated tokens to response messages: text, stop sequences, counts and token details of one input.

A unary call collects tokens and builds one message at the end; a stream builds messages as tokens come. Both append
tokens in the same way, so that both say the same.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from tgis.frontend.detokenizer import Detokenizer, TokenDecoder
from tgis.frontend.output_queue import NewTokens, OutputQueue, RequestTimings
from tgis.frontend.sampling_params import ResolvedParams
from tgis.frontend.stop_strings import StopStringMatcher
from tgis.ipc.request import StopReason, TokenLogprobs

BYTES_PER_DETAIL = 128
LOGGED_CHARACTERS = 32  # of a text, where logs may contain text


class TokenInfo(NamedTuple):
    """A token in a response: its vocabulary string and what was asked about it."""

    id: int
    text: str
    logprob: float
    rank: int
    top_tokens: list[tuple[int, str, float]]  # id, vocabulary string, logprob


@dataclass(slots=True)  # not frozen, which takes four times as long to make: there is one for each token
class RequestOutput:
    """One response message: a whole output, or the next chunk of a stream."""

    index: int = 0  # of the output among those of the call
    text: str = ""
    input_token_count: int = 0
    generated_token_count: int = 0
    stop_reason: StopReason = StopReason.NOT_FINISHED
    stop_sequence: str = ""
    seed: int = 0
    tokens: Sequence[TokenInfo] = ()
    input_tokens: Iterable[TokenInfo] = ()  # to be read once
    details_per_token: int = 1  # of both: the token and its candidates
    timings: RequestTimings | None = None  # of a whole output


def best_first(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """By the mean of the logprobs of their tokens, which must have been asked for; of equal ones the first."""
    return sorted(outputs, key=_mean_logprob, reverse=True)


def _mean_logprob(output: RequestOutput) -> float:
    mean = sum(token.logprob for token in output.tokens) / len(output.tokens) if output.tokens else math.nan
    return -math.inf if math.isnan(mean) else mean


class OutputBuilder:
    """The output of one input while it grows."""

    def __init__(
        self,
        queue: OutputQueue,
        input_text: str,
        params: ResolvedParams,
        decoder: TokenDecoder,
        *,
        separator: str,
        index: int = 0,
    ) -> None:
        """`separator` goes between echoed input and output in the response of a unary call."""
        self.queue = queue
        self.index = index
        self.input_text = input_text
        self.params = params
        self.num_generated = 0
        self.stop_reason = StopReason.NOT_FINISHED
        self.expired_in_queue = False  # ended without a token
        self.logged_text = ""  # the beginning of the output
        self._tokenizer = decoder.tokenizer
        self._detokenizer = Detokenizer(decoder)
        self._stop_matcher = StopStringMatcher(
            params.given.stop_sequences,
            include_stop_sequence=params.include_stop_sequence,
            hold_last_grapheme=decoder.splits_graphemes,
        )
        self._separator = separator
        self._texts: list[str] = []
        self._tokens: list[TokenInfo] = []
        self._min_new_tokens = queue.request.sampling_params.min_new_tokens
        self._wants_tokens = params.given.logprob_options.generated_tokens
        self._wants_input_tokens = params.given.logprob_options.input_tokens
        self.details_per_token = params.given.logprob_options.details_per_token

    @property
    def unread_bytes(self) -> int:
        """What the output takes that is in no message yet, with its input; about."""
        num_tokens = self.queue.num_tokens - self.num_generated + len(self.queue.prompt_logprobs)
        return len(self.input_text) + num_tokens * self.details_per_token * BYTES_PER_DETAIL

    def first_chunk(self) -> RequestOutput:
        """The first message of a stream, before any token."""
        request = self.queue.request
        echoed = self.input_text if self.params.given.input_text else ""
        seed = request.sampling_params.seed
        return RequestOutput(self.index, text=echoed, input_token_count=request.input_length, seed=seed)

    def chunks(self, new: NewTokens) -> Iterator[RequestOutput]:
        """The next messages of a stream: one per token, but none without text or token before the end.

        A reader that is behind and wants no tokens gets one message for all of them.
        """
        if self._wants_input_tokens and (input_tokens := self._input_tokens()):
            self._wants_input_tokens = False
            yield RequestOutput(
                self.index,
                input_tokens=input_tokens,
                input_token_count=self.queue.request.input_length,
                details_per_token=self.details_per_token,
            )
        appended = self._append(new)
        if new.merged and not self._wants_tokens:
            appended = iter([("".join([text for text, _ in appended]), [])])
        for text, tokens in appended:
            if text or tokens or self.stop_reason:
                yield self._chunk(text, tokens)

    def add(self, new: NewTokens) -> Iterator[None]:
        """Collect tokens for `final`, one at a time: there may be many."""
        for text, tokens in self._append(new):
            self._texts.append(text)
            self._tokens += tokens
            yield

    def final(self) -> RequestOutput:
        """The response of a unary call."""
        num_input_tokens = self.queue.request.input_length
        if self.expired_in_queue:
            return RequestOutput(self.index, input_token_count=num_input_tokens, stop_reason=self.stop_reason)
        echoed = self.input_text + self._separator if self.params.given.input_text else ""
        whole = self._chunk(echoed + "".join(self._texts), self._tokens)
        timings = self.queue.timings
        return replace(whole, input_token_count=num_input_tokens, input_tokens=self._input_tokens(), timings=timings)

    def _chunk(self, text: str, tokens: list[TokenInfo]) -> RequestOutput:
        chunk = RequestOutput(self.index, text, 0, self.num_generated)
        chunk.tokens, chunk.details_per_token = tokens, self.details_per_token
        if self.stop_reason:
            chunk.stop_reason, chunk.stop_sequence = self.stop_reason, self._stop_matcher.matched or ""
            chunk.seed = 0 if self.expired_in_queue else self.queue.request.sampling_params.seed
        return chunk

    def _append(self, new: NewTokens) -> Iterator[tuple[str, list[TokenInfo]]]:
        """Append tokens until the output ends; yield the text that each makes final, and the token if wanted."""
        if not new.token_ids:
            self.stop_reason, self.expired_in_queue = new.stop_reason, self.num_generated == 0
            yield self._log(self._stop_matcher.flush()), []
        last = len(new.token_ids) - 1
        for i, token_id in enumerate(new.token_ids):
            text = self._append_token(token_id, new.stop_reason if i == last else StopReason.NOT_FINISHED)
            logprobs = new.logprobs[i] if new.logprobs else None
            yield self._log(text), [self._token_info(token_id, logprobs)] if self._wants_tokens else []
            if self.stop_reason:
                return  # the others were in flight when a stop sequence ended the output

    def _append_token(self, token_id: int, stop_reason: StopReason) -> str:
        self.num_generated += 1
        minimum_reached = self.num_generated >= self._min_new_tokens
        text = self._stop_matcher.add(self._detokenizer.add(token_id), may_stop=not stop_reason and minimum_reached)
        self.stop_reason = StopReason.STOP_SEQUENCE if self._stop_matcher.matched is not None else stop_reason
        return text + self._stop_matcher.flush() if self.stop_reason else text

    def _log(self, text: str) -> str:
        if len(self.logged_text) < LOGGED_CHARACTERS:
            self.logged_text = (self.logged_text + text)[:LOGGED_CHARACTERS]
        return text

    def _input_tokens(self) -> Iterable[TokenInfo]:
        """Each is made when it is read: a long input has many, with candidates."""
        parts = self.queue.prompt_logprobs  # of an encoder-decoder, those of its input only
        tokens = self.queue.request.tokens[-sum(part.num_tokens for part in parts) :]
        return map(self._token_info, tokens, chain.from_iterable(part.decode() for part in parts)) if parts else ()

    def _token_info(self, token_id: int, logprobs: TokenLogprobs | None) -> TokenInfo:
        text = self._tokenizer.token_text
        if logprobs is None:
            return TokenInfo(token_id, text(token_id), 0.0, 0, [])
        top_tokens = [(candidate, text(candidate), logprob) for candidate, logprob in logprobs.top_logprobs]
        return TokenInfo(token_id, text(token_id), logprobs.logprob, logprobs.rank, top_tokens)
