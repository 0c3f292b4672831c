"""Parameters of a call: defaults, rules and effective values. Pure functions; texts and numbers only.

The rules stand in one table and are checked from top to bottom; the first that fails ends the call.
"""

import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tgis.errors import InvalidRequest, Unimplemented
from tgis.ipc.adapters import AdapterRef
from tgis.ipc.messages import LogprobOptions, Request, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 20
MAX_STOP_SEQUENCES = 6
MAX_STOP_SEQUENCE_BYTES = 240
MAX_TOP_N_TOKENS = 10
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the server allows: `sequence_length` counts input and output, `new_tokens` output."""

    max_sequence_length: int
    max_new_tokens: int
    include_stop_sequence: bool  # where the request does not say
    placeholder_id: int = 0  # the token that stands for each one of a soft prompt


@dataclass(frozen=True, slots=True)
class RawParams:
    """What a call asks for, as it asks: zero is unset, None is absent."""

    do_sample: bool = False
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 0.0
    typical_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 0
    min_new_tokens: int = 0
    time_limit_millis: int = 0
    stop_sequences: tuple[str, ...] = ()
    include_stop_sequence: bool | None = None
    input_text: bool = False
    logprob_options: LogprobOptions = field(default_factory=LogprobOptions)
    repetition_penalty: float = 0.0
    length_penalty: tuple[int, float] | None = None  # start_index, decay_factor
    truncate_input_tokens: int = 0
    guided: str = ""  # the constraint on the output, if any


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """What every input of the call runs with, after defaults and rules."""

    sampling_params: SamplingParams
    seed: int | None  # as given; None draws one per input
    max_new_tokens: int
    deadline: float | None
    stop_sequences: tuple[str, ...]
    include_stop_sequence: bool
    input_text: bool
    logprob_options: LogprobOptions
    truncate_input_tokens: int


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule about one field: `broken` tells whether it is, `text` is the message."""

    field: str
    violated: Callable[[RawParams, RequestLimits], bool]
    message: str


def validate(raw: RawParams, limits: RequestLimits) -> ResolvedParams:
    """Effective settings, or InvalidRequest for the first rule broken. The deadline starts now."""
    now = time.monotonic()
    if raw.guided:
        raise Unimplemented(f"params.decoding.{raw.guided}: guided decoding is not supported yet")
    filled = _with_defaults(raw)
    for name, value in _float_fields(filled):
        if not math.isfinite(value):
            raise InvalidRequest(name, f"{_last_segment(name)} must be finite, got {value}")
    for rule in _RULES:
        if rule.violated(filled, limits):
            raise InvalidRequest(rule.field, rule.message.format(p=filled, limits=limits))
    return _resolved(filled, limits, now)


def make_request(
    request_id: int,
    tokens: list[int],
    prefix: AdapterRef | None,
    params: ResolvedParams,
    limits: RequestLimits,
    field_name: str,
    identity: bytes = b"",
) -> Request:
    """One input of the call, its length checked and its output bounded by what the sequence length leaves."""
    length, most = len(tokens), limits.max_sequence_length
    prefix_length = prefix.length if prefix else 0
    minimum = params.sampling_params.min_new_tokens
    if not tokens:
        raise InvalidRequest(field_name, f"{field_name} gives no token")
    if length + prefix_length >= most:
        text = f"input tokens ({length}) plus prefix length ({prefix_length}) must be < {most}"
        raise InvalidRequest(field_name, text)
    if length + prefix_length + minimum > most:
        text = (
            f"input tokens ({length}) plus prefix length ({prefix_length}) plus "
            f"min_new_tokens ({minimum}) must be <= {most}"
        )
        raise InvalidRequest(field_name, text)
    room = most - length - prefix_length
    return Request(
        id=request_id,
        tokens=[limits.placeholder_id] * prefix_length + tokens,
        max_new_tokens=min(params.max_new_tokens, room),
        limited_by_context=params.max_new_tokens > room,
        sampling_params=_with_seed(params),
        logprob_options=params.logprob_options,
        deadline=params.deadline,
        cache_salt=identity + (prefix.version.to_bytes(8) if prefix else b""),
        adapter=prefix,
    )


def _with_defaults(raw: RawParams) -> RawParams:
    """Zero means the default; what greedy decoding ignores is dropped unread."""
    filled = replace(
        raw,
        max_new_tokens=raw.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        repetition_penalty=raw.repetition_penalty or 1.0,
    )
    if not raw.do_sample:
        return replace(filled, temperature=0.0, top_k=0, top_p=1.0, typical_p=0.0, seed=None)
    temperature = 1.0 if raw.temperature is None else raw.temperature
    return replace(filled, temperature=temperature, top_p=raw.top_p or 1.0)


def _float_fields(p: RawParams) -> Iterator[tuple[str, float]]:
    yield "params.sampling.temperature", p.temperature or 0.0
    yield "params.sampling.top_p", p.top_p
    yield "params.sampling.typical_p", p.typical_p
    yield "params.decoding.repetition_penalty", p.repetition_penalty
    if p.length_penalty:
        yield "params.decoding.length_penalty.decay_factor", p.length_penalty[1]


