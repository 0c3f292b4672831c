"""Converts between TGI's bodies and the values of the front end."""

import math
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import msgspec
from msgspec import UNSET

from tgis.api.tgi.schema import (
    BestOfSequence,
    FinishReason,
    GenerateParameters,
    Grammar,
    PrefillToken,
    SimpleToken,
    StreamDetails,
    Token,
)
from tgis.errors import InvalidRequest
from tgis.frontend.detokenizer import Detokenizer
from tgis.frontend.generation import Generator, TokenizeResult
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.sampling_params import FaceRules, RawParams
from tgis.frontend.tokenizer import reply_too_large
from tgis.frontend.validation import RequestLimits
from tgis.ipc.grammars import GrammarKind, GrammarSpec
from tgis.ipc.request import LogprobOptions, StopReason
from tgis.utils.slices import Slicer

MAX_STOP_SEQUENCE_BYTES = 1000
_SLICED_ROOM = 1024  # more new tokens than this need not fit behind the input
_SINGLE = struct.Struct("f")
_FINISH_REASONS: dict[StopReason, FinishReason] = {
    StopReason.EOS_TOKEN: "eos_token",
    StopReason.STOP_SEQUENCE: "stop_sequence",
}

T = TypeVar("T")
J = TypeVar("J")


def raw_params(given: GenerateParameters, *, details: bool, max_stop_sequences: int) -> RawParams:
    """Parameters for the front end; with `details` the answer has something for each token."""
    options = LogprobOptions(
        generated_tokens=details,
        input_tokens=given.decoder_input_details,
        logprobs=details or given.decoder_input_details,
        top_n_tokens=given.top_n_tokens or 0,
    )
    return RawParams(
        do_sample=given.samples,
        temperature=given.temperature,
        top_k=given.top_k or 0,
        top_p=given.top_p or 0.0,
        typical_p=given.typical_p or 0.0,
        seed=given.seed,
        max_new_tokens=given.max_new_tokens or 0,
        stop_sequences=(*given.stop, *given.stop_sequences),
        include_stop_sequence=True,
        logprob_options=options,
        repetition_penalty=given.repetition_penalty or 0.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        watermark=given.watermark,
        ignore_eos=given.ignore_eos_token,
        truncate_input_tokens=given.truncate or 0,
        grammar=_grammar(given.grammar) if given.grammar else None,
        fill_context=True,
        skip_special_tokens=True,
        rules=FaceRules(
            min_temperature=0.0,
            max_stop_sequences=max_stop_sequences,
            max_stop_sequence_bytes=MAX_STOP_SEQUENCE_BYTES,
            min_room=_SLICED_ROOM,
        ),
    )


class _NamedSchema(msgspec.Struct):
    schema: msgspec.Raw


def _grammar(given: Grammar) -> GrammarSpec:
    """A schema may be JSON or a text that has it."""
    try:
        if given.type == "regex":
            return GrammarSpec(GrammarKind.REGEX, msgspec.json.decode(given.value, type=str))
        named = given.type == "json_schema"
        text = bytes(msgspec.json.decode(given.value, type=_NamedSchema).schema if named else given.value).decode()
        return GrammarSpec(GrammarKind.JSON_SCHEMA, msgspec.json.decode(text) if text.startswith('"') else text)
    except msgspec.DecodeError as error:
        raise InvalidRequest("grammar", f"`grammar` {given.type}: {error}") from None


def finish_reason(
    output: RequestOutput, num_input_tokens: int, given: GenerateParameters, limits: RequestLimits
) -> FinishReason:
    """`length` if no more tokens were possible, even if the last one would have ended the output."""
    room = limits.max_sequence_length - num_input_tokens
    if output.generated_token_count >= min(given.max_new_tokens or limits.max_new_tokens, room):
        return "length"
    return _FINISH_REASONS.get(output.stop_reason, "length")


