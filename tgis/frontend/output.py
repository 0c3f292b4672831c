"""One input's way from the engine's tokens to replies: text, stop sequences, counts and token details.

A stream passes on every reply; a unary call joins the same ones, so that both say the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tgis.frontend.detokenizer import Detokenizer, TokenDecoder
from tgis.frontend.output_queue import Inbox, TokenEvent
from tgis.frontend.stop_strings import TextAssembler
from tgis.frontend.tokenizer import Tokenizer
from tgis.frontend.validation import Settings
from tgis.ipc.messages import StopReason, TokenFacts

SHOWN_CHARACTERS = 32  # of a text, in a log that wants text


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token in a reply: its vocabulary string and what was asked about it."""

    text: str
    logprob: float
    rank: int
    top: list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Reply:
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
    def says_nothing(self) -> bool:
        """Whether a stream may leave it out."""
        return not (self.tokens or self.text or self.stop_reason)


@dataclass(slots=True)
class Row:
    """The output of one input while it grows."""

    inbox: Inbox
    input_text: str
    settings: Settings
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    assembler: TextAssembler
    separator: str  # between echoed input and output
    count: int = 0
    end: StopReason = StopReason.NOT_FINISHED
    expired: bool = False  # ended in the queue, without a token
    beginning: str = ""  # of the output, for logs that want text
    _texts: list[str] = field(default_factory=list)
    _tokens: list[TokenInfo] = field(default_factory=list)
    _inputs_sent: bool = False

    def opening(self) -> Reply:
        """The first message of a stream."""
        request = self.inbox.request
        echoed = self.input_text if self.settings.input_text else ""
        return Reply(text=echoed, input_token_count=request.input_length, seed=request.sampling.seed)

    def advance(self, events: list[TokenEvent]) -> list[Reply]:
        """The messages of a stream that these tokens give: one per token if tokens are wanted, else one for all."""
        replies = self._input_reply()
        groups = [[event] for event in events] if self.settings.details.generated else [events]
        for group in groups:
            if not self.end:
                reply = self._reply(group)
                replies += [] if reply.says_nothing else [reply]
        return replies

    def absorb(self, events: list[TokenEvent]) -> None:
        """Keep what these tokens give, for `whole`."""
        if not self.end:
            reply = self._reply(events)
            self._texts.append(reply.text)
            self._tokens += reply.tokens

    def whole(self) -> Reply:
        """The response of a unary call."""
        request = self.inbox.request
        if self.expired:
            return Reply(input_token_count=request.input_length, stop_reason=self.end)
        echoed = self.input_text + self.separator if self.settings.input_text else ""
        return Reply(
            text=echoed + "".join(self._texts),
            input_token_count=request.input_length,
            generated_token_count=self.count,
            stop_reason=self.end,
            stop_sequence=self.assembler.matched or "",
            seed=request.sampling.seed,
            tokens=self._tokens,
            input_tokens=self._input_infos(),
        )

    def _reply(self, events: list[TokenEvent]) -> Reply:
        texts, tokens = [], []
        for event in events:
            if self.end:
                break  # in flight when a stop sequence ended the output
            texts.append(self._text_of(event))
            if self.settings.details.generated and event.token >= 0:
                tokens.append(self._info(event.token, event.facts))
        text = "".join(texts)
        if len(self.beginning) < SHOWN_CHARACTERS:
            self.beginning = (self.beginning + text)[:SHOWN_CHARACTERS]
        return Reply(
            text=text,
            generated_token_count=self.count,
            stop_reason=self.end,
            stop_sequence=self.assembler.matched or "",
            seed=self.inbox.request.sampling.seed if self.end and not self.expired else 0,
            tokens=tokens,
        )

    def _text_of(self, event: TokenEvent) -> str:
        """Append one token to the output; the text that becomes final by it."""
        if event.token < 0:
            self.end, self.expired = event.end, self.count == 0
            return self.assembler.finish()
        self.count += 1
        minimum_reached = self.count >= self.inbox.request.sampling.min_new_tokens
        text = self.assembler.add(self.detokenizer.add(event.token), may_stop=not event.end and minimum_reached)
        self.end = StopReason.STOP_SEQUENCE if self.assembler.matched is not None else event.end
        return text + self.assembler.finish() if self.end else text

    def _input_reply(self) -> list[Reply]:
        if self._inputs_sent or not self.settings.details.inputs or self.expired:
            return []
        infos = self._input_infos()
        if not infos:
            return []
        self._inputs_sent = True
        return [Reply(input_tokens=infos, input_token_count=self.inbox.request.input_length)]

    def _input_infos(self) -> list[TokenInfo]:
        facts = self.inbox.input_facts  # of an encoder-decoder, those of its input only
        tokens = self.inbox.request.tokens[-len(facts) :] if facts else []
        return [self._info(token, fact) for token, fact in zip(tokens, facts, strict=True)]

    def _info(self, token: int, facts: TokenFacts | None) -> TokenInfo:
        name = self.tokenizer.token_text
        if facts is None:
            return TokenInfo(name(token), 0.0, 0, [])
        top = [(name(candidate), logprob) for candidate, logprob in facts.top]
        return TokenInfo(name(token), facts.logprob, facts.rank, top)


@dataclass(frozen=True, slots=True)
class RowFactory:
    """What all rows of a model share."""

    tokenizer: Tokenizer
    decoder: TokenDecoder
    encoder_decoder: bool

    def make(self, inboxes: list[Inbox], texts: list[str], settings: Settings) -> list[Row]:
        """The rows of a submitted call."""
        return [self._row(inbox, text, settings) for inbox, text in zip(inboxes, texts, strict=True)]

    def _row(self, inbox: Inbox, text: str, settings: Settings) -> Row:
        assembler = TextAssembler(
            settings.stop_sequences,
            include_stop_sequence=settings.include_stop_sequence,
            hold_cluster=self.decoder.splits_characters,
        )
        separator = "\n\n" if self.encoder_decoder else ""
        return Row(inbox, text, settings, self.tokenizer, Detokenizer(self.decoder), assembler, separator)
