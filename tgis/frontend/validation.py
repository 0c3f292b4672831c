"""Parameters of a call: defaults, rules and effective values. Pure functions; texts and numbers only.

The rules stand in one table and are checked from top to bottom; the first that fails ends the call.
"""

import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tgis.errors import InvalidRequest, Unimplemented
from tgis.ipc.adapters import Prefix
from tgis.ipc.messages import Details, Request, Sampling

DEFAULT_MAX_NEW_TOKENS = 20
MAX_STOP_SEQUENCES = 6
MAX_STOP_SEQUENCE_BYTES = 240
MAX_TOP_N_TOKENS = 10
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server allows: `sequence_length` counts input and output, `new_tokens` output."""

    sequence_length: int
    new_tokens: int
    include_stop_sequence: bool  # where the request does not say
    placeholder: int = 0  # the token that stands for each one of a soft prompt


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a call asks for, as it asks: zero is unset, None is absent."""

    sample: bool = False
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
    details: Details = field(default_factory=Details)
    repetition_penalty: float = 0.0
    length_penalty: tuple[int, float] | None = None  # start_index, decay_factor
    truncate_input_tokens: int = 0
    guided: str = ""  # the constraint on the output, if any


@dataclass(frozen=True, slots=True)
class Settings:
    """What every input of the call runs with, after defaults and rules."""

    sampling: Sampling
    seed: int | None  # as given; None draws one per input
    max_new_tokens: int
    deadline: float | None
    stop_sequences: tuple[str, ...]
    include_stop_sequence: bool
    input_text: bool
    details: Details
    truncate_input_tokens: int


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule about one field: `broken` tells whether it is, `text` is the message."""

    field: str
    broken: Callable[[Parameters, Limits], bool]
    text: str


def validate(asked: Parameters, limits: Limits) -> Settings:
    """Effective settings, or InvalidRequest for the first rule broken. The deadline starts now."""
    now = time.monotonic()
    if asked.guided:
        raise Unimplemented(f"params.decoding.{asked.guided}: guided decoding is not supported yet")
    filled = _with_defaults(asked)
    for name, value in _floats(filled):
        if not math.isfinite(value):
            raise InvalidRequest(name, f"{_last(name)} must be finite, got {value}")
    for rule in _RULES:
        if rule.broken(filled, limits):
            raise InvalidRequest(rule.field, rule.text.format(p=filled, limits=limits))
    return _settings(filled, limits, now)


def make_request(
    request_id: int,
    tokens: list[int],
    prefix: Prefix | None,
    settings: Settings,
    limits: Limits,
    field_name: str,
    identity: bytes = b"",
) -> Request:
    """One input of the call, its length checked and its output bounded by what the sequence length leaves."""
    length, most = len(tokens), limits.sequence_length
    prefix_length = prefix.length if prefix else 0
    minimum = settings.sampling.min_new_tokens
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
        tokens=[limits.placeholder] * prefix_length + tokens,
        max_new_tokens=min(settings.max_new_tokens, room),
        capped=settings.max_new_tokens > room,
        sampling=_seeded(settings),
        details=settings.details,
        deadline=settings.deadline,
        cache_salt=identity + (prefix.version.to_bytes(8) if prefix else b""),
        prefix=prefix,
    )


def _with_defaults(asked: Parameters) -> Parameters:
    """Zero means the default; what greedy decoding ignores is dropped unread."""
    filled = replace(
        asked,
        max_new_tokens=asked.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        repetition_penalty=asked.repetition_penalty or 1.0,
    )
    if not asked.sample:
        return replace(filled, temperature=0.0, top_k=0, top_p=1.0, typical_p=0.0, seed=None)
    temperature = 1.0 if asked.temperature is None else asked.temperature
    return replace(filled, temperature=temperature, top_p=asked.top_p or 1.0)


def _floats(p: Parameters) -> Iterator[tuple[str, float]]:
    yield "params.sampling.temperature", p.temperature or 0.0
    yield "params.sampling.top_p", p.top_p
    yield "params.sampling.typical_p", p.typical_p
    yield "params.decoding.repetition_penalty", p.repetition_penalty
    if p.length_penalty:
        yield "params.decoding.length_penalty.decay_factor", p.length_penalty[1]


def _settings(p: Parameters, limits: Limits, now: float) -> Settings:
    assert p.temperature is not None
    greedy = p.temperature == 0.0
    sampling = Sampling(
        temperature=p.temperature,
        top_k=0 if greedy else p.top_k,
        top_p=1.0 if greedy else p.top_p,
        typical_p=1.0 if greedy or p.typical_p <= 0.0 else p.typical_p,
        repetition_penalty=p.repetition_penalty,
        length_penalty=p.length_penalty,
        min_new_tokens=p.min_new_tokens,
    )
    include = p.include_stop_sequence
    return Settings(
        sampling=sampling,
        seed=p.seed,
        max_new_tokens=p.max_new_tokens,
        deadline=now + p.time_limit_millis / 1000 if p.time_limit_millis else None,
        stop_sequences=p.stop_sequences,
        include_stop_sequence=limits.include_stop_sequence if include is None else include,
        input_text=p.input_text,
        details=p.details,
        truncate_input_tokens=p.truncate_input_tokens,
    )


def _seeded(settings: Settings) -> Sampling:
    """The request's seed for every input of the call, else a seed of 32 bits for each."""
    sampling = settings.sampling
    if sampling.greedy:
        return sampling
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    return Sampling(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.typical_p,
        seed,
        sampling.repetition_penalty,
        sampling.length_penalty,
        sampling.min_new_tokens,
    )


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _detail_without_list(p: Parameters, _: Limits) -> bool:
    wanted = p.details.logprobs or p.details.ranks or p.details.top_n > 0
    return wanted and not (p.details.generated or p.details.inputs)


def _bad_stop_sequence(p: Parameters, _: Limits) -> bool:
    return any(not s or len(s.encode()) > MAX_STOP_SEQUENCE_BYTES for s in p.stop_sequences)


_STOP_TEXT = (
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
        lambda p, limits: p.max_new_tokens > limits.new_tokens,
        "max_new_tokens must be <= {limits.new_tokens}, got {p.max_new_tokens}",
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
        _STOP_TEXT,
    ),
    _Rule(
        "params.response",
        _detail_without_list,
        "must request input and/or generated tokens to request extra token detail",
    ),
    _Rule(
        "params.response.top_n_tokens",
        lambda p, _: p.details.top_n > MAX_TOP_N_TOKENS,
        f"top_n_tokens must be <= {MAX_TOP_N_TOKENS}, got {{p.details.top_n}}",
    ),
    _Rule("params.stopping.stop_sequences", _bad_stop_sequence, _STOP_TEXT),
)
