"""Converts between proto messages and the values of the front end."""

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.message import Message

from tgis.api.clients import Account
from tgis.frontend.calls import CallKind, GenerateCall, TokenizeCall
from tgis.frontend.generation import ServerInfo
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.sampling_params import RawParams
from tgis.frontend.tokenizer import Encoding, reply_too_large
from tgis.ipc.lookups import GrammarKind, GrammarSpec
from tgis.ipc.request import LogprobOptions
from tgis.pb import generation_pb2 as pb
from tgis.tracing import Headers
from tgis.utils.thread_pool import leave_gil

T = TypeVar("T")

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

_MOST_ENTRIES = 10_000  # read of a list: more than any may have, and few enough to make objects of them
_BATCH = 1024  # tokens of a reply to Tokenize that are converted at a time
_TOKENS_AT_ONCE = 64  # of other replies: they may have details
_MIN_TOKEN_BYTES, _MIN_OFFSET_BYTES = 3, 4  # of a reply to Tokenize, for a token

_RESPONSES_TAG = b"\x0a"  # of BatchedTokenizeResponse.responses

IsSpecial = Callable[[int], bool]  # of a token id; None where ids are not wanted
TokenText = Callable[[int], str]  # of a token id; None where tokens are not wanted
HasAdapter = pb.BatchedGenerationRequest | pb.SingleGenerationRequest | pb.BatchedTokenizeRequest


def generate_call(
    message: pb.BatchedGenerationRequest | pb.SingleGenerationRequest,
    account: Account,
    identity: bytes,
    metadata: Headers,
    answer_deadline: float | None = None,
) -> GenerateCall:
    if isinstance(message, pb.SingleGenerationRequest):
        kind, fields = CallKind.STREAM, ["request.text"]
        texts = [message.request.text] if message.HasField("request") else []
    else:
        texts = [request.text for request in message.requests]
        fields = [f"requests[{index}].text" for index in range(len(texts))]
        kind = CallKind.SINGLE if len(texts) == 1 else CallKind.BATCH
    return GenerateCall(
        kind=kind,
        texts=texts,
        fields=fields,
        params=raw_params(message.params),
        client=account.client,
        identity=identity,
        adapter=_adapter(message),
        answer_deadline=answer_deadline,
        headers=metadata,
    )


def raw_params(params: pb.Parameters) -> RawParams:
    fields = _set_fields(params)
    sampling, stopping, response, decoding = [
        _set_fields(fields[name]) if name in fields else {} for name in ("sampling", "stopping", "response", "decoding")
    ]
    penalty = decoding.get("length_penalty")
    return RawParams(
        do_sample=fields.get("method") == pb.SAMPLE,
        truncate_input_tokens=fields.get("truncate_input_tokens", 0),
        **sampling,  # same names
        **stopping,
        input_text=response.get("input_text", False),
        token_ids=response.get("token_ids", False),
        logprob_options=LogprobOptions(
            generated_tokens=response.get("generated_tokens", False),
            input_tokens=response.get("input_tokens", False),
            logprobs=response.get("token_logprobs", False),
            ranks=response.get("token_ranks", False),
            top_n_tokens=response.get("top_n_tokens", 0),
        ),
        repetition_penalty=decoding.get("repetition_penalty", 0.0),
        length_penalty=(penalty.start_index, penalty.decay_factor) if penalty is not None else None,
        frequency_penalty=decoding.get("frequency_penalty", 0.0),
        presence_penalty=decoding.get("presence_penalty", 0.0),
        logit_bias=dict(decoding.get("logit_bias", {})),
        watermark=decoding.get("watermark", False),
        bad_words=decoding.get("bad_words", ()),
        allowed_token_ids=decoding.get("allowed_token_ids"),
        grammar=_grammar(decoding),
    )


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
        response.stop_sequence = output.stop_sequence
    if output.tokens:
        _add_tokens(response.tokens, output.tokens, is_special)
    if output.input_tokens:
        _add_tokens(response.input_tokens, output.input_tokens, is_special)
    return response


