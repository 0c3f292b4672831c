"""Checks TGI requests, and converts between their bodies and the values of the front end."""

import ctypes
import math

import msgspec
from msgspec import UNSET, UnsetType

from tgis.api.http.calls import HttpCall
from tgis.api.openai.grammars import format_grammar
from tgis.api.tgi.schema import Details, FinishReason, GenerateParameters, Token
from tgis.errors import InvalidRequest
from tgis.frontend.detokenizer import Detokenizer
from tgis.frontend.generation import Generator
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.params import Constraints, Params
from tgis.frontend.validation import RequestLimits
from tgis.ipc.request import LogprobOptions, StopReason

MAX_SEED = 2**64 - 1
MAX_STOP_SEQUENCE_BYTES = 1000
# If more new tokens are asked for, they may exceed the context.
_SLICED_ROOM = 1024
_FINISH_REASONS: dict[StopReason, FinishReason] = {
    StopReason.EOS_TOKEN: "eos_token",
    StopReason.STOP_SEQUENCE: "stop_sequence",
}


def check(given: GenerateParameters, call: HttpCall, *, streams: bool) -> None:
    """Raise InvalidRequest for the first violation of TGI's own rules, in its order; see also `schema.py`."""
    best_of, most = given.best_of or 1, call.config.max_best_of
    num_stops, max_stops = len(given.stop), call.config.max_stop_sequences
    max_input = call.generator.server_info.limits.longest_input
    not_in_streams = "is not supported when streaming tokens"
    rules = {
        f"`best_of` != 1 {not_in_streams}": streams and given.best_of not in (None, 1),
        f"`decoder_input_details` == true {not_in_streams}": streams and given.decoder_input_details,
        f"`best_of` must be > 0 and <= {most}. Given: {best_of}": best_of > most,
        "you must use sampling when `best_of` is > 1": best_of > 1 and not given.samples and given.temperature is None,
        f"`stop` supports up to {max_stops} stop sequences. Given: {num_stops}": num_stops > max_stops,
        "`seed` must not be set when `best_of` > 1": best_of > 1 and given.seed is not None,
        f"`seed` must be <= {MAX_SEED}": (given.seed or 0) > MAX_SEED,
        f"`truncate` must be > 0 and <= {max_input}. Given: {given.truncate}": (given.truncate or 0) > max_input,
    }
    for message, violated in rules.items():
        if violated:
            raise InvalidRequest("parameters", message)


def params(given: GenerateParameters, call: HttpCall, *, details: bool) -> Params:
    """Parameters for the front end; `details` reports every token."""
    return Params.of(
        msgspec.structs.asdict(given),
        temperature=given.temperature if given.samples else 0.0,
        stop_sequences=given.stop,
        stop_token_ids=call.generator.special_token_ids(given.stop),
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
        grammar=given.grammar and format_grammar("grammar", given.grammar.type, given.grammar.value),
        fill_context=True,
        skip_special_tokens=True,
        constraints=Constraints(
            min_temperature=0.0,
            max_stop_sequences=call.config.max_stop_sequences,
            max_stop_sequence_bytes=MAX_STOP_SEQUENCE_BYTES,
            min_room=_SLICED_ROOM,
        ),
    )


def finish_reason(
    output: RequestOutput, num_input_tokens: int, given: GenerateParameters, limits: RequestLimits
) -> FinishReason:
    """Return `length` if no more tokens were possible, even if the last one would have ended the output."""
    room = limits.max_sequence_length - num_input_tokens
    if output.generated_token_count >= min(given.max_new_tokens or limits.max_new_tokens, room):
        return "length"
    if output.tokens and output.tokens[-1].text in given.stop:  # a special token
        return "stop_sequence"
    return _FINISH_REASONS.get(output.stop_reason, "length")


class TokenConverter:
    """Converts the tokens of one output, in order: their texts depend on the previous ones."""

    def __init__(self, generator: Generator) -> None:
        self._tokenizer = generator.token_decoder.tokenizer
        self._detokenizer = Detokenizer(generator.token_decoder)

    def token(self, info: TokenInfo) -> Token:
        """Convert the next token; its text is what it completes, special tokens included."""
        text = self._detokenizer.add(info.id)
        return Token(info.id, text, json_float(info.logprob), self._tokenizer.is_special(info.id))

    def top_tokens(self, info: TokenInfo) -> list[Token]:
        """Candidates by decreasing probability, decoded separately."""
        ordered = sorted(info.top_tokens, key=lambda top: -top[2])
        return [self.lone_token(id_, logprob, self._tokenizer.is_special(id_)) for id_, _, logprob in ordered]

    def lone_token(self, token_id: int, logprob: float, special: bool | UnsetType = UNSET) -> Token:
        """Convert a token, decoded separately."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return Token(token_id, text, json_float(logprob), special)


def details(output: RequestOutput, given: GenerateParameters, generator: Generator) -> Details:
    """The details of a complete output."""
    convert = TokenConverter(generator)
    prompt = [(info.id, info.logprob) for info in output.input_tokens]
    decoder_start = generator.server_info.engine.decoder_start_token_id
    if decoder_start is not None and given.decoder_input_details:
        prompt = [(decoder_start, math.nan)]
    return Details(
        finish_reason=finish_reason(output, output.input_token_count, given, generator.server_info.limits),
        generated_tokens=output.generated_token_count,
        seed=output.seed if given.samples else None,
        prefill=[convert.lone_token(id_, logprob) for id_, logprob in prompt],
        tokens=[convert.token(info) for info in output.tokens],
        top_tokens=[convert.top_tokens(info) for info in output.tokens] if given.top_n_tokens else UNSET,
    )


def json_float(value: float) -> float | None:
    """Return the shortest number that is the same in single precision; None if it is not finite."""
    if not math.isfinite(value):
        return None
    single = ctypes.c_float(value).value
    numbers = (float(f"{single:.{digits}g}") for digits in range(6, 10))  # 9 digits are always enough
    return next(number for number in numbers if ctypes.c_float(number).value == single)
