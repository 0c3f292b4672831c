"""The border between the two processes: every message that crosses it, and the values in them.

Length-prefixed msgpack; one tagged union per direction; columns, not rows, where a message has one entry
per running request. Frozen, no pickle, no tensors, no text. Deadlines are `time.monotonic()` values.
"""

import enum
import struct
from typing import Any

import msgspec

from tgis.ipc.adapters import AdapterRef, AdapterResolved, AdapterStoreOptions, ResolveAdapter
from tgis.ipc.snapshot import Snapshot

MAX_FRAME_BYTES = 1 << 30  # far above any honest message: a broken length must not allocate the machine
_LENGTH = struct.Struct("<I")


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


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the next token of a request is chosen, after validation and defaults."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    typical_p: float = 1.0  # 1 is off
    seed: int = 0  # uint64; unused when greedy
    repetition_penalty: float = 1.0  # 1 is off
    length_penalty: tuple[int, float] | None = None  # start_index, decay_factor
    min_new_tokens: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken, without a draw."""
        return self.temperature == 0.0


class LogprobOptions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which facts about tokens a request wants; `logprobs`, `ranks` and `top_n` apply to both lists."""

    generated_tokens: bool = False
    input_tokens: bool = False
    logprobs: bool = False
    ranks: bool = False
    top_n_tokens: int = 0


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One input on its way to the engine."""

    id: int
    tokens: list[int]  # placeholders of the prefix, then the input after truncation, special tokens included
    max_new_tokens: int  # already reduced to what the sequence length leaves
    limited_by_context: bool  # whether it was reduced: reaching it is TOKEN_LIMIT then, else MAX_TOKENS
    sampling_params: SamplingParams
    logprob_options: LogprobOptions
    deadline: float | None = None
    cache_salt: bytes = b""  # requests share cached prefixes only with those of the same salt
    adapter: AdapterRef | None = None

    @property
    def soft_prompt_length(self) -> int:
        """How many of the tokens are placeholders of a soft prompt."""
        return self.adapter.length if self.adapter else 0

    @property
    def input_length(self) -> int:
        """Tokens of the input itself, which is what users count."""
        return len(self.tokens) - self.soft_prompt_length

    @property
    def output_positions(self) -> int:
        """Places that the output of an encoder-decoder takes, virtual tokens included."""
        return self.max_new_tokens + (self.adapter.decoder_length if self.adapter else 0)

    @property
    def input_positions(self) -> int:
        """Places that the input takes, virtual tokens included."""
        virtual = self.adapter.decoder_length if self.adapter else 0
        return len(self.tokens) - virtual - bool(virtual)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was asked about one token: logprob and rank 0 and no candidates where it was not."""

    logprob: float = 0.0
    rank: int = 0
    top_logprobs: list[tuple[int, float]] = []  # token id, logprob


class EngineInfo(msgspec.Struct, frozen=True):
    """What is learnt by loading the model."""

    model_class: str
    device: str
    dtype: str
    vocab_size: int
    encoder_decoder: bool
    padded: bool  # whether a batch costs rows x width, or the sum of lengths
    max_batch_size: int
    token_capacity: int  # tokens of context that fit into memory
    max_prefill_tokens: int  # tokens that one pass takes before it only gets slower
    prefill_linear: float = 0.0  # tokens of context that each token of a prefill weighs
    prefill_quadratic: float = 0.0  # and besides, for each token of its row
    block_size: int = 0  # tokens of a KV block; rows of such engines compute parts of their prompts beside others
    lookahead: int = 0  # tokens of a row that such an engine may compute, if it has the block, before they are planned
    max_slowdown: float = 2.0  # how much longer a step may take for prompts beside rows that decode
    max_request_tokens: int = 1 << 40  # tokens of the largest single request that fits into memory
    max_positions: int = 1 << 40  # tokens that an input, and an output, may have whatever the memory
    embedding_size: int = 0  # of a row of a soft prompt; 0: the engine takes none
    lora_targets: dict[
        str, tuple[int, int]
    ] = {}  # inputs and outputs of layers that LoRA may change; empty: it may not

    @property
    def supports_adapters(self) -> bool:
        """Whether rows may have soft prompts or LoRA adapters."""
        return self.embedding_size > 0 or bool(self.lora_targets)