def tokenize_call(
    message: pb.BatchedTokenizeRequest, num_bytes: int, account: Account, max_reply_bytes: int
) -> TokenizeCall:
    token_bytes = _MIN_TOKEN_BYTES * message.return_tokens + _MIN_OFFSET_BYTES * message.return_offsets
    return TokenizeCall(
        texts=[request.text for request in message.requests],
        num_bytes=num_bytes,
        client=account.client,
        truncate_input_tokens=message.truncate_input_tokens,
        return_tokens=message.return_tokens,
        return_offsets=message.return_offsets,
        adapter=_adapter(message),
        max_tokens=max_reply_bytes // token_bytes if token_bytes else None,
    )


def tokenize_response(encodings: list[Encoding], token_text: TokenText | None, max_bytes: int) -> bytes:
    """A serialized BatchedTokenizeResponse; InvalidRequest if it has more bytes."""
    data = bytearray()
    for encoding in encodings:
        response = b"".join(_tokenize_parts(encoding, token_text))
        data += _RESPONSES_TAG + _varint(len(response)) + response
        if len(data) > max_bytes:
            raise reply_too_large(max_bytes)
    return bytes(data)


def _tokenize_parts(encoding: Encoding, token_text: TokenText | None) -> Iterator[bytes]:
    """A serialized TokenizeResponse. Serialized in parts: a million tokens at once hold the GIL for 0.1 s."""
    yield pb.TokenizeResponse(token_count=encoding.num_tokens).SerializeToString()
    for tokens in _batched(map(token_text, encoding.packed_ids) if token_text else ()):
        yield pb.TokenizeResponse(tokens=tokens).SerializeToString()
    for offsets in _batched(encoding.offsets):
        part = pb.TokenizeResponse()
        for start, end in offsets:  # a message that is made apart has memory of its own, ten times as much
            part.offsets.add(start=start, end=end)
        yield part.SerializeToString()


def _varint(number: int) -> bytes:
    low = bytearray()
    while number > 0x7F:
        low.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*low, number))


def _batched(items: Iterable[T]) -> Iterator[tuple[T, ...]]:
    """Pieces of work for a thread."""
    items = iter(items)
    while batch := tuple(islice(items, _BATCH)):
        yield batch
        if len(batch) == _BATCH:
            leave_gil()


def model_info_response(server_info: ServerInfo) -> pb.ModelInfoResponse:
    kinds = pb.ModelInfoResponse
    return pb.ModelInfoResponse(
        model_kind=kinds.ENCODER_DECODER if server_info.engine.encoder_decoder else kinds.DECODER_ONLY,
        max_sequence_length=server_info.limits.max_sequence_length,
        max_new_tokens=server_info.limits.max_new_tokens,
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


def _set_fields(message: Message) -> dict[str, Any]:
    """The fields that are set, by name; the beginning of a list, as a tuple."""
    fields = ((field.name, value) for field, value in message.ListFields())
    return {n: tuple(value[:_MOST_ENTRIES]) if isinstance(value, MutableSequence) else value for n, value in fields}


def _add_tokens(tokens: Any, infos: Iterable[TokenInfo], is_special: IsSpecial | None) -> None:
    """Append tokens to a repeated field; ids only if they are asked for."""
    for number, info in enumerate(infos, 1):
        token = tokens.add(text=info.text, logprob=info.logprob, rank=info.rank)
        for id_, text, logprob in info.top_tokens:
            top = token.top_tokens.add(text=text, logprob=logprob)
            if is_special is not None:
                top.id, top.special = id_, is_special(id_)
        if is_special is not None:
            token.id, token.special = info.id, is_special(info.id)
        if number % _TOKENS_AT_ONCE == 0:
            leave_gil()
