"""Golden cases through a real server: sent concurrently, in random order, and every answer compared.

A case with one input is sent as a unary call and as a stream; the stream must keep to the protocol, and its messages
together must be the answer expected of the unary call.
"""

import asyncio
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import prompt_files
import safetensors
import torch
from golden_cases import Case, Error, Json, expected_answer, servers
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from harness import as_stream_request
from prompt_files import Files, pt, write
from transformers import AutoTokenizer

from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc


def write_prompts(prompts: dict[str, dict[str, str]], directory: Path, store: Path) -> None:
    """Write soft prompts that are the token embeddings of texts, in TGIS's layout or PEFT's."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with safetensors.safe_open(directory / "model.safetensors", "pt") as weights:
        (name,) = {"model.embed_tokens.weight", "shared.weight"} & set(weights.keys())
        table = weights.get_tensor(name)
    for prompt, parts in prompts.items():
        for name, text in parts.items():
            write(store / prompt, _prompt_files(name, table[_prompt_ids(tokenizer, text)]))


def _prompt_files(name: str, rows: torch.Tensor) -> Files:
    match name:
        case prompt_files.SAFETENSORS:
            return prompt_files.peft({prompt_files.KEY: rows})
        case prompt_files.BIN:
            return {name: pt({prompt_files.KEY: rows})}
    return {name: pt(rows)}


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


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


PAUSE = 0.004  # seconds between one call and the next
TIMEOUT = 120
RELATIVE = 5e-4  # as in TGIS's own suites; float32 on different machines differs by a tenth of it
ABSOLUTE = 1e-6  # for log-probabilities near 0, whose relative error is that of a difference of scores


@dataclass(frozen=True, slots=True)
class Sending:
    """A case, sent as a unary call or as a stream."""

    case: Case
    streamed: bool


def sendings_of(case: Case) -> list[Sending]:
    """Unary calls with one input are streamed too."""
    if case.rpc == "Generate":
        single = len(case.request.get("requests", ())) == 1
        return [Sending(case, False), Sending(case, True)] if single else [Sending(case, False)]
    return [Sending(case, case.rpc == "GenerateStream")]


async def run(target: str, cases: list[Case], seed: int) -> dict[str, list[str]]:
    """Send everything without waiting for answers; the problems by case id."""
    sendings = [sending for case in cases for sending in sendings_of(case)]
    random.Random(seed).shuffle(sendings)
    drawn: dict[str, str] = {}
    async with grpc.aio.insecure_channel(target) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        tasks = []
        for sending in sendings:
            tasks.append(asyncio.create_task(_problems(stub, sending, drawn)))
            await asyncio.sleep(PAUSE)
        found = await asyncio.gather(*tasks)
    problems: dict[str, list[str]] = {case.id: [] for case in cases}
    for sending, lines in zip(sendings, found, strict=True):
        way = "streamed" if sending.streamed else "unary"
        problems[sending.case.id] += [f"{way}{line}" for line in lines]
    return problems


async def _problems(stub: pb_grpc.GenerationServiceStub, sending: Sending, drawn: dict[str, str]) -> list[str]:
    """`drawn`: the texts of seeded cases that have been answered, by case id."""
    case = sending.case
    try:
        if sending.streamed:
            request = _stream_request(case)
            messages = [message async for message in stub.GenerateStream(request, timeout=TIMEOUT)]
        else:
            answer = await getattr(stub, case.rpc)(case.message(), timeout=TIMEOUT)
    except grpc.aio.AioRpcError as error:
        return _error_problems(case.error, error, sending.streamed)
    if case.error is not None:
        return [f": expected {case.error}, got an answer"]
    if sending.streamed:
        whole = join_stream(messages)
        wanted = _expected_of_stream(case, request)
        return violations(request, messages) or _differences(case, wanted, whole) + _redrawn(case, whole, drawn)
    found = _differences(case, _expected(case), answer) + list(_repeated(case, answer))
    return found + _redrawn(case, answer.responses[0], drawn) if case.seeded else found


def _expected(case: Case) -> Json:
    return case.expect_partly if case.expect_partly is not None else expected_answer(case)


def _expected_of_stream(case: Case, request: pb.SingleGenerationRequest) -> Json:
    """A stream echoes an encoder's input without the separator that unary calls put before the output."""
    wanted: Json
    (wanted,) = _expected(case)["responses"]
    if not (servers()[case.server].encoder_decoder and request.params.response.input_text):
        return wanted
    text = request.request.text
    return wanted | {"text": text + wanted["text"].removeprefix(text + "\n\n")}


