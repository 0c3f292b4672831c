"""Builds requests, and invalid requests with the statuses expected for them."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpc import StatusCode

from tgis.pb import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The server's limits."""

    max_sequence_length: int
    max_new_tokens: int
    max_inputs: int


Request = pb.BatchedGenerationRequest | pb.SingleGenerationRequest


def batch_request(texts: Sequence[str], params: pb.Parameters) -> pb.BatchedGenerationRequest:
    requests = [pb.GenerationRequest(text=text) for text in texts]
    return pb.BatchedGenerationRequest(requests=requests, params=params)


def stream_request(text: str, params: pb.Parameters) -> pb.SingleGenerationRequest:
    return pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), params=params)


def invalid_requests(bounds: ServerLimits) -> list[tuple[StatusCode, Request]]:
    """Requests that a server must refuse, with the status of each."""
    few = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=2))
    many = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=bounds.max_new_tokens + 1))
    odd = pb.Parameters(method=pb.SAMPLE, sampling=pb.SamplingParameters(temperature=float("nan")))
    stops = pb.Parameters(stopping=pb.StoppingCriteria(stop_sequences=list("abcdefg")))
    grammar = pb.Parameters(decoding=pb.DecodingParameters(regex="(a"))
    refused: list[Request] = [
        batch_request(["a", "word " * bounds.max_sequence_length, "b"], few),
        batch_request(["a"], many),
        batch_request(["a", "b"], grammar),
        stream_request("a", odd),
        stream_request("a", stops),
        pb.SingleGenerationRequest(params=few),
        pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a"), adapter_id="no-such-adapter"),
    ]
    return [
        *((StatusCode.INVALID_ARGUMENT, request) for request in refused),
        (StatusCode.INVALID_ARGUMENT, batch_request(["a"] * (bounds.max_inputs + 1), few)),
    ]
