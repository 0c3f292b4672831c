"""Proto messages to values and back. Decides nothing but what a message says."""

from collections.abc import Iterable

from tgis.frontend.calls import CallKind, GenerateCall, TokenizeCall
from tgis.frontend.generation import ServerInfo
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.sampling_params import RawParams
from tgis.frontend.tokenize import TokenizeResult
from tgis.ipc.request import LogprobOptions
from tgis.pb import generation_pb2 as pb

# Where the parameters that validation names are in a request.
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
    "logprob_options": "params.response",
    "top_n_tokens": "params.response.top_n_tokens",
}

HasAdapter = pb.BatchedGenerationRequest | pb.SingleGenerationRequest | pb.BatchedTokenizeRequest


def generate_call(message: pb.BatchedGenerationRequest, identity: bytes) -> GenerateCall:
    """A unary call; its kind counts its inputs."""
    texts = [request.text for request in message.requests]
    return GenerateCall(
        kind=CallKind.SINGLE if len(texts) == 1 else CallKind.BATCH,
        texts=texts,
        fields=[f"requests[{index}].text" for index in range(len(texts))],
        params=raw_params(message.params),
        identity=identity,
        adapter=_adapter(message),
    )


def generate_stream_call(message: pb.SingleGenerationRequest, identity: bytes) -> GenerateCall:
    """A stream's call."""
    return GenerateCall(
        kind=CallKind.STREAM,
        texts=[message.request.text] if message.HasField("request") else [],
        fields=["request.text"],
        params=raw_params(message.params),
        identity=identity,
        adapter=_adapter(message),
    )


def raw_params(params: pb.Parameters) -> RawParams:
    """The parameters as asked."""
    sampling, stopping, decoding = params.sampling, params.stopping, params.decoding
    penalty = decoding.length_penalty
    return RawParams(
        do_sample=params.method == pb.SAMPLE,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        typical_p=sampling.typical_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_new_tokens=stopping.max_new_tokens,
        min_new_tokens=stopping.min_new_tokens,
        time_limit_millis=stopping.time_limit_millis,
        stop_sequences=tuple(stopping.stop_sequences),
        include_stop_sequence=(stopping.include_stop_sequence if stopping.HasField("include_stop_sequence") else None),
        input_text=params.response.input_text,
        logprob_options=_logprob_options(params.response),
        repetition_penalty=decoding.repetition_penalty,
        length_penalty=((penalty.start_index, penalty.decay_factor) if decoding.HasField("length_penalty") else None),
        truncate_input_tokens=params.truncate_input_tokens,
        guided=_guided(decoding),
    )


def field_path(field: str) -> str:
    """The proto path of a field that an InvalidRequest names: a parameter, or a path already."""
    return _FIELD_PATHS.get(field, field)


def generation_response(reply: RequestOutput) -> pb.GenerationResponse:
    """One response message."""
    return pb.GenerationResponse(
        text=reply.text,
        input_token_count=reply.input_token_count,
        generated_token_count=reply.generated_token_count,
        stop_reason=pb.StopReason.Name(reply.stop_reason),
        stop_sequence=reply.stop_sequence,
        seed=reply.seed,
        tokens=_token_infos(reply.tokens),
        input_tokens=_token_infos(reply.input_tokens),
    )


def tokenize_call(message: pb.BatchedTokenizeRequest) -> TokenizeCall:
    """A Tokenize call."""
    return TokenizeCall(
        texts=[request.text for request in message.requests],
        truncate_input_tokens=message.truncate_input_tokens,
        return_tokens=message.return_tokens,
        return_offsets=message.return_offsets,
        adapter=_adapter(message),
    )


def tokenize_response(tokenized: list[TokenizeResult]) -> pb.BatchedTokenizeResponse:
    """All tokenized texts."""
    return pb.BatchedTokenizeResponse(
        responses=[
            pb.TokenizeResponse(
                token_count=one.token_count,
                tokens=one.tokens,
                offsets=[pb.TokenizeResponse.Offset(start=start, end=end) for start, end in one.offsets],
            )
            for one in tokenized
        ]
    )


def model_info_response(serving: ServerInfo) -> pb.ModelInfoResponse:
    """What is served."""
    kinds = pb.ModelInfoResponse
    return pb.ModelInfoResponse(
        model_kind=kinds.ENCODER_DECODER if serving.engine.encoder_decoder else kinds.DECODER_ONLY,
        max_sequence_length=serving.limits.max_sequence_length,
        max_new_tokens=serving.limits.max_new_tokens,
    )


def _logprob_options(options: pb.ResponseOptions) -> LogprobOptions:
    return LogprobOptions(
        generated_tokens=options.generated_tokens,
        input_tokens=options.input_tokens,
        logprobs=options.token_logprobs,
        ranks=options.token_ranks,
        top_n_tokens=options.top_n_tokens,
    )


def _adapter(message: HasAdapter) -> tuple[str, str] | None:
    """Field and id of an adapter; an empty `adapter_id` is none, an empty `prefix_id` is one that is not found."""
    if message.adapter_id:
        return "adapter_id", message.adapter_id
    return ("prefix_id", message.prefix_id) if message.HasField("prefix_id") else None


def _guided(decoding: pb.DecodingParameters) -> str:
    """The path of the constraint on the output; the format TEXT is none."""
    case = decoding.WhichOneof("guided")
    if case is None or (case == "format" and decoding.format == pb.DecodingParameters.TEXT):
        return ""
    return f"params.decoding.{case}"


def _token_infos(infos: Iterable[TokenInfo]) -> list[pb.TokenInfo]:
    return [
        pb.TokenInfo(
            text=info.text,
            logprob=info.logprob,
            rank=info.rank,
            top_tokens=[pb.TokenInfo.TopToken(text=text, logprob=logprob) for text, logprob in info.top_tokens],
        )
        for info in infos
    ]
