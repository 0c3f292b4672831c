"""One request on its way to the engine: its tokens, how to sample, what to report, and how it can end."""

import enum
from typing import Annotated

import msgspec

from tgis.ipc.lookups import AdapterRef

UInt = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class StopReason(enum.IntEnum):
    """Why a request ended; the numbers are those of the proto."""

    NOT_FINISHED = 0
    MAX_TOKENS = 1
    EOS_TOKEN = 2
    CANCELLED = 3
    TIME_LIMIT = 4
    STOP_SEQUENCE = 5
    TOKEN_LIMIT = 6
    ERROR = 7


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How each token of a request is sampled; what a request leaves unset is off, except for the temperature."""

    temperature: float = 0.0  # 0 is greedy
    top_k: UInt = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    typical_p: float = 1.0  # 1 is off
    seed: int = 0  # uint64; unused when greedy
    repetition_penalty: float = 1.0  # 1 is off
    length_penalty: tuple[UInt, float] | None = None  # start_index, decay_factor
    min_new_tokens: UInt = 0
    frequency_penalty: float = 0.0  # 0 is off
    presence_penalty: float = 0.0  # 0 is off
    logit_bias: dict[int, float] | None = None  # bias by token id; None is off
    watermark: bool = False
    ignore_eos: bool = False  # an end-of-sequence token does not end the output
    min_p: float = 0.0  # 0 is off
    stop_token_ids: tuple[int, ...] = ()  # end the output, too
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens of words, none of which is empty

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def without_filters(self) -> "SamplingParams":
        """The same for greedy decoding, which has no use for filters."""
        return msgspec.structs.replace(self, top_k=0, top_p=1.0, typical_p=1.0, min_p=0.0)

    @property
    def excluding_field(self) -> str:
        """The first parameter that excludes tokens, whatever their scores are; empty: none does."""
        names = ("allowed_token_ids", "bad_words", "stop_token_ids")
        return next((name for name in names if getattr(self, name)), "")


class LogprobOptions(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Which tokens to report and what about them; `logprobs`, `ranks` and `top_n_tokens` apply to both lists."""

    generated_tokens: bool = False
    input_tokens: bool = False
    logprobs: bool = False
    ranks: bool = False
    top_n_tokens: UInt = 0
    exact_top_n: bool = False  # never more candidates than asked for, however many tie with the last one

    @property
    def wants_details(self) -> bool:
        """Whether anything is asked for beyond the token itself."""
        return self.logprobs or self.ranks or self.top_n_tokens > 0

    @property
    def details_per_token(self) -> int:
        """The number of entries for a token: itself and its candidates, ties at the end not counted."""
        return 1 + self.top_n_tokens


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The details of one token; logprob and rank are 0 where they were not asked for."""

    logprob: float = 0.0
    rank: int = 0
    top_logprobs: list[tuple[int, float]] = []  # token id, logprob


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One input of a call, as the engine process gets it."""

    id: int
    tokens: list[int]  # placeholders of the soft prompt, then the input after truncation, with special tokens
    max_new_tokens: int  # already reduced to what the sequence length leaves
    limited_by_context: bool = False  # it was reduced: reaching it is TOKEN_LIMIT, not MAX_TOKENS
    sampling_params: SamplingParams = SamplingParams()
    logprob_options: LogprobOptions = LogprobOptions()
    deadline: float | None = None  # `time.monotonic()`
    cache_salt: bytes = b""  # requests share cached prefixes only with others of the same salt
    adapter: AdapterRef | None = None
    answer_deadline: float | None = None  # deadline of the client, who must have the complete output before it
    grammar: int | None = None  # the lookup that has compiled it
    client: bytes = b""  # whose turns in the queue it takes; empty where nobody knows; not for logs
    prediction: list[int] = []  # tokens that the output probably repeats; they change its speed only

    @property
    def output_details(self) -> LogprobOptions:
        """What is asked about the generated tokens."""
        return self.logprob_options if self.logprob_options.generated_tokens else LogprobOptions()

    @property
    def soft_prompt_length(self) -> int:
        """How many of the tokens are placeholders of a soft prompt."""
        return self.adapter.length if self.adapter else 0

    @property
    def input_length(self) -> int:
        """Tokens of the input itself, as users count them."""
        return len(self.tokens) - self.soft_prompt_length

    @property
    def decoder_length(self) -> int:
        """Virtual tokens before the output of an encoder-decoder."""
        return self.adapter.decoder_length if self.adapter else 0

    @property
    def output_positions(self) -> int:
        """Decoder positions of an encoder-decoder, virtual tokens included."""
        return self.max_new_tokens + self.decoder_length

    @property
    def input_positions(self) -> int:
        """Encoder positions of an encoder-decoder, virtual tokens included."""
        return len(self.tokens) - self.decoder_length - bool(self.decoder_length)
