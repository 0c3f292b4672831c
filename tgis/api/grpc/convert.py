"""Converts between proto messages and the values of the front end."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from typing import Any

from google.protobuf.message import Message

from tgis.errors import InvalidRequest
from tgis.frontend.calls import CallKind, GenerateCall, TokenizeCall
from tgis.frontend.generation import ServerInfo
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.params import Params
from tgis.frontend.tokenizer import Encoding, reply_too_large
from tgis.ipc.lookups import GrammarKind, GrammarSpec
from tgis.ipc.request import LogprobOptions
from tgis.pb import generation_pb2 as pb
from tgis.tracing import Headers

# Validation's name of a parameter -> its path in the message.
_FIELD_PATHS = {
    field.name: f"params.{section.name}.{field.name}"
    for section in pb.Parameters.DESCRIPTOR.fields
    if section.message_type is not None
    for field in section.message_type.fields
} | {
    "decay_factor": "params.decoding.length_penalty.decay_factor",
    "logprob_options": "params.response",
    "json_object": "params.decoding.format",
}

# Entries read from a list: more than validation allows, few enough to make objects of them.
_MAX_LIST_ENTRIES = 10_000
# Bytes for a token in a reply to Tokenize, at least; for an offset, from the 128th byte of a text on.
_MIN_TOKEN_BYTES, _MIN_OFFSET_BYTES = 3, 8

# Both take a token id; a response without token details gets None in their place.
IsSpecial = Callable[[int], bool]
TokenText = Callable[[int], str]
HasAdapter = pb.BatchedGenerationRequest | pb.SingleGenerationRequest | pb.BatchedTokenizeRequest


def generate_call(
    message: pb.BatchedGenerationRequest | pb.SingleGenerationRequest,
    client: bytes,
    identity: bytes,
    metadata: Headers,
    answer_deadline: float | None = None,
) -> GenerateCall:
    if isinstance(message, pb.SingleGenerationRequest):
        kind, paths = CallKind.STREAM, ["request"]
        inputs = [message.request] if message.HasField("request") else []
    else:
        inputs = list(message.requests)
        paths = [f"requests[{index}]" for index in range(len(inputs))]
        kind = CallKind.SINGLE if len(inputs) == 1 else CallKind.BATCH
    has_ids = any(given.token_ids for given in inputs)
    if has_ids:
        _check_token_inputs(inputs, paths, echo=message.params.response.input_text)
    return GenerateCall(
        kind=kind,
        texts=[given.text for given in inputs],
        token_ids=[given.token_ids for given in inputs] if has_ids else None,
        fields=[f"{path}.{'token_ids' if has_ids else 'text'}" for path in paths],
        params=params(message.params),
        client=client,
        identity=identity,
        adapter=_adapter(message),
        answer_deadline=answer_deadline,
        headers=metadata,
    )


def params(message: pb.Parameters) -> Params:
    """The parameters of a message, by name; greedy decoding does not even check those of sampling."""
    samples, response = message.method == pb.SAMPLE, message.response
    sections = [message.stopping, response, message.decoding, *([message.sampling] if samples else [])]
    fields = {name: value for section in sections for name, value in set_fields(section)}
    penalty = fields.get("length_penalty")
    return Params.of(
        fields,
        temperature=fields.get("temperature") if samples else 0.0,
        logprob_options=LogprobOptions(
            generated_tokens=response.generated_tokens,
            input_tokens=response.input_tokens,
            logprobs=response.token_logprobs,
            ranks=response.token_ranks,
            top_n_tokens=response.top_n_tokens,
        ),
        length_penalty=(penalty.start_index, penalty.decay_factor) if penalty is not None else None,
        grammar=grammar_spec(fields),
        truncate_input_tokens=message.truncate_input_tokens,
    )


def grammar_spec(decoding: dict[str, Any]) -> GrammarSpec | None:
    """Format TEXT is no constraint, and neither is one that is unknown here."""
    match decoding:
        case {"format": pb.DecodingParameters.JSON} | {"json_object": True}:
            return GrammarSpec(GrammarKind.JSON_OBJECT)
        case {"choice": choice}:
            return GrammarSpec(GrammarKind.CHOICE, choices=tuple(choice.choices))
    for name in ("json_schema", "regex", "grammar"):
        if name in decoding:
            return GrammarSpec(GrammarKind(name), decoding[name])
    return None


def set_fields(message: Message) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields that are set; of a list, the beginning. Zero is unset, even -0.0, unless the field
    is optional.
    """
    for field, value in message.ListFields():
        if isinstance(value, MutableSequence):
            yield field.name, tuple(value[:_MAX_LIST_ENTRIES])
        elif isinstance(value, MutableMapping):
            yield field.name, dict(value)
        elif value or field.has_presence:
            yield field.name, value