class TokenConverter:
    """The tokens of one output, in order: their texts depend on those before."""

    def __init__(self, generator: Generator) -> None:
        self._tokenizer = generator.token_decoder.tokenizer
        self._detokenizer = Detokenizer(generator.token_decoder)

    def token(self, info: TokenInfo) -> Token:
        """The token with the text that it completes; special tokens literally."""
        text = self._detokenizer.add(info.id)
        return Token(info.id, text, json_float(info.logprob), self._tokenizer.is_special(info.id))

    def top_tokens(self, info: TokenInfo) -> list[Token]:
        """Candidates, the most probable first; each with its text alone."""
        ordered = sorted(info.top_tokens, key=lambda top: -top[2])
        return [
            Token(id_, self._text(id_), json_float(logprob), self._tokenizer.is_special(id_))
            for id_, _, logprob in ordered
        ]

    def prefill_token(self, info: TokenInfo) -> PrefillToken:
        return PrefillToken(info.id, self._text(info.id), json_float(info.logprob))

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


async def sequence(output: RequestOutput, given: GenerateParameters, generator: Generator, text: str) -> BestOfSequence:
    """A whole output with its details."""
    convert, slicer, cost = TokenConverter(generator), generator.slicer, output.details_per_token
    prefill = await _encoded(_prefill(output, given, generator), convert.prefill_token, slicer, cost)
    return BestOfSequence(
        generated_text=text,
        finish_reason=finish_reason(output, output.input_token_count, given, generator.server_info.limits),
        generated_tokens=output.generated_token_count,
        seed=output.seed if given.samples else None,
        prefill=prefill,
        tokens=await _encoded(output.tokens, convert.token, slicer),
        top_tokens=await _encoded(output.tokens, convert.top_tokens, slicer, cost) if given.top_n_tokens else UNSET,
    )


def _prefill(output: RequestOutput, given: GenerateParameters, generator: Generator) -> Iterable[TokenInfo]:
    """The tokens that the output follows: the input, or the first token of the decoder of an encoder-decoder."""
    start = generator.server_info.engine.decoder_start_token_id
    if start is None or not given.decoder_input_details:
        return output.input_tokens
    return [TokenInfo(start, "", math.nan, 0, [])]


def stream_details(
    output: RequestOutput, num_input_tokens: int, given: GenerateParameters, limits: RequestLimits
) -> StreamDetails:
    reason = finish_reason(output, num_input_tokens, given, limits)
    return StreamDetails(reason, output.generated_token_count, output.seed if given.samples else None, num_input_tokens)


def min_simple_token_bytes(start: int) -> int:
    """The smallest encoding of a token that begins at this byte or later."""
    return len(msgspec.json.encode(SimpleToken(0, "", start, start)))


async def simple_tokens(text: bytes, result: TokenizeResult, slicer: Slicer, max_bytes: int) -> Sequence[SimpleToken]:
    """`text` in UTF-8, of which a token may be a part that is no text; InvalidRequest if they have more bytes."""

    def convert(token: tuple[int, tuple[int, int]]) -> SimpleToken:
        id_, (start, stop) = token
        return SimpleToken(id_, text[start:stop].decode(errors="replace"), start, stop)

    return await _encoded(zip(result.ids, result.offsets, strict=True), convert, slicer, max_bytes=max_bytes)


def json_float(value: float) -> float | None:
    """The shortest number that is the same in single precision; None, which is null, if it is not finite."""
    if not math.isfinite(value):
        return None
    single = _SINGLE.pack(value)
    (value,) = _SINGLE.unpack(single)  # the digits of a number between two of them may be those of the other
    return next(short for digits in range(6, 10) if _SINGLE.pack(short := float(f"{value:.{digits}g}")) == single)


async def _encoded(
    items: Iterable[T], convert: Callable[[T], J], slicer: Slicer, cost: int = 1, max_bytes: int = sys.maxsize
) -> Sequence[J]:
    """A list that is JSON already: there may be many items, and an iteration of the loop does only some."""
    parts, num_bytes = list[bytes](), 0
    async for some in slicer.slices(items, cost):
        parts.append(msgspec.json.encode([convert(item) for item in some])[1:-1])
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise reply_too_large(max_bytes)
    return cast("Sequence[J]", msgspec.Raw(b"[" + b",".join(parts) + b"]"))
