"""Every message that crosses the socket between front end and engine process: one tagged union per direction.

Columns, not rows, where a message has one entry per running request. Frozen, no pickle, no tensors, no text.
Deadlines and arrival times are `time.monotonic()` values: one clock per host.
"""

import enum
from collections.abc import Iterable

import msgspec

from tgis.ipc.lookups import Acquire, Acquired, AdapterStoreOptions, Vocabulary
from tgis.ipc.request import Request, StopReason, TokenLogprobs

_logprobs_encoder = msgspec.msgpack.Encoder()
_logprobs_decoder = msgspec.msgpack.Decoder(list[TokenLogprobs])


class EngineOptions(msgspec.Struct, frozen=True, tag="options"):
    """The first message to the engine process: the part of the configuration that it needs."""

    engine: str
    model_path: str
    dtype: str | None
    eos_ids: tuple[int, ...]
    max_sequence_length: int
    max_batch_size: int | None  # None: the engine's own default
    max_prefill_padding: float
    max_waiting_tokens: int
    batch_safety_margin: int | None  # percent of memory kept free; None: the engine decides
    cuda_memory_fraction: float
    num_threads: int  # threads of all shards on this machine
    log_level: str
    json_output: bool
    config_eos_ids: tuple[int, ...] = ()  # those that length penalties boost; empty: all
    prefix_cache: bool = True
    kv_cache_bytes: int | None = None  # None: the engine decides from free memory
    kv_cache_dtype: str = "auto"  # int8, or bfloat16, which must be that of the model
    num_shards: int = 1  # tensor-parallel processes, of all machines
    rank: int = 0  # rank of this process
    nnodes: int = 1  # machines that they are on
    node_rank: int = 0  # rank of this node
    shared_memory: int | None = None  # a file in it, if all ranks are on one machine
    master_addr: str | None = None  # address of node 0 for the other nodes
    master_port: int = 0
    cluster_secret_path: str | None = None
    cluster_interface: str | None = None  # interface of collectives; None: that of the connections between nodes
    cluster_timeout_seconds: float = 10.0  # until another node that does not answer counts as gone
    adapter_store: AdapterStoreOptions | None = None
    max_prefill_tokens: int | None = None  # limit of a step; None: the engine decides
    max_prefill_gap_ms: int | None = None  # None: the engine's default
    max_top_n_tokens: int = 10  # limit of a request
    compile: bool | None = None  # use torch.compile; None: on CUDA
    strict: bool = False  # StartError instead of a warning if an option is ignored or replaced
    estimate_memory: str = "off"  # auto, manual or off
    cache_dir: str = ""  # directory of CPU kernels that are not prebuilt
    cpu_isa: str = "auto"  # instruction set of the CPU kernels, or none
    quantize: str = "none"  # int8, int4, or the name of a format
    quantize_logits: bool = False
    quantize_activations: str = "auto"  # none or int8
    kv_cache_idle_seconds: float = 0.0  # without sequences, after which memory is given back; 0: never
    speculation: str = "off"  # auto, off or lookup
    speculation_max_tokens: int = 15  # proposed tokens of a sequence in one step
    speculator_path: str | None = None  # model that drafts tokens
    speculator_max_batch_size: int | None = None  # sequences of a step for which it does; None: any number

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.num_shards // self.nnodes


