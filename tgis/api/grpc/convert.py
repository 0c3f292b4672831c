"""Converts between proto messages and the values of the front end."""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from tgis.api.grpc import wire
from tgis.frontend.budget import Account
from tgis.frontend.calls import CallKind, GenerateCall, TokenizeCall
from tgis.frontend.generation import ServerInfo, TokenizeResult
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.sampling_params import RawParams
from tgis.frontend.tokenizer import ReplyLimit, reply_too_large
from tgis.ipc.grammars import GrammarKind, GrammarSpec
from tgis.ipc.request import LogprobOptions
from tgis.pb import generation_pb2 as pb
from tgis.utils.slices import Slicer

# Validation's name of a parameter -> its path in the message.
_FIELD_PATHS = {
    "temperature": "params.sampling.temperature",
    "top_k": "params.sampling.top_k",
    "top_p": "params.sampling.top_p",
    "typical_p": "params.sampling.typical_p",
    "max_new_tokens": "params.stopping.max_new_tokens",
    "min_new_tokens": "params.stopping.min_new_tokens",
    "stop_sequences": "params.stopping.stop_sequences",
    "repetition_penalty": "params.decoding.repetition_penalty",
    "decay_factor": "params.decoding.length_penalty.decay_factor",
    "frequency_penalty": "params.decoding.frequency_penalty",
    "presence_penalty": "params.decoding.presence_penalty",
    "logit_bias": "params.decoding.logit_bias",
    "logprob_options": "params.response",
    "top_n_tokens": "params.response.top_n_tokens",
    "json_object": "params.decoding.format",
    "json_schema": "params.decoding.json_schema",
    "regex": "params.decoding.regex",
    "choice": "params.decoding.choice",
    "grammar": "params.decoding.grammar",
}

_RESPONSES = wire.tags(pb.BatchedGenerationResponse)["responses"]
assert wire.tags(pb.BatchedTokenizeResponse)["responses"] == _RESPONSES
_GENERATION, _TOKENIZATION = wire.tags(pb.GenerationResponse), wire.tags(pb.TokenizeResponse)
_OFFSET = wire.tags(pb.TokenizeResponse.Offset)
_TOKEN = wire.tags(pb.TokenInfo)
assert wire.tags(pb.TokenInfo.TopToken).items() <= _TOKEN.items()
_OUTPUT_COST = 8  # units of a slice, without tokens
_BYTES_PER_SLICE_UNIT = 4096  # to copy

IsSpecial = Callable[[int], bool]  # of a token id; None where ids are not wanted
HasAdapter = pb.BatchedGenerationRequest | pb.SingleGenerationRequest | pb.BatchedTokenizeRequest


def generate_call(
    message: pb.BatchedGenerationRequest,
    account: Account,
    identity: bytes,
    correlation_id: str | None,
    answer_deadline: float | None,
) -> GenerateCall:
    texts = [request.text for request in message.requests]
    return GenerateCall(
        kind=CallKind.SINGLE if len(texts) == 1 else CallKind.BATCH,
        texts=texts,
        fields=[f"requests[{index}].text" for index in range(len(texts))],
        params=raw_params(message.params),
        account=account,
        identity=identity,
        adapter=_adapter(message),
        correlation_id=correlation_id,
        answer_deadline=answer_deadline,
    )


def generate_stream_call(
    message: pb.SingleGenerationRequest, account: Account, identity: bytes, correlation_id: str | None
) -> GenerateCall:
    return GenerateCall(
        kind=CallKind.STREAM,
        texts=[message.request.text] if message.HasField("request") else [],
        fields=["request.text"],
        params=raw_params(message.params),
        account=account,
        identity=identity,
        adapter=_adapter(message),
        correlation_id=correlation_id,
    )


