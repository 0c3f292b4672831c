"""The output of one input, from the engine's tokens to response messages: text, stop sequences, counts, token details.

A unary call collects tokens and builds one message at the end; a stream builds messages as tokens come. Both append
tokens in the same way, so that both say the same.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from tgis.frontend.detokenizer import Detokenizer, TokenDecoder
from tgis.frontend.engine_output import EngineOutput, RequestTimings
from tgis.frontend.params import Params
from tgis.frontend.stop_strings import StopStringMatcher
from tgis.ipc.request import StopReason, TokenLogprobs

LOGGED_CHARACTERS = 32  # most characters of a text in the log


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

    index: int = 0  # position among the outputs of the call
    text: str = ""
    input_token_count: int = 0
    generated_token_count: int = 0
    stop_reason: StopReason = StopReason.NOT_FINISHED
    stop_sequence: str = ""
    seed: int = 0
    tokens: Sequence[TokenInfo] = ()
    input_tokens: Iterable[TokenInfo] = ()  # can be read once
    num_details: int = 0  # tokens and candidates for them
    num_cached_tokens: int = 0  # input tokens found in the prefix cache; in the last chunk or a whole output
    timings: RequestTimings | None = None  # timings of a complete output
    record: str = ""  # JSON, in the last message of a call that asks for it
    prediction_tokens: Mapping[str, int] | None = None  # counts by name in usage, in the last message


class Output:
    """One output while it grows: the text and the details of the tokens that the engine has sent."""

    def __init__(
        self,
        engine_output: EngineOutput,
        input_text: str,
        params: Params,
        decoder: TokenDecoder,
        separator: str,
        *,
        keeps_all: bool = False,
    ) -> None:
        """`separator` goes between echoed input and output in the response of a unary call. With `keeps_all`, the whole
        output stays until its end, for a record.
        """
        self.engine_output = engine_output
        self.request = engine_output.request
        self.index = engine_output.index
        self.input_text = input_text
        self.params = params
        self.num_generated = 0
        self._keeps_all = keeps_all
        self.token_ids: list[int] = []  # empty unless a record or a prediction needs them
        self.texts: list[str] = []  # all, or the beginning for logs
        self.logprobs: list[TokenLogprobs] = []  # one per token for a record, or none at all
        self.stop_reason = StopReason.NOT_FINISHED
        self.expired_in_queue = False  # ended without a token
        self._tokenizer = decoder.tokenizer
        self._detokenizer = Detokenizer(decoder)
        self._hidden_ids = () if params.include_stop_sequence else self.request.sampling_params.stop_token_ids
        self._stop_matcher = StopStringMatcher(
            params.stop_sequences,
            include_stop_sequence=bool(params.include_stop_sequence),
            hold_last_grapheme=decoder.splits_graphemes,
        )
        self._separator = separator
        self._text: list[str] = []  # not sent
        self._tokens: list[TokenInfo] = []  # not sent
        self._sends_input_tokens = params.logprob_options.input_tokens

    @property
    def logged_text(self) -> str:
        """The beginning of the output."""
        return "".join(self.texts[:LOGGED_CHARACTERS])[:LOGGED_CHARACTERS]  # none is empty

    def first_chunk(self) -> RequestOutput:
        """The first message of a stream, before any token."""
        echoed = self.input_text if self.params.input_text else ""
        seed = self.request.sampling_params.seed
        return RequestOutput(self.index, text=echoed, input_token_count=self.request.input_length, seed=seed)

    def chunks(self) -> Iterator[RequestOutput]:
        """The next messages of a stream: one for each new token, but none without text or token before the end.

        A reader that is behind and wants no tokens gets one message for all of them.
        """
        if self._sends_input_tokens and (input_tokens := self._input_tokens()):
            self._sends_input_tokens = False
            yield RequestOutput(
                self.index,
                input_tokens=input_tokens,
                input_token_count=self.request.input_length,
                num_details=self.params.logprob_options.details_per_token * self.request.input_length,
            )
        in_one = self.engine_output.num_new_steps > 1 and not self.params.logprob_options.generated_tokens
        for num_left in self._take_tokens():
            if not (in_one and num_left) and (self._text or self._tokens or self.stop_reason):
                yield self._chunk()

    def _count_prediction(self) -> Mapping[str, int] | None:
        """The tokens of a prediction that follow the same token in the output as there, and the others."""
        if not (predicted := self.request.prediction):
            return None
        pairs, generated = (Counter(pairwise([-1, *tokens])) for tokens in (predicted, self.token_ids))
        accepted = (pairs & generated).total()
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": len(predicted) - accepted}

    def collect(self) -> None:
        """Add the new tokens to what `final` returns."""
        for _ in self._take_tokens():
            pass

    def final(self) -> RequestOutput:
        """The response of a unary call."""
        num_input_tokens = self.request.input_length
        if self.expired_in_queue:
            return RequestOutput(self.index, input_token_count=num_input_tokens, stop_reason=self.stop_reason)
        whole = self._chunk()
        if self.params.input_text:
            whole.text = self.input_text + self._separator + whole.text
        whole.input_token_count, whole.input_tokens = num_input_tokens, self._input_tokens()
        if whole.input_tokens:
            whole.num_details += self.params.logprob_options.details_per_token * num_input_tokens
        whole.timings = self.engine_output.timings
        return whole

    def _chunk(self) -> RequestOutput:
        """What has been appended since the last chunk."""
        text = "".join(self._text)
        chunk = RequestOutput(self.index, text, 0, self.num_generated)
        if self._tokens:
            chunk.tokens = self._tokens
            chunk.num_details = self.params.logprob_options.details_per_token * len(self._tokens)
        self._text, self._tokens = [], []
        if self.stop_reason:
            chunk.stop_reason, chunk.stop_sequence = self.stop_reason, self._stop_matcher.matched or ""
            chunk.seed = 0 if self.expired_in_queue else self.request.sampling_params.seed
            chunk.num_cached_tokens = self.engine_output.num_cached_tokens
            chunk.prediction_tokens = self._count_prediction()
        return chunk

    def _take_tokens(self) -> Iterator[int]:
        """Append the new tokens, one at a time, until the output ends; yield how many are left to append.

        The error of the request comes after its last token.
        """
        engine_output, wants_tokens = self.engine_output, self.params.logprob_options.generated_tokens
        stop_reason = engine_output.stop_reason  # after the last of them
        token_ids, logprobs = engine_output.new_tokens, engine_output.new_logprobs
        engine_output.new_tokens, engine_output.new_logprobs, engine_output.num_new_steps = [], [], 0
        if not token_ids and stop_reason:
            self.stop_reason, self.expired_in_queue = stop_reason, self.num_generated == 0
            self._add_text(self._stop_matcher.flush())
            yield 0
        for i, token_id in enumerate(token_ids):
            num_left = len(token_ids) - 1 - i
            self._append(token_id, StopReason.NOT_FINISHED if num_left else stop_reason)
            self.logprobs += logprobs[i : i + 1] if self._keeps_all else ()
            if wants_tokens:
                self._tokens.append(self._token_info(token_id, logprobs[i] if logprobs else None))
            if self.stop_reason:  # the tokens left were in flight when a stop sequence ended the output
                yield 0
                return
            yield num_left
        if engine_output.error is not None and not engine_output.new_tokens:
            raise engine_output.error

    def _append(self, token_id: int, stop_reason: StopReason) -> None:
        self.num_generated += 1
        if self._keeps_all or self.request.prediction:
            self.token_ids.append(token_id)
        minimum_reached = self.num_generated >= self.request.sampling_params.min_new_tokens
        text = "" if token_id in self._hidden_ids else self._detokenizer.add(token_id)
        text = self._stop_matcher.add(text, may_stop=not stop_reason and minimum_reached)
        self.stop_reason = StopReason.STOP_SEQUENCE if self._stop_matcher.matched is not None else stop_reason
        if self.stop_reason:
            text += self._stop_matcher.flush()
        self._add_text(text)

    def _add_text(self, text: str) -> None:
        if text:
            self._text.append(text)
            if self._keeps_all or len(self.texts) < LOGGED_CHARACTERS:
                self.texts.append(text)

    def _input_tokens(self) -> Iterable[TokenInfo]:
        """Each is made when it is read: a long input has many, with candidates."""
        parts = self.engine_output.prompt_logprobs  # an encoder-decoder has those of its input only
        tokens = self.request.tokens[-sum(part.num_tokens for part in parts) :]
        return map(self._token_info, tokens, chain.from_iterable(part.decode() for part in parts)) if parts else ()

    def _token_info(self, token_id: int, logprobs: TokenLogprobs | None) -> TokenInfo:
        text = self._tokenizer.token_text
        if logprobs is None:
            return TokenInfo(token_id, text(token_id), 0.0, 0, [])
        top_tokens = [(candidate, text(candidate), logprob) for candidate, logprob in logprobs.top_logprobs]
        return TokenInfo(token_id, text(token_id), logprobs.logprob, logprobs.rank, top_tokens)
