"""Request and response bodies of the TGI API."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

UInt = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**32 - 1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
NotEmpty = Annotated[str, Meta(min_length=1)]
FinishReason = Literal["length", "eos_token", "stop_sequence"]


class Grammar(Struct):
    """A constraint on the output."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Any


class GenerateParameters(Struct):
    """Parameters of a request; sampling is on with `do_sample` or any parameter that asks for it."""

    best_of: UInt | None = None
    temperature: PositiveFloat | None = None
    repetition_penalty: PositiveFloat | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    top_p: Fraction | None = None
    typical_p: Fraction | None = None
    do_sample: bool = False
    max_new_tokens: Positive | None = None
    return_full_text: bool | None = None
    stop: list[NotEmpty] = []
    stop_sequences: list[NotEmpty] = []  # older name of `stop`, used by huggingface_hub
    truncate: Positive | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    ignore_eos_token: bool = False  # an extension used by load generators
    seed: Annotated[int, Meta(ge=0)] | None = None
    top_n_tokens: UInt | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None
    prediction: str | None = None  # an extension: a text that the output probably repeats in part

    def __post_init__(self) -> None:
        self.stop = [*self.stop, *self.stop_sequences]

    @property
    def samples(self) -> bool:
        """True if tokens are sampled; otherwise decoding is greedy."""
        filters = (self.top_k, self.top_p, self.typical_p)
        return self.do_sample or self.temperature not in (None, 1.0) or filters != (None, None, None)


class GenerateRequest(Struct):
    """A prompt; without `parameters`, tokens are sampled at temperature 1."""

    inputs: NotEmpty
    parameters: GenerateParameters = field(default_factory=lambda: GenerateParameters(do_sample=True))
    stream: bool = False  # only `/` and `/invocations` stream if this is true


class Token(Struct):
    """A token of the prompt or the output, or a candidate for one."""

    id: int
    text: str
    logprob: float | None  # null for the first token of a prompt
    special: bool | UnsetType = UNSET  # not set for the prompt


class Details(Struct, kw_only=True):
    """Details of an output."""

    generated_text: str | UnsetType = UNSET  # set in best_of_sequences
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None  # null for greedy decoding
    prefill: Sequence[Token]
    tokens: Sequence[Token]
    top_tokens: Sequence[Sequence[Token]] | UnsetType = UNSET
    best_of_sequences: Sequence["Details"] | UnsetType = UNSET


class GenerateResponse(Struct):
    """A complete answer."""

    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(Struct):
    """Details of a stream, in its last event."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(Struct):
    """An event of a stream: one for each token; the last one has the complete text."""

    index: int
    token: Token
    top_tokens: Sequence[Token] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class TokenizeRequest(Struct):
    """A text; other fields of a generate request are ignored."""

    inputs: str


class SimpleToken(Struct):
    """A token as a slice of the text, in UTF-8 bytes; special tokens are empty."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(Struct):
    """The tokens of a chat, and the rendered chat template."""

    tokenize_response: Sequence[SimpleToken]
    templated_text: str


class Invocation(Struct):
    """The body of Amazon SageMaker: a generate, chat or completion request."""

    inputs: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET


class ErrorResponse(Struct):
    """An error."""

    error: str
    error_type: str
