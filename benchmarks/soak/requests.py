"""Requests as messages, and those that must be refused."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpc import StatusCode

from tgis.pb import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the server allows, in tokens, and inputs at once."""

    sequence: int
    new: int
    inputs: int


Request = pb.BatchedGenerationRequest | pb.SingleGenerationRequest


def batched(texts: Sequence[str], params: pb.Parameters) -> pb.BatchedGenerationRequest:
    """A unary call."""
    return pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text) for text in texts], params=params)


def single(text: str, params: pb.Parameters) -> pb.SingleGenerationRequest:
    """A stream."""
    return pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), params=params)


def bad_calls(bounds: Bounds) -> list[tuple[StatusCode, Request]]:
    """What a server must answer to requests that cannot be served."""
    few = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=2))
    many = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=bounds.new + 1))
    odd = pb.Parameters(method=pb.SAMPLE, sampling=pb.SamplingParameters(temperature=float("nan")))
    stops = pb.Parameters(stopping=pb.StoppingCriteria(stop_sequences=list("abcdefg")))
    guided = pb.Parameters(decoding=pb.DecodingParameters(regex="a*"))
    refused: list[Request] = [
        batched(["a", "word " * bounds.sequence, "b"], few),
        batched(["a"], many),
        single("a", odd),
        single("a", stops),
        pb.SingleGenerationRequest(params=few),
        pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a"), adapter_id="no-such-adapter"),
    ]
    return [
        *((StatusCode.INVALID_ARGUMENT, request) for request in refused),
        (StatusCode.UNIMPLEMENTED, batched(["a", "b"], guided)),
        (StatusCode.RESOURCE_EXHAUSTED, batched(["a"] * (bounds.inputs + 1), few)),
    ]
