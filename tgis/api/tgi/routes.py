"""TGI's routes: each reads its body, runs the Generator, and writes what comes."""

import functools
from collections.abc import Mapping, Sequence
from contextlib import aclosing

import msgspec
from aiohttp import web
from msgspec import UNSET

from tgis import __version__
from tgis.api.http.calls import HttpCall
from tgis.api.http.errors import HttpError
from tgis.api.http.operations import Handle, Operation
from tgis.api.http.responses import best_first, json_response, timing_headers
from tgis.api.openai.bodies import ChatCompletionRequest, CompletionRequest
from tgis.api.openai.chat import ChatCompletions
from tgis.api.tgi import convert
from tgis.api.tgi.errors import ERRORS
from tgis.api.tgi.schema import (
    BestOfSequence,
    ChatTokenizeResponse,
    Details,
    GenerateRequest,
    GenerateResponse,
    Info,
    Invocation,
    SimpleToken,
    StreamResponse,
    TokenizeRequest,
)
from tgis.config import Config
from tgis.frontend.calls import CallKind, GenerateCall, TokenizeCall
from tgis.frontend.generation import Generator
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.tokenizer import reply_too_large

Headers = Mapping[str, str]

_MIN_TOKEN_BYTES = len(msgspec.json.encode(SimpleToken(0, "", 0, 0)))
_REPLY_BYTES = 4  # of a tokenized text, for each that a body may have: the event loop copies a reply in one piece


