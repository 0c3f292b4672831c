"""fmaas.GenerationService: converts messages and delegates to the Generator."""

import functools
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from tgis.api.clients import MESSAGE_BYTE, Account
from tgis.api.grpc import convert
from tgis.api.grpc.calls import GrpcCall, GrpcCalls
from tgis.api.grpc.parsing import parse
from tgis.api.grpc.status import Context
from tgis.config import Config
from tgis.errors import Unavailable
from tgis.frontend.calls import GenerateCall
from tgis.frontend.generation import MAX_TOKENIZE_INPUTS, Generator
from tgis.pb import generation_pb2 as pb
from tgis.security.bearer import caller_identity

GENERATION_SERVICE = "fmaas.GenerationService"

_REPLY_BYTES = 4  # of Tokenize, for each that a message may have: gRPC copies a reply in one piece on the event loop


class GenerationServicer:
    """The four RPCs; UNAVAILABLE while `generator` is None."""

    def __init__(self, calls: GrpcCalls, config: Config) -> None:
        self.generator: Generator | None = None
        self._calls = calls
        self._config = config

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handler to register with a server."""
        methods = {
            "Generate": self._calls.handler("Generate", self._generate),
            "GenerateStream": self._calls.handler("GenerateStream", self._generate_stream, stream=True),
            "Tokenize": self._calls.handler("Tokenize", self._tokenize),
            "ModelInfo": self._calls.handler("ModelInfo", self._model_info),
        }
        return grpc.method_handlers_generic_handler(GENERATION_SERVICE, methods)

    async def _generate(self, data: bytes, grpc_call: GrpcCall) -> bytes:
        with self._admitted(data, grpc_call) as (generator, account, identity):
            message = parse(data, pb.BatchedGenerationRequest, self._config.max_concurrent_requests)
            deadline = self._answer_deadline(grpc_call.context)
            metadata = grpc_call.context.invocation_metadata() or ()
            call = convert.generate_call(message, account, identity, metadata, deadline)
            outputs = await generator.generate(call)
            num_details, is_special = sum(output.num_details for output in outputs), _is_special(call, generator)
            return await generator.pool.run(
                num_details, lambda: convert.generate_response(outputs, is_special).SerializeToString()
            )

    async def _generate_stream(self, data: bytes, grpc_call: GrpcCall) -> None:
        with self._admitted(data, grpc_call) as (generator, account, identity):
            message = parse(data, pb.SingleGenerationRequest, max_inputs=1)
            metadata = grpc_call.context.invocation_metadata() or ()
            call = convert.generate_call(message, account, identity, metadata)
            is_special = _is_special(call, generator)
            async with aclosing(generator.stream(call)) as outputs:
                async for output in outputs:
                    fill = functools.partial(convert.fill_response, pb.GenerationResponse(), output, is_special)
                    response = await generator.pool.run(output.num_details, fill)
                    await grpc_call.write(response.SerializeToString())

    async def _tokenize(self, data: bytes, grpc_call: GrpcCall) -> bytes:
        with self._admitted(data, grpc_call) as (generator, account, _):
            max_bytes = _REPLY_BYTES * self._calls.max_message_bytes
            message = parse(data, pb.BatchedTokenizeRequest, MAX_TOKENIZE_INPUTS)
            call = convert.tokenize_call(message, len(data), account, max_bytes)
            encodings = await generator.tokenize(call)
            num_tokens = sum(len(encoding.packed_ids) for encoding in encodings)
            token_text = generator.token_decoder.tokenizer.token_text if call.return_tokens else None
            make_reply = functools.partial(convert.tokenize_response, encodings, token_text, max_bytes)
            return await generator.pool.run(num_tokens, make_reply)

    async def _model_info(self, data: bytes, _call: GrpcCall) -> bytes:
        parse(data, pb.ModelInfoRequest)
        response: bytes = convert.model_info_response(self._require_generator().server_info).SerializeToString()
        return response

    @contextmanager
    def _admitted(self, data: bytes, call: GrpcCall) -> Iterator[tuple[Generator, Account, bytes]]:
        """A call that the server can take: who calls, and what it holds in memory; its message is in there already."""
        generator = self._require_generator()
        identity = caller_identity(call.context, bearer_auth=self._config.auth_token_path is not None)
        with self._calls.clients.account(identity, call.client) as account:
            account.charge(MESSAGE_BYTE * len(data))
            yield generator, account, identity

    def _answer_deadline(self, context: Context) -> float | None:
        remaining = context.time_remaining() if self._config.deadline_partial else None
        return None if remaining is None else time.monotonic() + remaining

    def _require_generator(self) -> Generator:
        if self.generator is None:
            raise Unavailable("the model is still loading")
        return self.generator


def _is_special(call: GenerateCall, generator: Generator) -> convert.IsSpecial | None:
    return generator.token_decoder.tokenizer.is_special if call.params.token_ids else None
