"""Proto messages to values and back. Decides nothing but what a message says."""

from collections.abc import Iterable

from tgis.frontend.generation import Call, Serving
from tgis.frontend.metrics import Kind
from tgis.frontend.output import Reply, TokenInfo
from tgis.frontend.tokenize import TokenizeCall, Tokenized
from tgis.frontend.validation import Parameters
from tgis.ipc.messages import Details
from tgis.pb import generation_pb2 as pb

HasAdapter = pb.BatchedGenerationRequest | pb.SingleGenerationRequest | pb.BatchedTokenizeRequest


def batch_call(message: pb.BatchedGenerationRequest, identity: bytes) -> Call:
    """A unary call; its kind counts its inputs."""
    texts = [request.text for request in message.requests]
    return Call(
        kind=Kind.SINGLE if len(texts) == 1 else Kind.BATCH,
        texts=texts,
        fields=[f"requests[{index}].text" for index in range(len(texts))],
        parameters=parameters(message.params),
        identity=identity,
        adapter=_adapter(message),
    )


def stream_call(message: pb.SingleGenerationRequest, identity: bytes) -> Call:
    """A stream's call."""
    return Call(
        kind=Kind.STREAM,
        texts=[message.request.text] if message.HasField("request") else [],
        fields=["request.text"],
        parameters=parameters(message.params),
        identity=identity,
        adapter=_adapter(message),
    )


def parameters(params: pb.Parameters) -> Parameters:
    """The parameters as asked."""
    sampling, stopping, decoding = params.sampling, params.stopping, params.decoding
    penalty = decoding.length_penalty
    return Parameters(
        sample=params.method == pb.SAMPLE,
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
        details=_details(params.response),
        repetition_penalty=decoding.repetition_penalty,
        length_penalty=((penalty.start_index, penalty.decay_factor) if decoding.HasField("length_penalty") else None),
        truncate_input_tokens=params.truncate_input_tokens,
        guided=_guided(decoding),
    )


def response(reply: Reply) -> pb.GenerationResponse:
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
        truncate=message.truncate_input_tokens,
        tokens=message.return_tokens,
        offsets=message.return_offsets,
        adapter=_adapter(message),
    )


def tokenize_response(tokenized: list[Tokenized]) -> pb.BatchedTokenizeResponse:
    """All tokenized texts."""
    return pb.BatchedTokenizeResponse(
        responses=[
            pb.TokenizeResponse(
                token_count=one.count,
                tokens=one.tokens,
                offsets=[pb.TokenizeResponse.Offset(start=start, end=end) for start, end in one.offsets],
            )
            for one in tokenized
        ]
    )


def model_info(serving: Serving) -> pb.ModelInfoResponse:
    """What is served."""
    kinds = pb.ModelInfoResponse
    return pb.ModelInfoResponse(
        model_kind=kinds.ENCODER_DECODER if serving.encoder_decoder else kinds.DECODER_ONLY,
        max_sequence_length=serving.limits.sequence_length,
        max_new_tokens=serving.limits.new_tokens,
    )


def _details(options: pb.ResponseOptions) -> Details:
    return Details(
        generated=options.generated_tokens,
        inputs=options.input_tokens,
        logprobs=options.token_logprobs,
        ranks=options.token_ranks,
        top_n=options.top_n_tokens,
    )


def _adapter(message: HasAdapter) -> tuple[str, str] | None:
    """Field and id of an adapter; an empty `adapter_id` is none, an empty `prefix_id` is one that is not found."""
    if message.adapter_id:
        return "adapter_id", message.adapter_id
    return ("prefix_id", message.prefix_id) if message.HasField("prefix_id") else None


def _guided(decoding: pb.DecodingParameters) -> str:
    """The name of the constraint that is asked for; the format TEXT is none."""
    case = decoding.WhichOneof("guided") or ""
    return "" if case == "format" and decoding.format == pb.DecodingParameters.TEXT else case


def _token_infos(infos: Iterable[TokenInfo]) -> list[pb.TokenInfo]:
    return [
        pb.TokenInfo(
            text=info.text,
            logprob=info.logprob,
            rank=info.rank,
            top_tokens=[pb.TokenInfo.TopToken(text=text, logprob=logprob) for text, logprob in info.top],
        )
        for info in infos
    ]
