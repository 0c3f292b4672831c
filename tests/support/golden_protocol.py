"""The messages of a stream: the order and fields that the protocol prescribes, and the response that they add up to."""

from collections.abc import Iterator

from tgis.pb import generation_pb2 as pb

Messages = list[pb.GenerationResponse]


def join_stream(messages: Messages) -> pb.GenerationResponse:
    """The response of the same request as a unary call."""
    first, last = messages[0], messages[-1]
    whole = pb.GenerationResponse(
        text="".join(message.text for message in messages),
        input_token_count=first.input_token_count,
        generated_token_count=last.generated_token_count,
        stop_reason=last.stop_reason,
        stop_sequence=last.stop_sequence,
        seed=last.seed,
    )
    for message in messages:
        whole.tokens.extend(message.tokens)
        whole.input_tokens.extend(message.input_tokens)
    return whole


def violations(request: pb.SingleGenerationRequest, messages: Messages) -> list[str]:
    """One line for each violation of the protocol."""
    if len(messages) < 2:
        return [f": only {len(messages)} messages"]
    options, expired = request.params.response, messages[-1] == pb.GenerationResponse(stop_reason=pb.TIME_LIMIT)
    outputs = 2 if options.input_tokens and not expired else 1
    found = list(_first(request, messages[0], messages[-1]))
    if outputs == 2:
        found += _inputs(messages[0], messages[1])
    if not expired:
        found += _outputs(options, messages[outputs:])
    return found


def _first(
    request: pb.SingleGenerationRequest, first: pb.GenerationResponse, last: pb.GenerationResponse
) -> Iterator[str]:
    text = request.request.text if request.params.response.input_text else ""
    wanted = pb.GenerationResponse(text=text, input_token_count=first.input_token_count, seed=last.seed)
    if last.stop_reason == pb.TIME_LIMIT and not last.generated_token_count:
        wanted.seed = first.seed
    if not first.input_token_count:
        yield "[0]: no input_token_count"
    if first != wanted:
        yield f"[0]: expected only {_line(wanted)}, got {_line(first)}"


def _inputs(first: pb.GenerationResponse, message: pb.GenerationResponse) -> Iterator[str]:
    wanted = pb.GenerationResponse(input_tokens=message.input_tokens, input_token_count=first.input_token_count)
    if not message.input_tokens:
        yield "[1]: no input_tokens"
    elif message.SerializeToString(deterministic=True) != wanted.SerializeToString(deterministic=True):  # NaN != NaN
        yield f"[1]: expected only {_line(wanted)}, got {_line(message)}"


def _outputs(options: pb.ResponseOptions, messages: Messages) -> Iterator[str]:
    count = 0
    for index, message in enumerate(messages):
        at, last = f" output[{index}]", index == len(messages) - 1
        if message.generated_token_count <= count:
            yield f"{at}: generated_token_count {message.generated_token_count} after {count}"
        count = message.generated_token_count
        if message.input_token_count or message.input_tokens:
            yield f"{at}: fields of the input"
        if len(message.tokens) != options.generated_tokens:
            yield f"{at}: {len(message.tokens)} tokens"
        if last != bool(message.stop_reason):
            yield f"{at}: stop_reason {pb.StopReason.Name(message.stop_reason)}"
        if not last and (message.seed or message.stop_sequence or not (message.text or message.tokens)):
            yield f"{at}: expected text or tokens only, got {_line(message)}"
    if not messages:
        yield ": no output"


def _line(message: pb.GenerationResponse) -> str:
    return " ".join(str(message).split())