def field_path(field: str) -> str:
    """The proto path of the field of an InvalidRequest, which is a parameter or already a path."""
    return _FIELD_PATHS.get(field, field)


def generate_response(outputs: list[RequestOutput], is_special: IsSpecial | None) -> pb.BatchedGenerationResponse:
    response = pb.BatchedGenerationResponse()
    for output in outputs:
        fill_response(response.responses.add(), output, is_special)
    return response


def fill_response(
    response: pb.GenerationResponse, output: RequestOutput, is_special: IsSpecial | None
) -> pb.GenerationResponse:
    response.text, response.generated_token_count = output.text, output.generated_token_count
    if output.input_token_count or output.stop_reason or output.seed:  # not within a stream
        response.input_token_count, response.seed = output.input_token_count, output.seed
        response.stop_reason = output.stop_reason.value  # type: ignore[assignment]  # the same numbers
        response.stop_sequence, response.record = output.stop_sequence, output.record
    if output.tokens:
        _add_tokens(response.tokens, output.tokens, is_special)
    if output.input_tokens:
        _add_tokens(response.input_tokens, output.input_tokens, is_special)
    return response


def tokenize_call(message: pb.BatchedTokenizeRequest, max_reply_bytes: int) -> TokenizeCall:
    token_bytes = _MIN_TOKEN_BYTES * message.return_tokens + _MIN_OFFSET_BYTES * message.return_offsets
    return TokenizeCall(
        texts=[request.text for request in message.requests],
        truncate_input_tokens=message.truncate_input_tokens,
        return_tokens=message.return_tokens,
        return_offsets=message.return_offsets,
        adapter=_adapter(message),
        max_tokens=max_reply_bytes // token_bytes if token_bytes else None,
    )


def tokenize_response(encodings: list[Encoding], token_text: TokenText | None, max_bytes: int) -> bytes:
    """A serialized BatchedTokenizeResponse; InvalidRequest if it has more bytes."""
    reply = pb.BatchedTokenizeResponse()
    for encoding in encodings:
        response = reply.responses.add(token_count=encoding.num_tokens)
        if token_text is not None:
            response.tokens.extend(map(token_text, encoding.packed_ids))
        for start, end in encoding.offsets:
            response.offsets.add(start=start, end=end)
    data: bytes = reply.SerializeToString()
    if len(data) > max_bytes:
        raise reply_too_large(max_bytes)
    return data


def model_info_response(server_info: ServerInfo) -> pb.ModelInfoResponse:
    kinds = pb.ModelInfoResponse
    return pb.ModelInfoResponse(
        model_kind=kinds.ENCODER_DECODER if server_info.engine.encoder_decoder else kinds.DECODER_ONLY,
        max_sequence_length=server_info.limits.max_sequence_length,
        max_new_tokens=server_info.limits.max_new_tokens,
        fingerprint=server_info.engine.fingerprint,
    )


def _check_token_inputs(inputs: list[pb.GenerationRequest], paths: list[str], *, echo: bool) -> None:
    """InvalidRequest unless the inputs of a call have ids only, and none is to be echoed."""
    for path, given in zip(paths, inputs, strict=True):
        if given.text or not given.token_ids:
            reason = "excludes text" if given.text else "is missing, while other inputs have it"
            raise InvalidRequest(f"{path}.token_ids", f"{path}.token_ids {reason}")
    if echo:
        raise InvalidRequest("input_text", "input_text needs inputs with text")


def _adapter(message: HasAdapter) -> tuple[str, str] | None:
    """Field and id of the adapter; an empty `adapter_id` means none, an empty `prefix_id` is an invalid id."""
    if message.adapter_id:
        return "adapter_id", message.adapter_id
    return ("prefix_id", message.prefix_id) if message.HasField("prefix_id") else None


def _add_tokens(tokens: Any, infos: Iterable[TokenInfo], is_special: IsSpecial | None) -> None:
    """Append tokens to a repeated field; ids only if they are asked for."""
    for info in infos:
        token = tokens.add(text=info.text, logprob=info.logprob, rank=info.rank)
        for id_, text, logprob in info.top_tokens:
            top = token.top_tokens.add(text=text, logprob=logprob)
            if is_special is not None:
                top.id, top.special = id_, is_special(id_)
        if is_special is not None:
            token.id, token.special = info.id, is_special(info.id)
