"""fmaas.GenerationService: converts messages and delegates to the Generator."""

import asyncio
import functools
import time
from contextlib import aclosing
from typing import Any

import grpc

from tgis.api.grpc import convert
from tgis.api.grpc.calls import GrpcCall, GrpcCalls
from tgis.api.grpc.parsing import parse
from tgis.api.grpc.status import Context
from tgis.config import Config
from tgis.frontend.generation import MAX_TOKENIZE_INPUTS, Generator, loaded
from tgis.pb import generation_pb2 as pb

GENERATION_SERVICE = "fmaas.GenerationService"

_MAX_REPLY_RATIO = 4  # reply bytes per byte of the request limit: gRPC copies a reply at once on the event loop


class GenerationServicer:
    """The four RPCs; UNAVAILABLE until `generator` is there."""

    def __init__(self, calls: GrpcCalls, config: Config, generator: asyncio.Future[Generator]) -> None:
        self._calls = calls
        self._config = config
        self._generator = generator

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handler to register with a server."""
        methods = {
            "Generate": self._calls.handler("Generate", self._generate),
            "GenerateStream": self._calls.handler("GenerateStream", self._generate_stream),
            "Tokenize": self._calls.handler("Tokenize", self._tokenize),
            "ModelInfo": self._calls.handler("ModelInfo", self._model_info),
        }
        return grpc.method_handlers_generic_handler(GENERATION_SERVICE, methods)

    async def _generate(self, data: bytes, grpc_call: GrpcCall) -> None:
        generator = loaded(self._generator)
        message = parse(data, pb.BatchedGenerationRequest, self._config.max_concurrent_requests)
        deadline = self._answer_deadline(grpc_call.context)
        call = convert.generate_call(message, grpc_call.client, grpc_call.identity, grpc_call.metadata, deadline)
        outputs = await generator.generate(call)
        is_special = generator.is_special if call.params.token_ids else None
        response = await generator.pool.run(
            sum(output.num_details for output in outputs),
            lambda: convert.generate_response(outputs, is_special).SerializeToString(),
        )
        await grpc_call.write(response)

    async def _generate_stream(self, data: bytes, grpc_call: GrpcCall) -> None:
        generator = loaded(self._generator)
        message = parse(data, pb.SingleGenerationRequest, max_inputs=1)
        call = convert.generate_call(message, grpc_call.client, grpc_call.identity, grpc_call.metadata)
        is_special = generator.is_special if call.params.token_ids else None
        async with aclosing(generator.stream(call)) as outputs:
            async for output in outputs:
                fill = functools.partial(convert.fill_response, pb.GenerationResponse(), output, is_special)
                response = await generator.pool.run(output.num_details, fill)
                await grpc_call.write(response.SerializeToString())

    async def _tokenize(self, data: bytes, grpc_call: GrpcCall) -> None:
        generator, max_bytes = loaded(self._generator), _MAX_REPLY_RATIO * self._config.grpc_max_message_bytes
        message = parse(data, pb.BatchedTokenizeRequest, MAX_TOKENIZE_INPUTS)
        call = convert.tokenize_call(message, max_bytes)
        encodings = await generator.tokenize(call)
        num_tokens = sum(len(encoding.packed_ids) for encoding in encodings)
        token_text = generator.token_decoder.tokenizer.token_text if call.return_tokens else None
        make_reply = functools.partial(convert.tokenize_response, encodings, token_text, max_bytes)
        response = await generator.pool.run(num_tokens, make_reply)
        await grpc_call.write(response)

    async def _model_info(self, data: bytes, grpc_call: GrpcCall) -> None:
        parse(data, pb.ModelInfoRequest)
        response = convert.model_info_response(loaded(self._generator).server_info)
        await grpc_call.write(response.SerializeToString())

    def _answer_deadline(self, context: Context) -> float | None:
        remaining = context.time_remaining() if self._config.deadline_partial else None
        return None if remaining is None else time.monotonic() + remaining
