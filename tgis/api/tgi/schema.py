"""The bodies of TGI's REST API, with the names of their fields; also in the OpenAPI document."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

UInt = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Seed = Annotated[int, Meta(ge=0)]  # of 64 bits
Positive = Annotated[int, Meta(ge=1, le=2**32 - 1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
NotEmpty = Annotated[str, Meta(min_length=1)]
FinishReason = Literal["length", "eos_token", "stop_sequence"]


class Grammar(Struct):
    """A constraint on the output."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Raw  # parsed where it is compiled


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
    stop_sequences: list[NotEmpty] = []  # the old name, which huggingface_hub knows
    truncate: Positive | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    ignore_eos_token: bool = False  # not TGI's own; load generators send it
    seed: Seed | None = None
    top_n_tokens: UInt | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None

    @property
    def samples(self) -> bool:
        """True if tokens are sampled; otherwise decoding is greedy."""
        return self.do_sample or self.temperature not in (None, 1.0) or self._filters

    @property
    def asks_for_sampling(self) -> bool:
        """True if any parameter asks for sampling, even with a value that changes nothing."""
        return self.do_sample or self.temperature is not None or self._filters

    @property
    def _filters(self) -> bool:
        return any(each is not None for each in (self.top_k, self.top_p, self.typical_p))


class GenerateRequest(Struct):
    """A prompt; without `parameters`, tokens are sampled at temperature 1."""

    inputs: NotEmpty
    parameters: GenerateParameters = field(default_factory=lambda: GenerateParameters(do_sample=True))
    stream: bool = False  # only `/` and `/invocations` stream if this is true


class PrefillToken(Struct):
    """A token of the input; the first has no logprob."""

    id: int
    text: str
    logprob: float | None


class Token(Struct):
    """A generated token, or a candidate for one."""

    id: int
    text: str
    logprob: float | None
    special: bool


class SequenceDetails(Struct):
    """What is known about a generated text."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None  # null: no token was drawn
    prefill: Sequence[PrefillToken]
    tokens: Sequence[Token]
    top_tokens: Sequence[Sequence[Token]] | UnsetType = UNSET


class BestOfSequence(SequenceDetails, kw_only=True):
    """One of the other sequences of `best_of`."""

    generated_text: str


class Details(SequenceDetails):
    """What is known about the best sequence, and the others."""

    best_of_sequences: Sequence[BestOfSequence] | UnsetType = UNSET


class GenerateResponse(Struct):
    """The whole answer."""

    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(Struct):
    """What is known at the end of a stream."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(Struct):
    """An event of a stream: one for each token; the last one has the whole text."""

    index: int
    token: Token
    top_tokens: Sequence[Token] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class TokenizeRequest(Struct):
    """A text; everything else of a request to generate may be there, and has no effect."""

    inputs: str


class SimpleToken(Struct):
    """A token of a text, which is that part of it: offsets in bytes of UTF-8; empty for special tokens."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(Struct):
    """The tokens of a chat, and the text that they are of: the messages in the model's chat template."""

    tokenize_response: Sequence[SimpleToken]
    templated_text: str


class Invocation(Struct):
    """What Amazon SageMaker sends: the body of a request to generate, of a chat, or of a completion."""

    inputs: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET


class ErrorResponse(Struct):
    """What went wrong."""

    error: str
    error_type: str


class Info(Struct):
    """What is served, and how; fields of older and newer versions of TGI."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    model_dtype: str
    model_device_type: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_length: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    max_batch_total_tokens: int
    max_batch_size: int
    max_waiting_tokens: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