class TgiApi:
    """The API of a server with this configuration."""

    def __init__(self, config: Config, chat: ChatCompletions, completions: Handle) -> None:
        """`chat` and `completions` are OpenAI's."""
        self._config = config
        self._chat, self._completions = chat, completions

    def operations(self) -> list[Operation]:
        """All of them, with the types of their bodies."""
        return [
            Operation("POST", "/", self._compat_generate, ERRORS, "compat_generate",
                      "Generate, or stream if the body says so",
                      (GenerateRequest,), list[GenerateResponse], StreamResponse),
            Operation("POST", "/generate", self._generate, ERRORS, "generate", "Generate text",
                      (GenerateRequest,), GenerateResponse),
            Operation("POST", "/generate_stream", self._generate_stream, ERRORS, "generate_stream",
                      "Stream a text as it is generated", (GenerateRequest,), None, StreamResponse, CallKind.STREAM),
            Operation("POST", "/tokenize", self._tokenize, ERRORS, "tokenize", "Tokenize a text",
                      (TokenizeRequest,), list[SimpleToken], kind=None),
            Operation("POST", "/chat_tokenize", self._chat_tokenize, ERRORS, "get_chat_tokenize", "Tokenize a chat",
                      (ChatCompletionRequest,), ChatTokenizeResponse, kind=None),
            Operation("POST", "/invocations", self._invocations, ERRORS, "sagemaker_compatibility",
                      "Whatever the body is a request for",
                      (GenerateRequest, ChatCompletionRequest, CompletionRequest)),
            Operation("GET", "/info", self._info, ERRORS, "get_model_info", "What is served", response=Info),
        ]  # fmt: skip

    async def _compat_generate(self, call: HttpCall) -> web.StreamResponse:
        """POST / of the client libraries: an array of one; the text begins with the prompt unless told otherwise."""
        request = call.body(GenerateRequest)
        if request.parameters.return_full_text is None:
            request.parameters.return_full_text = True
        if request.stream:
            return await self._stream(call, request)
        data, headers = await self._answer(call, request)
        return json_response(b"[" + data + b"]", headers)

    async def _generate(self, call: HttpCall) -> web.StreamResponse:
        return json_response(*await self._answer(call, call.body(GenerateRequest)))

    async def _generate_stream(self, call: HttpCall) -> web.StreamResponse:
        return await self._stream(call, call.body(GenerateRequest))

    async def _answer(self, call: HttpCall, request: GenerateRequest) -> tuple[bytes, Headers]:
        given = request.parameters
        best_of = given.best_of or 1
        wants_details = given.details or given.decoder_input_details
        generate_call = self._generate_call(
            call, request, CallKind.SINGLE, details=wants_details or best_of > 1 or bool(given.top_n_tokens)
        )
        outputs = best_first(await call.generator.generate(generate_call))
        winner = outputs[0]
        headers = call.compute_headers([request.inputs])
        headers |= timing_headers([winner], winner.input_token_count)
        if not wants_details:
            return msgspec.json.encode(GenerateResponse(_full_text(winner, request))), headers
        make_answer = functools.partial(_detailed_answer, outputs, request, call.generator)
        return await call.generator.pool.run(sum(output.conversion_cost for output in outputs), make_answer), headers

    async def _stream(self, call: HttpCall, request: GenerateRequest) -> web.StreamResponse:
        """An event for each token."""
        generator, given = call.generator, request.parameters
        generate_call = self._generate_call(call, request, CallKind.STREAM, details=True)
        events = call.event_stream(call.compute_headers([request.inputs]))
        tokens, limits = convert.TokenConverter(generator), generator.server_info.limits
        num_input_tokens = 0
        last: Sequence[TokenInfo] = ()
        texts = [request.inputs] if given.return_full_text else []
        async with aclosing(generator.stream(generate_call)) as outputs:
            async for output in outputs:
                num_input_tokens = num_input_tokens or output.input_token_count
                texts.append(output.text)
                last = output.tokens or last
                for info in last if output.stop_reason else output.tokens:  # an end may come without a token
                    event = StreamResponse(output.generated_token_count, tokens.token(info))
                    if given.top_n_tokens:
                        event.top_tokens = tokens.top_tokens(info)
                    if output.stop_reason:
                        event.generated_text = "".join(texts)
                        if given.details:
                            event.details = convert.stream_details(output, num_input_tokens, given, limits)
                    await events.send(msgspec.json.encode(event))
        return events.response

    def _generate_call(
        self, call: HttpCall, request: GenerateRequest, kind: CallKind, *, details: bool
    ) -> GenerateCall:
        given, config, streams = request.parameters, self._config, kind is CallKind.STREAM
        call.kind = kind
        convert.check(given, config, self._max_input_tokens(call.generator), streams=streams)
        special = call.special_token_ids((*given.stop, *given.stop_sequences))
        params = convert.raw_params(given, special, details=details, max_stop_sequences=config.max_stop_sequences)
        return call.generate_call(
            params, [request.inputs], ["inputs"], given.adapter_id, n=given.best_of or 1, stream=streams
        )

    async def _invocations(self, call: HttpCall) -> web.StreamResponse:
        body = call.body(Invocation)
        if body.inputs is not UNSET:
            return await self._compat_generate(call)
        if body.messages is not UNSET:
            return await self._chat(call)
        if body.prompt is not UNSET:
            return await self._completions(call)
        raise HttpError(422, "the body must have `inputs`, `messages` or `prompt`")

    async def _tokenize(self, call: HttpCall) -> web.StreamResponse:
        request = call.body(TokenizeRequest)
        return json_response(await self._tokens(call, request.inputs, add_special_tokens=True))

    async def _chat_tokenize(self, call: HttpCall) -> web.StreamResponse:
        """Tokenize the rendered chat; no special tokens are added, since the template has them."""
        text = await self._chat.prompt(call, call.body(ChatCompletionRequest))
        tokens = await self._tokens(call, text, add_special_tokens=False)
        shown = msgspec.json.encode(text)
        return json_response(b'{"tokenize_response":' + tokens + b',"templated_text":' + shown + b"}")

    async def _tokens(self, call: HttpCall, text: str, *, add_special_tokens: bool) -> bytes:
        """The tokens of a text, as JSON."""
        data, max_bytes = text.encode(), _REPLY_BYTES * self._config.payload_limit
        tokenize_call = TokenizeCall(
            texts=[text],
            num_bytes=len(data),
            client=call.client,
            truncate_input_tokens=0,
            return_tokens=True,
            return_offsets=True,
            add_special_tokens=add_special_tokens,
            max_tokens=max_bytes // _MIN_TOKEN_BYTES,
        )
        (encoding,) = await call.generator.tokenize(tokenize_call)
        make_json = functools.partial(convert.tokens_json, data, encoding)
        tokens = await call.generator.pool.run(len(encoding.packed_ids), make_json)
        if len(tokens) > max_bytes:
            raise reply_too_large(max_bytes)
        return tokens

    async def _info(self, call: HttpCall) -> web.StreamResponse:
        server, config = call.generator.server_info, self._config
        max_input_tokens, engine = self._max_input_tokens(call.generator), server.engine
        return json_response(
            Info(
                model_id=config.shown_model,
                model_sha=None,
                model_pipeline_tag=None,
                model_dtype=engine.dtype,
                model_device_type=engine.device,
                max_concurrent_requests=config.max_concurrent_requests,
                max_best_of=config.max_best_of,
                max_stop_sequences=config.max_stop_sequences,
                max_input_length=max_input_tokens,
                max_input_tokens=max_input_tokens,
                max_total_tokens=server.limits.max_sequence_length,
                validation_workers=config.tokenization_workers,
                max_client_batch_size=config.max_client_batch_size,
                max_batch_total_tokens=engine.token_capacity,
                max_batch_size=engine.max_batch_size,
                max_waiting_tokens=config.max_waiting_tokens,
                router="tgis",
                version=__version__,
                sha=config.git_commit_hash,
                docker_label=None,
            )
        )

    def _max_input_tokens(self, generator: Generator) -> int:
        return self._config.max_input_tokens or generator.server_info.limits.max_sequence_length - 1


def _detailed_answer(outputs: list[RequestOutput], request: GenerateRequest, generator: Generator) -> bytes:
    best, *others = outputs
    given = request.parameters
    sequences = [
        convert.details(BestOfSequence, other, given, generator, generated_text=_full_text(other, request))
        for other in others
    ]
    details = convert.details(Details, best, given, generator, best_of_sequences=sequences or UNSET)
    return msgspec.json.encode(GenerateResponse(_full_text(best, request), details))


def _full_text(output: RequestOutput, request: GenerateRequest) -> str:
    return request.inputs + output.text if request.parameters.return_full_text else output.text