class EngineInfo(msgspec.Struct, frozen=True):
    """What is known once the model has loaded."""

    engine: str  # value of DEPLOYMENT_FRAMEWORK
    model_class: str
    device: str
    dtype: str
    vocab_size: int  # width of the logits
    encoder_decoder: bool
    padded: bool  # a batch costs batch size x longest sequence, else the sum of lengths
    max_batch_size: int
    token_capacity: int  # tokens of context that fit into memory
    max_prefill_tokens: int  # more in one step only make it slower
    block_size: int = 0  # tokens of a KV block; with blocks, prefills are mixed with decodes, in chunks or whole
    lookahead: int = 0  # tokens that such an engine may compute before they are planned, if the blocks are there
    max_prefill_gap_ms: int = 250  # default time limit of a step that mixes prefill chunks and decodes
    proposed_tokens: int = 0  # proposals that the engine verifies for a sequence in one step; 0: none
    drafted_tokens: int = 0  # the part of proposed_tokens that a model of the engine drafts
    state_slots: int = 0  # states of recurrent layers: one of each running sequence, and snapshots
    kv_cache_bytes: int = 0  # set aside at the start, of all shards together
    kv_cache_dtype: str = "auto"  # int8; auto: that of the model
    max_request_tokens: int = 1 << 40  # tokens of the largest request that fits into memory
    max_positions: int = 1 << 40  # positions of an input, and of an output, whatever the memory
    input_vocab_size: int = 1 << 40  # ids of input tokens are below
    decoder_start_token_id: int | None = None  # None: not an encoder-decoder
    forced_bos_token_id: int | None = None  # the first token of every output
    embedding_size: int = 0  # width of a soft prompt; 0: the engine takes none
    quantize: str = "none"  # weights of linear layers
    arithmetic: str = ""  # all that decides the numbers beside the model's files
    invariant: bool = True  # the bits of a sequence do not depend on the others in the batch
    fingerprint: str = ""  # a digest of the files and the arithmetic; set by the front end, which reads the files
    lora_targets: dict[str, tuple[int, int]] = {}  # layer -> its inputs and outputs; empty: the engine takes no LoRA

    @property
    def supports_adapters(self) -> bool:
        return self.embedding_size > 0 or bool(self.lora_targets)

    def has_end(self, eos_ids: Iterable[int]) -> bool:
        """Whether the model can generate any of these tokens, without which no grammar is ever complete."""
        return any(token < self.vocab_size for token in eos_ids)


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """The inputs of one call, queued together."""

    requests: list[Request]
    arrival_time: float  # set by the front end: time spent waiting for a long step counts


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Requests or lookups that nobody waits for any more; unknown ids are ignored."""

    ids: list[int]


class GetBatchState(msgspec.Struct, frozen=True, tag="get_batch_state"):
    """Asks for a BatchState, sent between two steps."""


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Forget all cached prefixes; running requests keep theirs."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Exit now."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model has loaded and a warm-up step has succeeded."""

    info: EngineInfo
    fallback_reason: str = ""  # why it is not the engine asked for


class BatcherCounters(msgspec.Struct, array_like=True, gc=False):
    """How requests joined the batch, and what kept others waiting, since the last report."""

    queue_jumps: int = 0  # joined before one that had to wait
    granular_additions: int = 0  # joined because others will have ended before memory runs out
    prefill_weight_exceeded: int = 0  # kept waiting: the prefill would have become too large
    prefill_padding_exceeded: int = 0  # kept waiting: too much of the prefill would have been padding
    preemptions: int = 0  # lost their KV blocks to older sequences, to be recomputed
    prefix_cache_queries: int = 0  # tokens looked up in the prefix cache
    prefix_cache_hits: int = 0  # tokens found there
    proposed_tokens: int = 0  # computed beside the newest token of a sequence, since they may follow it
    accepted_tokens: int = 0  # proposed tokens that followed
    drafted_tokens: int = 0  # others, that a model of the engine has drafted
    accepted_drafted_tokens: int = 0  # drafted tokens that followed


class StepStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step, for the metrics; token counts include padding."""

    prefill: bool  # some sequence did more than decode
    num_prefills: int
    num_decodes: int
    prefill_tokens: int
    duration: float  # seconds, from plan to message
    forward_duration: float  # seconds inside the engine
    num_running: int  # after the step
    context_tokens: int  # tokens of the running sequences
    remaining_tokens: int  # tokens that the running sequences may still generate
    concatenated: bool  # sequences joined a running batch, and stayed
    num_requeued: int  # requests that wait again after a failed step
    first_scheduled: dict[int, tuple[float, int]]  # new sequences: seconds in the queue, tokens found in the cache
    prompt_tokens: int = 0  # input tokens computed in this step or found in the prefix cache for it; each counts once
    counters: BatcherCounters = msgspec.field(default_factory=BatcherCounters)
    token_capacity: int = 0  # less than at the start after running out of memory


class Step(msgspec.Struct, frozen=True, tag="step"):
    """What one step produced: parallel columns, one entry per request that got a token or ended.

    A request has no tokens if it ended before its first, and as many logprobs as tokens, or none. `logprobs` is
    empty when no request asked for any.
    """

    ids: list[int]
    tokens: list[list[int]]
    stop_reasons: list[StopReason]  # reasons for the last token
    logprobs: list[list[TokenLogprobs]]
    stats: StepStats | None  # None when the engine did not run


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """What a request asked about its input tokens: some of them, in order, before its first Step.

    Millions of values, which the front end does not keep as objects: they stay encoded until the answer is made.
    """

    id: int
    num_tokens: int
    encoded: bytes

    @classmethod
    def encode(cls, request_id: int, logprobs: list[TokenLogprobs]) -> "PromptLogprobs":
        return cls(request_id, len(logprobs), _logprobs_encoder.encode(logprobs))

    def decode(self) -> list[TokenLogprobs]:
        return _logprobs_decoder.decode(self.encoded)


class WaitReason(enum.StrEnum):
    """What keeps a request waiting."""

    BATCH_SIZE = "the batch is at its maximum size"
    MEMORY = "the batch would not fit into memory"
    PREFILL_SIZE = "the prefill would become too large"
    PREFILL_PADDING = "too much of the prefill would be padding"
    DECODES_FIRST = "running requests get some decode steps first"
    PREFIX_CACHE = "its prompt begins like one that is being prefilled"
    ADAPTER_RANKS = "its LoRA adapter would add too many ranks to the batch"
    RETRY = "requests of a failed step are retried in groups"


class RequestState(msgspec.Struct, frozen=True, gc=False):
    """Progress of one request, in tokens."""

    id: int
    seconds_since_arrival: float
    prompt_tokens: int
    computed_tokens: int  # computed tokens, generated ones included
    generated_tokens: int
    remaining_tokens: int  # tokens that it may still generate


class BatchState(msgspec.Struct, frozen=True, tag="batch_state"):
    """The batch and the queue between two steps, for operators who ask why requests wait: counts and times, never
    tokens. Context, capacities and limits are in tokens.
    """

    num_running: int
    num_waiting: int
    wait_reason: WaitReason | None  # why the first request in the queue waits, if it has been tried
    total_generated_tokens: int  # since the start
    context_tokens: int  # tokens of the running requests, padding included
    token_capacity: int  # less than at the start after running out of memory
    initial_token_capacity: int
    max_prefill_tokens: int  # limit of one step; lowered after running out of memory
    initial_max_prefill_tokens: int
    max_batch_size: int
    running_requests: list[RequestState]  # the first of them
    waiting_requests: list[RequestState]  # the first of them, in queue order
    kv_cache_bytes: int = 0  # set aside
    resident_cache_bytes: int = 0  # bytes that take memory, up to a second ago


class FailureKind(enum.StrEnum):
    """Why requests failed in a step."""

    ERROR = "error"
    OUT_OF_MEMORY = "oom"
    GRAMMAR = "grammar"  # too complex to be followed
    NOTHING_LEFT = "nothing_left"  # a parameter, which the message names, leaves no token; or the scores are not finite


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Requests that ended with an error."""

    ids: list[int]
    kind: FailureKind
    message: str
    prefill: bool | None = None  # whether a step that failed completely was a prefill


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent once a second, also during a long step: the process runs."""

    rank: int
    num_dropped_log_lines: int = 0  # since its start
    resident_cache_bytes: int = 0  # bytes of the KV cache that take memory


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine process is about to exit, and why."""

    message: str


ToEngine = EngineOptions | Vocabulary | Submit | Acquire | Cancel | GetBatchState | FlushCache | Shutdown
FromEngine = Ready | PromptLogprobs | Step | Failed | Acquired | BatchState | Heartbeat | Fatal
