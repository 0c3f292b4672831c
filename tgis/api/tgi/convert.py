"""Checks TGI's requests, and converts between its bodies and the values of the front end."""

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET

from tgis.api.tgi.schema import (
    BestOfSequence,
    Details,
    FinishReason,
    GenerateParameters,
    Grammar,
    PrefillToken,
    SimpleToken,
    StreamDetails,
    Token,
)
from tgis.config import Config
from tgis.errors import InvalidRequest
from tgis.frontend.detokenizer import Detokenizer
from tgis.frontend.generation import Generator
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.params import Constraints, Params
from tgis.frontend.tokenizer import Encoding
from tgis.frontend.validation import RequestLimits
from tgis.ipc.lookups import GrammarKind, GrammarSpec
from tgis.ipc.request import LogprobOptions, StopReason

MAX_SEED = 2**64 - 1
MAX_STOP_SEQUENCE_BYTES = 1000
_SLICED_ROOM = 1024  # more new tokens than this need not fit behind the input
_FINISH_REASONS: dict[StopReason, FinishReason] = {
    StopReason.EOS_TOKEN: "eos_token",
    StopReason.STOP_SEQUENCE: "stop_sequence",
}

D = TypeVar("D", Details, BestOfSequence)


def check(given: GenerateParameters, config: Config, max_input: int, *, streams: bool) -> None:
    """InvalidRequest for the first violation of what only TGI demands, in its order; see also `schema.py`."""
    best_of, stops = given.best_of or 1, len(given.stop) + len(given.stop_sequences)
    most, max_stops = config.max_best_of, config.max_stop_sequences
    for field, violated, message in (
        (
            "best_of",
            streams and given.best_of not in (None, 1),
            "`best_of` != 1 is not supported when streaming tokens",
        ),
        (
            "decoder_input_details",
            streams and given.decoder_input_details,
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
        ("best_of", best_of > most, f"`best_of` must be > 0 and <= {most}. Given: {given.best_of}"),
        ("best_of", best_of > 1 and not given.asks_for_sampling, "you must use sampling when `best_of` is > 1"),
        ("stop_sequences", stops > max_stops, f"`stop` supports up to {max_stops} stop sequences. Given: {stops}"),
        ("seed", best_of > 1 and given.seed is not None, "`seed` must not be set when `best_of` > 1"),
        ("seed", (given.seed or 0) > MAX_SEED, f"`seed` must be <= {MAX_SEED}"),
        (
            "truncate",
            (given.truncate or 0) > max_input,
            f"`truncate` must be > 0 and <= {max_input}. Given: {given.truncate}",
        ),
    ):
        if violated:
            raise InvalidRequest(field, message)


def params(
    given: GenerateParameters, stop_token_ids: tuple[int, ...], *, details: bool, max_stop_sequences: int
) -> Params:
    """Parameters for the front end; with `details` the answer has something for each token. `stop_token_ids` are the
    special tokens among the stop sequences.
    """
    return Params.of(
        msgspec.structs.asdict(given),
        temperature=given.temperature if given.samples else 0.0,
        stop_sequences=(*given.stop, *given.stop_sequences),
        stop_token_ids=stop_token_ids,
        include_stop_sequence=True,
        logprob_options=LogprobOptions(
            generated_tokens=details,
            input_tokens=given.decoder_input_details,
            logprobs=details or given.decoder_input_details,
            top_n_tokens=given.top_n_tokens or 0,
            exact_top_n=True,
        ),
        ignore_eos=given.ignore_eos_token,
        truncate_input_tokens=given.truncate,
        grammar=_grammar(given.grammar) if given.grammar else None,
        fill_context=True,
        skip_special_tokens=True,
        constraints=Constraints(
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("grammar", f"`grammar` {given.type}: {error}") from None


def finish_reason(
    output: RequestOutput, num_input_tokens: int, given: GenerateParameters, limits: RequestLimits
) -> FinishReason:
    """`length` if no more tokens were possible, even if the last one would have ended the output."""
    room = limits.max_sequence_length - num_input_tokens
    if output.generated_token_count >= min(given.max_new_tokens or limits.max_new_tokens, room):
        return "length"
    if output.tokens and output.tokens[-1].text in (*given.stop, *given.stop_sequences):  # a special token
        return "stop_sequence"
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


def details(kind: type[D], output: RequestOutput, given: GenerateParameters, generator: Generator, **more: Any) -> D:
    """What is known about a whole output; `more` are fields that only this kind has."""
    convert = TokenConverter(generator)
    return kind(
        finish_reason=finish_reason(output, output.input_token_count, given, generator.server_info.limits),
        generated_tokens=output.generated_token_count,
        seed=output.seed if given.samples else None,
        prefill=[convert.prefill_token(info) for info in _prefill(output, given, generator)],
        tokens=[convert.token(info) for info in output.tokens],
        top_tokens=[convert.top_tokens(info) for info in output.tokens] if given.top_n_tokens else UNSET,
        **more,
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


def tokens_json(text: bytes, encoding: Encoding) -> bytes:
    """The tokens of `text` in UTF-8, of which a token may be a part that is no text."""
    tokens = (
        SimpleToken(id_, text[start:stop].decode(errors="replace"), start, stop)
        for id_, (start, stop) in zip(encoding.packed_ids, encoding.offsets, strict=True)
    )
    return msgspec.json.encode(list(tokens))


def json_float(value: float) -> float | None:
    """The shortest number that is the same in single precision; None, which is null, if it is not finite."""
    return float(str(np.float32(value))) if math.isfinite(value) else None
