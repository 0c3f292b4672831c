"""Rules for the parameters and inputs of a call. Pure functions.

The rules stand in one table and are checked from top to bottom; the first violation fails the call. TGIS's rules come
first, with its texts, so that what it refuses is refused with the same message. Fields have neutral names here: an API
maps them to its own paths.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgis.errors import InvalidRequest, TooLong
from tgis.frontend.params import Params
from tgis.ipc.lookups import AdapterRef, GrammarKind, GrammarSpec
from tgis.ipc.request import Request

MAX_OUTPUT_PENALTY = 2.0  # frequency and presence penalty, up and down
MAX_LOGIT_BIASES = 300
MAX_LOGIT_BIAS = 100.0
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_BYTES = 2048  # together
UNLIMITED = 1 << 40
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the server allows a request."""

    max_sequence_length: int  # input and output
    max_new_tokens: int
    include_stop_sequence: bool  # default if the request does not say
    default_max_new_tokens: int | None = 20  # likewise; None: all that fits
    max_top_n_tokens: int = 10
    max_grammar_bytes: int = 1 << 16
    placeholder_id: int = 0  # the token that stands for each virtual token of a soft prompt
    max_request_tokens: int = UNLIMITED  # input and output that fit into memory
    max_positions: int = UNLIMITED  # positions of an input, and of an output, whatever the memory
    input_vocab_size: int = UNLIMITED  # ids that the model knows; its tokenizer may have more
    vocab_size: int = UNLIMITED  # width of the logits
    max_input_tokens: int | None = None  # None: one less than the maximum sequence length

    @property
    def longest_input(self) -> int:
        return self.max_input_tokens or self.max_sequence_length - 1


_Rule = tuple[str, bool, str, float | str]


