"""From generated tokens to response messages: text, stop sequences, counts and token details of one input.

A unary call collects tokens and builds one message at the end; a stream builds messages as tokens come. Both append
tokens in the same way, so that both say the same.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from tgis.frontend.detokenizer import Detokenizer, TokenDecoder
from tgis.frontend.output_queue import OutputQueue, RequestTimings
from tgis.frontend.sampling_params import ResolvedParams
from tgis.frontend.stop_strings import StopStringMatcher
from tgis.ipc.request import StopReason, TokenLogprobs

BYTES_PER_DETAIL = 128
MICROSECONDS_PER_DETAIL = 2
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

    @property
    def conversion_cost(self) -> int:
        """About how many microseconds it takes to make a reply of it."""
        num_tokens = len(self.tokens) + (self.input_token_count if self.input_tokens else 0)
        return MICROSECONDS_PER_DETAIL * self.details_per_token * num_tokens


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
    ) -> None:
        """`separator` goes between echoed input and output in the response of a unary call."""
        self.queue = queue
        self.index = queue.index
        self.input_text = input_text
        self.params = params
        self.num_generated = 0
        self.stop_reason = StopReason.NOT_FINISHED
        self.expired_in_queue = False  # ended without a token
        self._tokenizer = decoder.tokenizer
        self._detokenizer = Detokenizer(decoder)
        self._stop_matcher = StopStringMatcher(
            params.given.stop_sequences,
            include_stop_sequence=params.include_stop_sequence,
            hold_last_grapheme=decoder.splits_graphemes,
        )
        self._separator = separator
        self._sent_text = ""  # the beginning of what is in messages
        self._text: list[str] = []  # in no message yet
        self._tokens: list[TokenInfo] = []
        self._min_new_tokens = queue.request.sampling_params.min_new_tokens
        self._wants_tokens = params.given.logprob_options.generated_tokens
        self._wants_input_tokens = params.given.logprob_options.input_tokens
        self.details_per_token = params.given.logprob_options.details_per_token

    @property
    def logged_text(self) -> str:
        """The beginning of the output."""
        return "".join([self._sent_text, *self._text])[:LOGGED_CHARACTERS]

    @property
    def unread_bytes(self) -> int:
        """About how much memory the output takes that is in no message yet, with its input."""
        num_tokens = self.queue.num_tokens - self.num_generated + len(self.queue.prompt_logprobs)
        return len(self.input_text) + num_tokens * self.details_per_token * BYTES_PER_DETAIL

    def first_chunk(self) -> RequestOutput:
        """The first message of a stream, before any token."""
        request = self.queue.request
        echoed = self.input_text if self.params.given.input_text else ""
        seed = request.sampling_params.seed
        return RequestOutput(self.index, text=echoed, input_token_count=request.input_length, seed=seed)

    def chunks(self) -> Iterator[RequestOutput]:
        """The next messages of a stream: one for each new token, but none without text or token before the end.

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
        in_one = self.queue.num_steps > 1 and not self._wants_tokens
        for num_left in self._take_tokens():
            if not (in_one and num_left) and (self._text or self._tokens or self.stop_reason):
                yield self._chunk()

    def collect(self) -> None:
        """Add the new tokens to what `final` returns."""
        for _ in self._take_tokens():
            pass

    def final(self) -> RequestOutput:
        """The response of a unary call."""
        num_input_tokens = self.queue.request.input_length
        if self.expired_in_queue:
            return RequestOutput(self.index, input_token_count=num_input_tokens, stop_reason=self.stop_reason)
        whole = self._chunk()
        if self.params.given.input_text:
            whole.text = self.input_text + self._separator + whole.text
        whole.input_token_count, whole.input_tokens = num_input_tokens, self._input_tokens()
        whole.timings = self.queue.timings
        return whole

    def _chunk(self) -> RequestOutput:
        """What has been appended since the last chunk."""
        text = "".join(self._text)
        if len(self._sent_text) < LOGGED_CHARACTERS:
            self._sent_text += text[:LOGGED_CHARACTERS]
        chunk = RequestOutput(self.index, text, 0, self.num_generated)
        chunk.tokens, chunk.details_per_token = self._tokens, self.details_per_token
        self._text, self._tokens = [], []
        if self.stop_reason:
            chunk.stop_reason, chunk.stop_sequence = self.stop_reason, self._stop_matcher.matched or ""
            chunk.seed = 0 if self.expired_in_queue else self.queue.request.sampling_params.seed
        return chunk

    def _take_tokens(self) -> Iterator[int]:
        """Append the new tokens, one at a time, until the output ends; yield how many are left to append.

        The error of the request comes after its last token.
        """
        stop_reason = self.queue.stop_reason  # after the last of them
        token_ids, logprobs = self.queue.take()
        if not token_ids and stop_reason:
            self.stop_reason, self.expired_in_queue = stop_reason, self.num_generated == 0
            self._text.append(self._stop_matcher.flush())
            yield 0
        for i, token_id in enumerate(token_ids):
            num_left = len(token_ids) - 1 - i
            self._append(token_id, StopReason.NOT_FINISHED if num_left else stop_reason)
            if self._wants_tokens:
                self._tokens.append(self._token_info(token_id, logprobs[i] if logprobs else None))
            if self.stop_reason:  # the tokens left were in flight when a stop sequence ended the output
                yield 0
                return
            yield num_left
        if self.queue.error is not None and not self.queue.new_tokens:
            raise self.queue.error  # in no variable: its traceback has this frame

    def _append(self, token_id: int, stop_reason: StopReason) -> None:
        self.num_generated += 1
        minimum_reached = self.num_generated >= self._min_new_tokens
        text = self._stop_matcher.add(self._detokenizer.add(token_id), may_stop=not stop_reason and minimum_reached)
        self.stop_reason = StopReason.STOP_SEQUENCE if self._stop_matcher.matched is not None else stop_reason
        if self.stop_reason:
            text += self._stop_matcher.flush()
        if text:
            self._text.append(text)

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