def raw_params(params: pb.Parameters) -> RawParams:
    fields = wire.set_fields(params)
    sampling, stopping, response, decoding = (
        wire.set_fields(fields[name]) if name in fields else {}
        for name in ("sampling", "stopping", "response", "decoding")
    )
    penalty = decoding.get("length_penalty")
    return RawParams(
        do_sample=fields.get("method") == pb.SAMPLE,
        truncate_input_tokens=fields.get("truncate_input_tokens", 0),
        **sampling,  # same names
        **stopping | {"stop_sequences": tuple(stopping.get("stop_sequences", ()))},
        input_text=response.get("input_text", False),
        token_ids=response.get("token_ids", False),
        logprob_options=_logprob_options(response),
        repetition_penalty=decoding.get("repetition_penalty", 0.0),
        length_penalty=(penalty.start_index, penalty.decay_factor) if penalty is not None else None,
        frequency_penalty=decoding.get("frequency_penalty", 0.0),
        presence_penalty=decoding.get("presence_penalty", 0.0),
        logit_bias=dict(decoding.get("logit_bias", {})),
        watermark=decoding.get("watermark", False),
        grammar=_grammar(decoding),
    )


def field_path(field: str) -> str:
    """The proto path of the field of an InvalidRequest, which is a parameter or already a path."""
    return _FIELD_PATHS.get(field, field)


async def generate_reply(outputs: list[RequestOutput], slicer: Slicer, is_special: IsSpecial | None) -> bytes:
    """A serialized BatchedGenerationResponse."""
    parts = []
    async for some in slicer.slices(outputs, cost=_OUTPUT_COST):
        for output in some:
            response = await _generation_response(output, slicer, is_special)
            parts += [wire.message_header(_RESPONSES, response), *response]
    return await _joined(parts, slicer)


async def generation_response(output: RequestOutput, slicer: Slicer, is_special: IsSpecial | None) -> bytes:
    """A serialized GenerationResponse."""
    if _is_small(output):
        return _without_tokens(output) + _tokens(_GENERATION["tokens"], output.tokens, is_special)
    return await _joined(await _generation_response(output, slicer, is_special), slicer)


def _is_small(output: RequestOutput) -> bool:
    """As nearly all messages of streams are."""
    return not output.input_tokens and len(output.tokens) <= 1 and len(output.text) <= _BYTES_PER_SLICE_UNIT


async def _generation_response(output: RequestOutput, slicer: Slicer, is_special: IsSpecial | None) -> list[bytes]:
    """Its parts: concatenated messages are one with the fields of all."""
    parts = [_without_tokens(output)]
    for name, infos in ("tokens", output.tokens), ("input_tokens", output.input_tokens):
        async for some in slicer.slices(infos, cost=output.details_per_token):
            parts += [_tokens(_GENERATION[name], some, is_special)]
    return parts


def _without_tokens(output: RequestOutput) -> bytes:
    data = wire.integer(_GENERATION["generated_token_count"], output.generated_token_count)
    data += wire.string(_GENERATION["text"], output.text)
    if not (output.input_token_count or output.stop_reason or output.seed):  # within a stream
        return data
    data += wire.integer(_GENERATION["input_token_count"], output.input_token_count)
    data += wire.integer(_GENERATION["stop_reason"], output.stop_reason)
    data += wire.integer(_GENERATION["seed"], output.seed)
    return data + wire.string(_GENERATION["stop_sequence"], output.stop_sequence)


async def _joined(parts: list[bytes], slicer: Slicer) -> bytes:
    """A large message is copied here and by gRPC, not both in one iteration of the loop."""
    units = sum(map(len, parts)) // _BYTES_PER_SLICE_UNIT
    if not units:
        return b"".join(parts)
    await slicer.turn(units)
    message = b"".join(parts)
    await slicer.turn(units)
    return message


def tokenize_call(
    message: pb.BatchedTokenizeRequest, num_bytes: int, account: Account, max_reply_bytes: int
) -> TokenizeCall:
    def token_bytes(start: int) -> int:
        token = wire.length_delimited(_TOKENIZATION["tokens"], b"") * message.return_tokens
        offset = wire.length_delimited(_TOKENIZATION["offsets"], _offset(start, start)) * message.return_offsets
        return len(token + offset)

    return TokenizeCall(
        texts=[request.text for request in message.requests],
        num_bytes=num_bytes,
        account=account,
        truncate_input_tokens=message.truncate_input_tokens,
        return_tokens=message.return_tokens,
        return_offsets=message.return_offsets,
        adapter=_adapter(message),
        reply=ReplyLimit(max_reply_bytes, token_bytes),
    )