def _resolved(p: RawParams, limits: RequestLimits, now: float) -> ResolvedParams:
    assert p.temperature is not None
    greedy = p.temperature == 0.0
    sampling = SamplingParams(
        temperature=p.temperature,
        top_k=0 if greedy else p.top_k,
        top_p=1.0 if greedy else p.top_p,
        typical_p=1.0 if greedy or p.typical_p <= 0.0 else p.typical_p,
        repetition_penalty=p.repetition_penalty,
        length_penalty=p.length_penalty,
        min_new_tokens=p.min_new_tokens,
    )
    include = p.include_stop_sequence
    return ResolvedParams(
        sampling_params=sampling,
        seed=p.seed,
        max_new_tokens=p.max_new_tokens,
        deadline=now + p.time_limit_millis / 1000 if p.time_limit_millis else None,
        stop_sequences=p.stop_sequences,
        include_stop_sequence=limits.include_stop_sequence if include is None else include,
        input_text=p.input_text,
        logprob_options=p.logprob_options,
        truncate_input_tokens=p.truncate_input_tokens,
    )


def _with_seed(params: ResolvedParams) -> SamplingParams:
    """The request's seed for every input of the call, else a seed of 32 bits for each."""
    sampling = params.sampling_params
    if sampling.greedy:
        return sampling
    seed = secrets.randbits(32) if params.seed is None else params.seed
    return SamplingParams(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.typical_p,
        seed,
        sampling.repetition_penalty,
        sampling.length_penalty,
        sampling.min_new_tokens,
    )


def _last_segment(path: str) -> str:
    return path.rpartition(".")[2]


def _details_without_tokens(p: RawParams, _: RequestLimits) -> bool:
    wanted = p.logprob_options.logprobs or p.logprob_options.ranks or p.logprob_options.top_n_tokens > 0
    return wanted and not (p.logprob_options.generated_tokens or p.logprob_options.input_tokens)


def _has_invalid_stop_sequence(p: RawParams, _: RequestLimits) -> bool:
    return any(not s or len(s.encode()) > MAX_STOP_SEQUENCE_BYTES for s in p.stop_sequences)


_STOP_SEQUENCES_MESSAGE = (
    f"can specify at most {MAX_STOP_SEQUENCES} non-empty stop sequences, "
    f"each not more than {MAX_STOP_SEQUENCE_BYTES} UTF8 bytes"
)

_RULES = (
    _Rule(
        "params.sampling.temperature",
        lambda p, _: p.temperature != 0.0 and p.temperature < 0.05,  # type: ignore[operator]
        "temperature must be >= 0.05, got {p.temperature:g}",
    ),
    _Rule(
        "params.sampling.top_p",
        lambda p, _: not 0.0 < p.top_p <= 1.0,
        "top_p must be > 0.0 and <= 1.0, got {p.top_p:g}",
    ),
    _Rule(
        "params.sampling.typical_p",
        lambda p, _: not 0.0 <= p.typical_p <= 1.0,
        "typical_p must be >= 0.0 and <= 1.0, got {p.typical_p:g}",
    ),
    _Rule(
        "params.sampling.top_k",
        lambda p, _: p.top_k > _INT32_MAX,
        f"top_k must be <= {_INT32_MAX}, got {{p.top_k}}",
    ),
    _Rule(
        "params.stopping.max_new_tokens",
        lambda p, limits: p.max_new_tokens > limits.max_new_tokens,
        "max_new_tokens must be <= {limits.max_new_tokens}, got {p.max_new_tokens}",
    ),
    _Rule(
        "params.stopping.min_new_tokens",
        lambda p, _: p.min_new_tokens > p.max_new_tokens,
        "min_new_tokens must be <= max_new_tokens, got {p.min_new_tokens} and {p.max_new_tokens}",
    ),
    _Rule(
        "params.decoding.repetition_penalty",
        lambda p, _: p.repetition_penalty <= 0.0,
        "repetition_penalty must be > 0.0, got {p.repetition_penalty:g}",
    ),
    _Rule(
        "params.decoding.length_penalty.decay_factor",
        lambda p, _: p.length_penalty is not None and not 1.0 <= p.length_penalty[1] <= 10.0,
        "length_penalty must be >= 1.0 and <= 10.0, got {p.length_penalty[1]:g}",
    ),
    _Rule(
        "params.stopping.stop_sequences",
        lambda p, _: len(p.stop_sequences) > MAX_STOP_SEQUENCES,
        _STOP_SEQUENCES_MESSAGE,
    ),
    _Rule(
        "params.response",
        _details_without_tokens,
        "must request input and/or generated tokens to request extra token detail",
    ),
    _Rule(
        "params.response.top_n_tokens",
        lambda p, _: p.logprob_options.top_n_tokens > MAX_TOP_N_TOKENS,
        f"top_n_tokens must be <= {MAX_TOP_N_TOKENS}, got {{p.logprob_options.top_n_tokens}}",
    ),
    _Rule("params.stopping.stop_sequences", _has_invalid_stop_sequence, _STOP_SEQUENCES_MESSAGE),
)