def differences(expected: Any, got: Any, path: str = "", *, partly: bool = False) -> list[str]:
    """A line for each place where protobuf JSON differs: floats beyond the tolerance, everything else at all. `partly`
    ignores keys that only `got` has.
    """
    if isinstance(expected, dict) and isinstance(got, dict):
        names = expected if partly else expected | got
        parts = {f"{path}.{name}": (expected.get(name), got.get(name)) for name in names}
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        parts = {f"{path}[{index}]": pair for index, pair in enumerate(zip(expected, got, strict=True))}
    elif isinstance(expected, float) and isinstance(got, float):
        same = math.isclose(expected, got, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        return [] if same else [f"{path}: expected {expected}, got {got}"]
    else:
        same = type(expected) is type(got) and expected == got
        return [] if same else [f"{path}: expected {expected!r}, got {got!r}"]
    return [line for at, pair in parts.items() for line in differences(*pair, at, partly=partly)]


def _differences(case: Case, wanted: Json, answer: Message) -> list[str]:
    partly = case.expect_partly is not None or case.rpc == "ModelInfo"  # which has a fingerprint, too
    return differences(wanted, json_format.MessageToDict(answer), partly=partly)


def _repeated(case: Case, answer: Any) -> Iterator[str]:
    for name in case.distinct:
        found = [getattr(response, name) for response in answer.responses]
        if len(set(found)) < len(found):
            yield f": {name} is not distinct: {found}"
        if name == "seed" and max(found) >= 1 << 32:
            yield f": a drawn seed has more than 32 bits: {found}"


def _redrawn(case: Case, answer: pb.GenerationResponse, drawn: dict[str, str]) -> list[str]:
    """A seed draws the same text as before, whatever runs beside it."""
    before = drawn.setdefault(case.id, answer.text)
    return [f": drew {answer.text!r}, before {before!r}"] if case.seeded and answer.text != before else []


def _stream_request(case: Case) -> pb.SingleGenerationRequest:
    message = case.message()
    if isinstance(message, pb.SingleGenerationRequest):
        return message
    assert isinstance(message, pb.BatchedGenerationRequest)
    return as_stream_request(message)


def _error_problems(wanted: Error | None, error: grpc.aio.AioRpcError, streamed: bool) -> list[str]:
    if wanted is None:
        return [f": expected an answer, got {error.code().name}: {error.details()}"]
    pairs = {
        "code": (wanted.code, error.code().name),
        "message": (_said(wanted.message, streamed), error.details()),
        "violations": (
            [(_said(wanted.field, streamed), _said(wanted.description, streamed))] if wanted.field else [],
            list(_violations(error)),
        ),
    }
    return [f".{name}: expected {one!r}, got {other!r}" for name, (one, other) in pairs.items() if one != other]


def _said(text: str, streamed: bool) -> str:
    """The text with the field path that a stream uses for its only input."""
    return text.replace("requests[0]", "request") if streamed else text


def _violations(error: grpc.aio.AioRpcError) -> Iterator[tuple[str, str]]:
    """Field and description of each violation; code and message of the status details must be those of the call."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(bytes(value))
            assert (status.code, status.message) == (error.code().value[0], error.details())
            for detail in status.details:
                bad = error_details_pb2.BadRequest()
                assert detail.Unpack(bad), detail
                yield from ((violation.field, violation.description) for violation in bad.field_violations)