async def tokenize_reply(tokenized: list[TokenizeResult], slicer: Slicer, max_bytes: int) -> bytes:
    """A serialized BatchedTokenizeResponse; InvalidRequest if it has more bytes, before it is made of its parts."""
    parts, num_bytes = list[bytes](), 0
    async for some in slicer.slices(tokenized):
        for one in some:
            response = []
            async for part in _tokenize_response(one, slicer):
                response.append(part)
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise reply_too_large(max_bytes)
            parts += [wire.message_header(_RESPONSES, response), *response]
    return await _joined(parts, slicer)


async def _tokenize_response(result: TokenizeResult, slicer: Slicer) -> AsyncIterator[bytes]:
    """Its parts."""
    yield wire.integer(_TOKENIZATION["token_count"], result.token_count)
    async for tokens in slicer.slices(result.tokens):
        yield _fields(_TOKENIZATION["tokens"], [token.encode() for token in tokens])
    async for spans in slicer.slices(result.offsets):
        yield _fields(_TOKENIZATION["offsets"], [_offset(*span) for span in spans])


def _offset(start: int, end: int) -> bytes:
    return wire.integer(_OFFSET["start"], start) + wire.integer(_OFFSET["end"], end)


def model_info_response(server_info: ServerInfo) -> pb.ModelInfoResponse:
    kinds = pb.ModelInfoResponse
    return pb.ModelInfoResponse(
        model_kind=kinds.ENCODER_DECODER if server_info.engine.encoder_decoder else kinds.DECODER_ONLY,
        max_sequence_length=server_info.limits.max_sequence_length,
        max_new_tokens=server_info.limits.max_new_tokens,
    )


def _logprob_options(response: dict[str, Any]) -> LogprobOptions:
    return LogprobOptions(
        generated_tokens=response.get("generated_tokens", False),
        input_tokens=response.get("input_tokens", False),
        logprobs=response.get("token_logprobs", False),
        ranks=response.get("token_ranks", False),
        top_n_tokens=response.get("top_n_tokens", 0),
    )


def _adapter(message: HasAdapter) -> tuple[str, str] | None:
    """Field and id of the adapter; an empty `adapter_id` means none, an empty `prefix_id` is an invalid id."""
    if message.adapter_id:
        return "adapter_id", message.adapter_id
    return ("prefix_id", message.prefix_id) if message.HasField("prefix_id") else None


def _grammar(decoding: dict[str, Any]) -> GrammarSpec | None:
    """Format TEXT is no constraint, and neither is one that is unknown here."""
    match decoding:
        case {"format": pb.DecodingParameters.JSON}:
            return GrammarSpec(GrammarKind.JSON_OBJECT)
        case {"choice": choice}:
            return GrammarSpec(GrammarKind.CHOICE, choices=tuple(choice.choices))
    for name in ("json_schema", "regex", "grammar"):
        if name in decoding:
            return GrammarSpec(GrammarKind(name), decoding[name])
    return None


def _tokens(tag: bytes, infos: Iterable[TokenInfo], is_special: IsSpecial | None) -> bytes:
    return _fields(tag, [_token_info(info, is_special) for info in infos])


def _fields(tag: bytes, values: list[bytes]) -> bytes:
    """Joined slice by slice: a million at once would take the event loop some 40 ms."""
    return b"".join([wire.length_delimited(tag, value) for value in values])


def _token_info(info: TokenInfo, is_special: IsSpecial | None) -> bytes:
    data = wire.string(_TOKEN["text"], info.text) + wire.float32(_TOKEN["logprob"], info.logprob)
    data += wire.integer(_TOKEN["rank"], info.rank)
    for id_, text, logprob in info.top_tokens:
        top = wire.string(_TOKEN["text"], text) + wire.float32(_TOKEN["logprob"], logprob)
        data += wire.length_delimited(_TOKEN["top_tokens"], top + _token_id(id_, is_special))
    return data + _token_id(info.id, is_special)


def _token_id(id_: int, is_special: IsSpecial | None) -> bytes:
    """Only if asked for; 0 is an id, too."""
    if is_special is None:
        return b""
    return _TOKEN["id"] + wire.varint(id_) + wire.integer(_TOKEN["special"], is_special(id_))
