"""One input's way from the engine's tokens to replies: text, stop sequences, counts and token details.

A stream passes on every reply; a unary call joins the same ones, so that both say the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tgis.frontend.detokenizer import Detokenizer, TokenDecoder
from tgis.frontend.output_queue import OutputQueue, TokenOutput
from tgis.frontend.sampling_params import ResolvedParams
from tgis.frontend.stop_strings import StopStringMatcher
from tgis.frontend.tokenizer import Tokenizer
from tgis.ipc.request import StopReason, TokenLogprobs

LOGGED_CHARACTERS = 32  # of a text, in a log that wants text


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token in a reply: its vocabulary string and what was asked about it."""

    text: str
    logprob: float
    rank: int
    top_tokens: list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One response message: all of an input, or what a stream has to say next."""

    text: str = ""
    input_token_count: int = 0
    generated_token_count: int = 0
    stop_reason: StopReason = StopReason.NOT_FINISHED
    stop_sequence: str = ""
    seed: int = 0
    tokens: Sequence[TokenInfo] = ()
    input_tokens: Sequence[TokenInfo] = ()

    @property
    def is_empty(self) -> bool:
        """Whether a stream may leave it out."""
        return not (self.tokens or self.text or self.stop_reason)


@dataclass(slots=True)
class OutputBuilder:
    """The output of one input while it grows."""

    queue: OutputQueue
    input_text: str
    params: ResolvedParams
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    stop_matcher: StopStringMatcher
    separator: str  # between echoed input and output
    num_generated: int = 0
    stop_reason: StopReason = StopReason.NOT_FINISHED
    expired_in_queue: bool = False  # ended in the queue, without a token
    logged_text: str = ""  # of the output, for logs that want text
    _texts: list[str] = field(default_factory=list)
    _tokens: list[TokenInfo] = field(default_factory=list)
    _input_tokens_sent: bool = False

    def first_chunk(self) -> RequestOutput:
        """The first message of a stream."""
        request = self.queue.request
        echoed = self.input_text if self.params.input_text else ""
        return RequestOutput(text=echoed, input_token_count=request.input_length, seed=request.sampling_params.seed)

    def chunks(self, events: list[TokenOutput]) -> list[RequestOutput]:
        """The messages of a stream that these tokens give: one per token if tokens are wanted, else one for all."""
        replies = self._input_chunks()
        groups = [[event] for event in events] if self.params.logprob_options.generated_tokens else [events]
        for group in groups:
            if not self.stop_reason:
                reply = self._chunk(group)
                replies += [] if reply.is_empty else [reply]
        return replies

    def add(self, events: list[TokenOutput]) -> None:
        """Keep what these tokens give, for `whole`."""
        if not self.stop_reason:
            reply = self._chunk(events)
            self._texts.append(reply.text)
            self._tokens += reply.tokens

    def final(self) -> RequestOutput:
        """The response of a unary call."""
        request = self.queue.request
        if self.expired_in_queue:
            return RequestOutput(input_token_count=request.input_length, stop_reason=self.stop_reason)
        echoed = self.input_text + self.separator if self.params.input_text else ""
        return RequestOutput(
            text=echoed + "".join(self._texts),
            input_token_count=request.input_length,
            generated_token_count=self.num_generated,
            stop_reason=self.stop_reason,
            stop_sequence=self.stop_matcher.matched or "",
            seed=request.sampling_params.seed,
            tokens=self._tokens,
            input_tokens=self._input_token_infos(),
        )

    def _chunk(self, events: list[TokenOutput]) -> RequestOutput:
        texts, tokens = [], []
        for event in events:
            if self.stop_reason:
                break  # in flight when a stop sequence ended the output
            texts.append(self._append(event))
            if self.params.logprob_options.generated_tokens and event.token_id >= 0:
                tokens.append(self._token_info(event.token_id, event.logprobs))
        text = "".join(texts)
        if len(self.logged_text) < LOGGED_CHARACTERS:
            self.logged_text = (self.logged_text + text)[:LOGGED_CHARACTERS]
        return RequestOutput(
            text=text,
            generated_token_count=self.num_generated,
            stop_reason=self.stop_reason,
            stop_sequence=self.stop_matcher.matched or "",
            seed=self.queue.request.sampling_params.seed if self.stop_reason and not self.expired_in_queue else 0,
            tokens=tokens,
        )

    def _append(self, event: TokenOutput) -> str:
        """Append one token to the output; the text that becomes final by it."""
        if event.token_id < 0:
            self.stop_reason, self.expired_in_queue = event.stop_reason, self.num_generated == 0
            return self.stop_matcher.flush()
        self.num_generated += 1
        minimum_reached = self.num_generated >= self.queue.request.sampling_params.min_new_tokens
        text = self.stop_matcher.add(
            self.detokenizer.add(event.token_id), may_stop=not event.stop_reason and minimum_reached
        )
        self.stop_reason = StopReason.STOP_SEQUENCE if self.stop_matcher.matched is not None else event.stop_reason
        return text + self.stop_matcher.flush() if self.stop_reason else text

    def _input_chunks(self) -> list[RequestOutput]:
        if self._input_tokens_sent or not self.params.logprob_options.input_tokens or self.expired_in_queue:
            return []
        infos = self._input_token_infos()
        if not infos:
            return []
        self._input_tokens_sent = True
        return [RequestOutput(input_tokens=infos, input_token_count=self.queue.request.input_length)]

    def _input_token_infos(self) -> list[TokenInfo]:
        facts = self.queue.prompt_logprobs  # of an encoder-decoder, those of its input only
        tokens = self.queue.request.tokens[-len(facts) :] if facts else []
        return [self._token_info(token, fact) for token, fact in zip(tokens, facts, strict=True)]

    def _token_info(self, token: int, facts: TokenLogprobs | None) -> TokenInfo:
        name = self.tokenizer.token_text
        if facts is None:
            return TokenInfo(name(token), 0.0, 0, [])
        top = [(name(candidate), logprob) for candidate, logprob in facts.top_logprobs]
        return TokenInfo(name(token), facts.logprob, facts.rank, top)


@dataclass(frozen=True, slots=True)
class OutputBuilderFactory:
    """What all rows of a model share."""

    tokenizer: Tokenizer
    decoder: TokenDecoder
    encoder_decoder: bool

    def make(self, inboxes: list[OutputQueue], texts: list[str], settings: ResolvedParams) -> list[OutputBuilder]:
        """The rows of a submitted call."""
        return [self._make_one(inbox, text, settings) for inbox, text in zip(inboxes, texts, strict=True)]

    def _make_one(self, inbox: OutputQueue, text: str, settings: ResolvedParams) -> OutputBuilder:
        assembler = StopStringMatcher(
            settings.stop_sequences,
            include_stop_sequence=settings.include_stop_sequence,
            hold_last_grapheme=self.decoder.splits_graphemes,
        )
        separator = "\n\n" if self.encoder_decoder else ""
        return OutputBuilder(inbox, text, settings, self.tokenizer, Detokenizer(self.decoder), assembler, separator)
