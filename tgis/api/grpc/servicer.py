"""fmaas.GenerationService: converts messages and delegates to the Generator."""

import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from tgis.api.grpc import convert, wire
from tgis.api.grpc.handlers import stream_handler, unary_handler
from tgis.api.grpc.open_calls import OpenCall, OpenCalls
from tgis.api.grpc.status import Context, client_address
from tgis.errors import Unavailable
from tgis.frontend.budget import MESSAGE_BYTE, Account
from tgis.frontend.calls import GenerateCall
from tgis.frontend.generation import Generator
from tgis.pb import generation_pb2 as pb
from tgis.security.bearer import caller_identity
from tgis.utils import logs

GENERATION_SERVICE = "fmaas.GenerationService"

_REPLY_BYTES = 4  # of Tokenize, for each that a message may have: gRPC copies a reply in one piece on the event loop


class GenerationServicer:
    """The four RPCs; UNAVAILABLE while `generator` is None."""

    def __init__(
        self,
        calls: OpenCalls,
        *,
        bearer_auth: bool = False,
        limit_by_address: bool = False,
        deadline_partial: bool = False,
    ) -> None:
        self.generator: Generator | None = None
        self._generate_requests = wire.Reader(pb.BatchedGenerationRequest)
        self._stream_requests = wire.Reader(pb.SingleGenerationRequest)
        self._tokenize_requests = wire.Reader(pb.BatchedTokenizeRequest)
        self._calls = calls
        self._bearer_auth = bearer_auth
        self._limit_by_address = limit_by_address
        self._deadline_partial = deadline_partial

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handler to register with a server."""
        methods = {
            "Generate": unary_handler(self._calls, self._generate),
            "GenerateStream": stream_handler(self._calls, self._generate_stream),
            "Tokenize": unary_handler(self._calls, self._tokenize),
            "ModelInfo": unary_handler(self._calls, self._model_info),
        }
        return grpc.method_handlers_generic_handler(GENERATION_SERVICE, methods)

    async def _generate(self, data: bytes, context: Context) -> bytes:
        with self._admitted(data, context) as (generator, account):
            identity, deadline = self._identity(context), self._answer_deadline(context)
            call = await self._generate_requests.read(
                data,
                generator.slicer,
                lambda read: convert.generate_call(read, account, identity, logs.correlation_id(), deadline),
                generator.server_info.max_concurrent_inputs,
            )
            is_special = _is_special(call, generator)
            return await convert.generate_reply(await generator.generate(call), generator.slicer, is_special)

    async def _generate_stream(self, data: bytes, stream: OpenCall) -> None:
        with self._admitted(data, stream.context) as (generator, account):
            identity = self._identity(stream.context)
            call = await self._stream_requests.read(
                data,
                generator.slicer,
                lambda read: convert.generate_stream_call(read, account, identity, logs.correlation_id()),
                max_inputs=1,
            )
            is_special = _is_special(call, generator)
            async with aclosing(generator.stream(call)) as outputs:
                async for output in outputs:
                    await stream.write(await convert.generation_response(output, generator.slicer, is_special))

    async def _tokenize(self, data: bytes, context: Context) -> bytes:
        with self._admitted(data, context) as (generator, account):
            max_bytes = _REPLY_BYTES * self._calls.max_message_bytes
            call = await self._tokenize_requests.read(
                data,
                generator.slicer,
                lambda read: convert.tokenize_call(read, len(data), account, max_bytes),
                generator.server_info.max_tokenize_inputs,
            )
            return await convert.tokenize_reply(await generator.tokenize(call), generator.slicer, max_bytes)

    async def _model_info(self, data: bytes, _context: Context) -> bytes:
        wire.parse(data, pb.ModelInfoRequest)
        return convert.model_info_response(self._require_generator().server_info).SerializeToString()

    @contextmanager
    def _admitted(self, data: bytes, context: Context) -> Iterator[tuple[Generator, Account]]:
        """A call that the server can take, with what it holds in memory; its message is in there already."""
        generator = self._require_generator()
        client = self._identity(context)
        if not client and self._limit_by_address:
            client = client_address(context).encode()
        with generator.memory.account(client) as account:
            account.charge(MESSAGE_BYTE * len(data))
            yield generator, account

    def _identity(self, context: Context) -> bytes:
        return caller_identity(context, bearer_auth=self._bearer_auth)

    def _answer_deadline(self, context: Context) -> float | None:
        remaining = context.time_remaining() if self._deadline_partial else None
        return None if remaining is None else time.monotonic() + remaining

    def _require_generator(self) -> Generator:
        if self.generator is None:
            raise Unavailable("the model is still loading")
        return self.generator


def _is_special(call: GenerateCall, generator: Generator) -> convert.IsSpecial | None:
    return generator.token_decoder.tokenizer.is_special if call.params.token_ids else None