class AdmissionCounters(msgspec.Struct, array_like=True, gc=False):
    """How rows came to join steps, and what kept others from it, counted since the last report."""

    queue_jumps: int = 0  # joined before one that had come earlier
    granular_additions: int = 0  # joined because others will have left in time
    prefill_weight_exceeded: int = 0  # kept back: the prefill would have become too large
    prefill_padding_exceeded: int = 0  # kept back: too much of the prefill would have been padding
    preemptions: int = 0  # gave their KV blocks to older rows, to be computed anew
    prefix_cache_queries: int = 0  # tokens of rows whose beginning could have been cached
    prefix_cache_hits: int = 0  # tokens of those that were


class StepStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step was, for the metrics."""

    prefill: bool  # whether some row did more than decode
    num_prefills: int  # such rows
    num_decodes: int  # the other rows of the pass
    prefill_tokens: int  # computed of rows that did more than decode, padding included
    duration: float  # seconds, from plan to message
    forward_duration: float  # seconds inside the engine
    num_running: int  # rows held after the step
    context_tokens: int  # tokens of these rows, padding included
    remaining_tokens: int  # sum over these rows of tokens they may still generate
    concatenated: bool  # whether rows came to the engine beside others, and stayed
    num_requeued: int  # requests that wait again, after a failed step
    queue_durations: list[float]  # seconds that each of the rows waited that were in a batch for the first time
    first_scheduled: list[int] = []  # ids of those rows
    admissions: AdmissionCounters = msgspec.field(default_factory=AdmissionCounters)
    token_capacity: int = 0  # tokens of context that a batch may have; less than at the start after lack of memory


class EngineOptions(msgspec.Struct, frozen=True, tag="options"):
    """The first message to the engine process: all that it needs to know of the configuration."""

    engine: str
    model_path: str
    dtype: str | None
    eos_ids: tuple[int, ...]
    max_sequence_length: int
    max_batch_size: int | None  # None: the engine's own default
    max_prefill_padding: float
    max_waiting_tokens: int
    batch_safety_margin: int  # percent of memory held back
    cuda_memory_fraction: float
    num_threads: int | None  # of all shards together
    log_level: str
    json_output: bool
    prefix_cache: bool = True
    kv_cache_bytes: int | None = None  # None: the engine's own share of the free memory
    num_shards: int = 1  # processes that compute every step together
    adapter_store: AdapterStoreOptions | None = None
    compile: bool = False  # what can be, by torch.compile
    estimate_memory: str = "off"  # auto, manual or off
    cache_dir: str = ""  # needed by auto


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """The inputs of one call, queued together."""

    requests: list[Request]
    queued_at: float  # `time.monotonic()`: a long step must not hide how long they wait


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Requests or lookups that nobody waits for any more; unknown ids are none of anybody's business."""

    ids: list[int]


class GetSnapshot(msgspec.Struct, frozen=True, tag="inspect"):
    """Send a Snapshot, between two steps."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave now."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model has loaded and one real pass has succeeded."""

    info: EngineInfo


class Step(msgspec.Struct, frozen=True, tag="step"):
    """What one step produced: parallel columns, one entry per request that got a token or ended.

    A request has no tokens if it ended before its first, and as many logprobs as tokens, or none. `logprobs` is
    empty when no request asked for any.
    """

    ids: list[int]
    tokens: list[list[int]]
    stop_reasons: list[int]  # StopReason, of the last token
    logprobs: list[list[TokenLogprobs]]
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # request id -> facts of its input tokens, after its prefill
    stats: StepStats | None  # None when no pass ran


class FailureKind(enum.StrEnum):
    """Whose fault a failed request was."""

    ERROR = "error"
    OUT_OF_MEMORY = "oom"


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Requests that got an error instead of an end."""

    ids: list[int]
    kind: FailureKind
    message: str
    prefill: bool | None = None  # which sort of step it was, if one failed as a whole


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine process is about to leave, and why."""

    message: str


ToEngine = EngineOptions | Submit | ResolveAdapter | Cancel | GetSnapshot | Shutdown
FromEngine = Ready | Step | Failed | AdapterResolved | Snapshot | Fatal

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """One frame: four bytes of length (little endian), then msgpack."""
    body = _encoder.encode(message)
    assert len(body) <= MAX_FRAME_BYTES
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames and decodes them as members of `union`."""

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes, in order."""
        self._buffer += data
        messages, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            assert length <= MAX_FRAME_BYTES
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        if start:
            del self._buffer[:start]
        return messages