def validate(params: Params, limits: RequestLimits) -> None:
    """Fill in the server's defaults and check the parameters; InvalidRequest names the field of the first violation."""
    default = None if params.fill_context else limits.default_max_new_tokens
    params.fill_context = default is None and not params.max_new_tokens
    params.max_new_tokens = params.max_new_tokens or default or limits.max_new_tokens
    if params.include_stop_sequence is None:
        params.include_stop_sequence = limits.include_stop_sequence
    for field, violated, message, value in _rules(params, limits):
        if violated:
            raise InvalidRequest(field, message, f"{value:g}" if isinstance(value, float) else str(value))
    sampling = params.sampling
    if sampling.logit_bias:
        _check_logit_bias(sampling.logit_bias, limits)
    _check_token_ids("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS, limits)
    _check_token_ids("allowed_token_ids", sampling.allowed_token_ids or (), MAX_ALLOWED_TOKEN_IDS, limits)
    if params.grammar:
        _check_grammar(params.grammar, limits.max_grammar_bytes)
    if sampling.greedy:
        params.sampling = sampling.without_filters()


def _check_logit_bias(logit_bias: Mapping[int, float], limits: RequestLimits) -> None:
    _check_token_ids("logit_bias", logit_bias, MAX_LOGIT_BIASES, limits)
    for bias in logit_bias.values():
        if not abs(bias) <= MAX_LOGIT_BIAS:
            text = f"logit_bias must have biases from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            raise InvalidRequest("logit_bias", text, f"{bias:g}")


def _check_token_ids(field: str, ids: Collection[int], most: int, limits: RequestLimits) -> None:
    if len(ids) > most:
        raise InvalidRequest(field, f"{field} must have at most {most} tokens", str(len(ids)))
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequest(field, f"{field} must have token ids below {limits.vocab_size}", str(token))


def check_num_bytes(
    texts: Sequence[str], fields: Sequence[str], limits: RequestLimits, max_bytes_per_token: int | None
) -> None:
    """Refuse texts before they are tokenized if they have more bytes than any input can have."""
    if max_bytes_per_token is None:
        return
    most = limits.max_sequence_length * max_bytes_per_token
    for text, field in zip(texts, fields, strict=True):
        if 4 * len(text) > most and (size := len(text.encode())) > most:
            reason = f"{field} has {size} bytes, at most {most} fit into any input"
            raise TooLong(field, reason, limits.max_sequence_length)


def make_request(
    tokens: list[int],
    adapter: AdapterRef | None,
    params: Params,
    limits: RequestLimits,
    field: str,
    *,
    length: int = 0,
    identity: bytes = b"",
    **more: Any,
) -> Request:
    """Check the length of one input and limit its output to what the maximum sequence length leaves.

    InvalidRequest for what can never run: it would wait for ever. Of an input that is too long, `tokens` may be only
    a part, and `length` is how many it has. `more` are the other fields of the request.
    """
    length = length or len(tokens)
    prefix_length = adapter.length if adapter else 0
    _check_lengths(length, prefix_length, params, limits, field)
    if (largest := max(tokens)) >= limits.input_vocab_size:
        text = f"{field} gives token id {largest}, the model has only those below {limits.input_vocab_size}"
        raise InvalidRequest(field, text)
    max_new_tokens = _max_new_tokens(length + prefix_length, adapter, params, limits)
    request = Request(
        tokens=[limits.placeholder_id] * prefix_length + tokens,
        max_new_tokens=max_new_tokens,
        limited_by_context=params.fill_context or max_new_tokens < params.max_new_tokens,
        logprob_options=params.logprob_options,
        cache_salt=identity + (adapter.version.to_bytes(8) if adapter else b""),
        adapter=adapter,
        **more,
    )
    _check_capacity(request, limits, field)
    return request


def _check_lengths(length: int, prefix_length: int, params: Params, limits: RequestLimits, field: str) -> None:
    """InvalidRequest unless an input leaves room for the output that is wanted."""
    max_length = limits.max_sequence_length
    min_new_tokens, max_new_tokens = params.sampling.min_new_tokens, params.max_new_tokens
    if not length:
        raise InvalidRequest(field, f"{field} gives no token")
    lengths = f"input tokens ({length}) plus prefix length ({prefix_length})"
    room = max_length - length - prefix_length
    if room <= 0:
        raise TooLong(field, f"{lengths} must be < {max_length}", max_length)
    if min_new_tokens > room:
        text = f"{lengths} plus min_new_tokens ({min_new_tokens}) must be <= {max_length}"
        raise TooLong(field, text, max_length)
    if min(max_new_tokens, params.constraints.min_room) > room and not params.fill_context:
        text = f"{lengths} plus max_new_tokens ({max_new_tokens}) must be <= {max_length}"
        raise TooLong(field, text, max_length)
    if limits.max_input_tokens is not None and length > limits.max_input_tokens:
        text = f"{field} has {length} tokens, at most {limits.max_input_tokens} allowed"
        raise TooLong(field, text, max_length)


def _max_new_tokens(length: int, adapter: AdapterRef | None, params: Params, limits: RequestLimits) -> int:
    """The new tokens asked for, as far as they fit; with `fill_context`, or a `min_room` of 0, also limited to what can
    run, if enough.
    """
    max_new_tokens = min(params.max_new_tokens, limits.max_sequence_length - length)
    if not params.fill_context and params.constraints.min_room:
        return max_new_tokens
    decoder_length = adapter.decoder_length if adapter else 0
    fits = min(limits.max_request_tokens - length, limits.max_positions - decoder_length)
    return max(min(max_new_tokens, fits), params.sampling.min_new_tokens, 1)


def _check_capacity(request: Request, limits: RequestLimits, field: str) -> None:
    size = len(request.tokens) + request.max_new_tokens
    if size > limits.max_request_tokens:
        text = f"input and new tokens ({size}) are more than fit into memory ({limits.max_request_tokens})"
        raise InvalidRequest(field, text)
    if (most := limits.max_positions) < UNLIMITED and max(request.input_positions, request.output_positions) > most:
        text = f"input tokens ({request.input_positions}) and new tokens ({request.output_positions})"
        raise InvalidRequest(field, f"{text} must each be <= {limits.max_positions} for this model")


def _check_grammar(grammar: GrammarSpec, max_bytes: int) -> None:
    kind, size = grammar.kind, grammar.num_bytes
    if kind is GrammarKind.CHOICE and len(grammar.choices) < 2:
        raise InvalidRequest(kind, "must provide at least two choices", str(len(grammar.choices)))
    if not size and kind is not GrammarKind.JSON_OBJECT:
        raise InvalidRequest(kind, f"{kind} must not be empty")
    if size + len(grammar.after_thought) > max_bytes:
        raise InvalidRequest(kind, f"{kind} has {size} bytes, at most {max_bytes} allowed")


def _rules(params: Params, limits: RequestLimits) -> tuple[_Rule, ...]:
    """All rules for parameters with defaults: the field, whether it is violated, the error, and the offending value."""
    p, constraints, options = params.sampling, params.constraints, params.logprob_options
    decay = p.length_penalty[1] if p.length_penalty else 1.0
    stop_sequences = (
        f"can specify at most {constraints.max_stop_sequences} non-empty stop sequences, "
        f"each not more than {constraints.max_stop_sequence_bytes} UTF8 bytes"
    )
    stop_bytes = len("".join(params.stop_sequences).encode())
    no_tokens = not (options.generated_tokens or options.input_tokens)
    no_details = "must request input and/or generated tokens to request extra token detail"
    penalty = f"must be >= -{MAX_OUTPUT_PENALTY} and <= {MAX_OUTPUT_PENALTY}"
    max_top_n_tokens = limits.max_top_n_tokens if constraints.max_top_n_tokens is None else constraints.max_top_n_tokens
    wrong_length = [s for s in params.stop_sequences if not s or len(s.encode()) > constraints.max_stop_sequence_bytes]
    num_words, size = len(params.bad_words), len("".join(params.bad_words).encode())
    penalties = {name: getattr(p, name) for name in ("frequency_penalty", "presence_penalty")}
    floats = {name: getattr(p, name) for name in ("temperature", "top_p", "typical_p", "repetition_penalty")}
    return (
        (
            "temperature",
            p.temperature != 0.0 and p.temperature < constraints.min_temperature,
            f"temperature must be >= {constraints.min_temperature:g}",
            p.temperature,
        ),
        ("top_p", p.top_p <= 0.0 or p.top_p > 1.0, "top_p must be > 0.0 and <= 1.0", p.top_p),
        ("typical_p", p.typical_p > 1.0, "typical_p must be <= 1.0", p.typical_p),
        ("top_k", p.top_k > _INT32_MAX, "top_k must be strictly positive", p.top_k),
        (
            "max_new_tokens",
            params.max_new_tokens > limits.max_new_tokens,
            f"max_new_tokens must be <= {limits.max_new_tokens}",
            params.max_new_tokens,
        ),
        (
            "min_new_tokens",
            p.min_new_tokens > params.max_new_tokens,
            "min_new_tokens must be <= max_new_tokens",
            f"{p.min_new_tokens} and {params.max_new_tokens}",
        ),
        ("repetition_penalty", p.repetition_penalty <= 0.0, "repetition_penalty must be > 0.0", p.repetition_penalty),
        ("decay_factor", not 1.0 <= decay <= 10.0, "length_penalty must be >= 1.0 and <= 10.0", decay),
        ("stop_sequences", len(params.stop_sequences) > constraints.max_stop_sequences, stop_sequences, ""),
        ("logprob_options", no_tokens and (options.wants_details or params.token_ids), no_details, ""),
        ("stop_sequences", bool(wrong_length), stop_sequences, ""),
        # TGIS lets the following through.
        ("typical_p", p.typical_p < 0.0, "typical_p must be >= 0.0", p.typical_p),
        (
            "top_n_tokens",
            options.top_n_tokens > max_top_n_tokens,
            f"top_n_tokens must be <= {max_top_n_tokens}",
            options.top_n_tokens,
        ),
        # TGIS has no such parameters or limits.
        (
            "stop_sequences",
            stop_bytes > constraints.max_stop_bytes,
            f"stop_sequences must have at most {constraints.max_stop_bytes} UTF8 bytes in all",
            stop_bytes,
        ),
        *[(name, not abs(one) <= MAX_OUTPUT_PENALTY, f"{name} {penalty}", one) for name, one in penalties.items()],
        ("min_p", not 0.0 <= p.min_p <= 1.0, "min_p must be >= 0.0 and <= 1.0", p.min_p),
        ("allowed_token_ids", p.allowed_token_ids == (), "allowed_token_ids must not be empty", ""),
        ("bad_words", num_words > MAX_BAD_WORDS, f"bad_words must be at most {MAX_BAD_WORDS}", num_words),
        ("bad_words", size > MAX_BAD_WORDS_BYTES, f"bad_words must have <= {MAX_BAD_WORDS_BYTES} UTF8 bytes", size),
        ("bad_words", not all(map(str.strip, params.bad_words)), "bad_words must not be blank", ""),
        *[(name, not math.isfinite(number), f"{name} must be finite", number) for name, number in floats.items()],
    )
