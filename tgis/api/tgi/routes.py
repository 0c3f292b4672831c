"""TGI's routes."""

from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from tgis import __version__
from tgis.api.http.calls import HttpCall
from tgis.api.http.errors import HttpError
from tgis.api.http.operations import Operation
from tgis.api.http.responses import best_first, json_response, timing_headers
from tgis.api.openai.bodies import ChatCompletionRequest, CompletionRequest, PromptTokenizeRequest
from tgis.api.openai.operations import OpenAIApi
from tgis.api.tgi import convert
from tgis.api.tgi.errors import ERRORS
from tgis.api.tgi.schema import (
    ChatTokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    Invocation,
    SimpleToken,
    StreamDetails,
    StreamResponse,
    TokenizeRequest,
)
from tgis.frontend.calls import CallKind, GenerateCall, TokenizeCall
from tgis.frontend.output import RequestOutput
from tgis.frontend.tokenizer import reply_too_large

STREAM = CallKind.STREAM
_MIN_TOKEN_BYTES = len(msgspec.json.encode(SimpleToken(0, "", 0, 0)))
# Reply bytes per byte of the request limit: the event loop copies a reply in one piece.
_MAX_REPLY_RATIO = 4


class TgiApi:
    """The routes; chats and completions are OpenAI's."""

    def __init__(self, openai: OpenAIApi) -> None:
        self._openai = openai

    def operations(self) -> list[Operation]:
        """All of them, with the types of their bodies."""
        generate = (GenerateRequest,)
        any_request = (GenerateRequest, ChatCompletionRequest, CompletionRequest)
        chat, chat_tokens = (ChatCompletionRequest,), ChatTokenizeResponse
        texts = (TokenizeRequest, PromptTokenizeRequest)
        return [
            Operation("POST", "/", self.compat_generate, ERRORS, generate, list[GenerateResponse], StreamResponse),
            Operation("POST", "/generate", self.generate, ERRORS, generate, GenerateResponse),
            Operation("POST", "/generate_stream", self.generate_stream, ERRORS, generate, None, StreamResponse, STREAM),
            Operation("POST", "/tokenize", self.tokenize, ERRORS, texts, list[SimpleToken] | dict[str, Any], kind=None),
            Operation("POST", "/chat_tokenize", self.get_chat_tokenize, ERRORS, chat, chat_tokens, kind=None),
            Operation("POST", "/invocations", self.sagemaker_compatibility, ERRORS, any_request),
            Operation("GET", "/info", self.get_model_info, ERRORS, response=dict[str, Any]),
        ]

    async def compat_generate(self, call: HttpCall) -> web.StreamResponse:
        """Generate, or stream if the body says so.

        Client libraries expect an array with one answer, and a text that begins with the prompt unless told otherwise.
        """
        request = call.body(GenerateRequest)
        if request.parameters.return_full_text is None:
            request.parameters.return_full_text = True
        return await (_stream(call, request) if request.stream else _answer(call, request, in_array=True))

    async def generate(self, call: HttpCall) -> web.StreamResponse:
        """Generate text."""
        return await _answer(call, call.body(GenerateRequest))

    async def generate_stream(self, call: HttpCall) -> web.StreamResponse:
        """Stream a text as it is generated."""
        return await _stream(call, call.body(GenerateRequest))

    async def sagemaker_compatibility(self, call: HttpCall) -> web.StreamResponse:
        """Generate, chat or complete prompts, according to the body."""
        body = call.body(Invocation)
        if body.inputs is not UNSET:
            return await self.compat_generate(call)
        if body.messages is not UNSET:
            return await self._openai.chat_completions(call)
        if body.prompt is not UNSET:
            return await self._openai.completions(call)
        raise HttpError(422, "the body must have `inputs`, `messages` or `prompt`")

    async def tokenize(self, call: HttpCall) -> web.StreamResponse:
        """Tokenize a text; a prompt or a chat as vLLM does."""
        body = call.body(Invocation)
        if body.inputs is UNSET and (body.messages is not UNSET or body.prompt is not UNSET):
            return await self._openai.tokenize(call)
        request = call.body(TokenizeRequest)
        return json_response(await _tokens(call, request.inputs, add_special_tokens=True))

    async def get_chat_tokenize(self, call: HttpCall) -> web.StreamResponse:
        """Tokenize a chat."""
        text = await self._openai.prompt(call.body(ChatCompletionRequest))
        tokens = await _tokens(call, text, add_special_tokens=False)  # the template has written them
        shown = msgspec.json.encode(text)
        return json_response(b'{"tokenize_response":' + tokens + b',"templated_text":' + shown + b"}")

    async def get_model_info(self, call: HttpCall) -> web.StreamResponse:
        """Describe what is served, with the fields of older and newer versions of TGI."""
        server, config = call.generator.server_info, call.config
        names = ("max_concurrent_requests", "max_best_of", "max_stop_sequences", "max_client_batch_size")
        info = {name: getattr(config, name) for name in (*names, "max_waiting_tokens")}
        info |= {
            "model_id": config.shown_model,
            "model_sha": None,
            "model_pipeline_tag": None,
            "model_dtype": server.engine.dtype,
            "model_device_type": server.engine.device,
            "max_input_length": server.limits.longest_input,
            "max_input_tokens": server.limits.longest_input,
            "max_total_tokens": server.limits.max_sequence_length,
            "validation_workers": config.tokenization_workers,
            "max_batch_total_tokens": server.engine.token_capacity,
            "max_batch_size": server.engine.max_batch_size,
            "router": "tgis",
            "version": __version__,
            "fingerprint": server.engine.fingerprint,
            "sha": config.git_commit_hash,
            "docker_label": None,
        }
        return json_response(info)


def _generate_call(call: HttpCall, request: GenerateRequest, *, details: bool, stream: bool) -> GenerateCall:
    given = request.parameters
    call.kind = CallKind.STREAM if stream else CallKind.SINGLE
    convert.check(given, call, streams=stream)
    params, n = convert.params(given, call, details=details), given.best_of or 1
    return call.generate_call(params, [request.inputs], ["inputs"], given.adapter_id, n=n, stream=stream)


async def _answer(call: HttpCall, request: GenerateRequest, *, in_array: bool = False) -> web.StreamResponse:
    given = request.parameters
    wants_details = given.details or given.decoder_input_details
    wants_tokens = wants_details or (given.best_of or 1) > 1 or bool(given.top_n_tokens)
    generate_call = _generate_call(call, request, details=wants_tokens, stream=False)
    outputs = best_first(await call.generator.generate(generate_call))
    headers = call.compute_headers([request.inputs]) | timing_headers(outputs[:1], outputs[0].input_token_count)

    def make_body() -> bytes:
        answer = GenerateResponse(_full_text(outputs[0], request))
        if wants_details:
            answer.details, *others = (convert.details(output, given, call.generator) for output in outputs)
            for other, output in zip(others, outputs[1:], strict=True):
                other.generated_text = _full_text(output, request)
            answer.details.best_of_sequences = others or UNSET
        return msgspec.json.encode([answer] if in_array else answer)

    body = await call.generator.pool.run(sum(output.num_details for output in outputs), make_body)
    return json_response(body, headers)


async def _stream(call: HttpCall, request: GenerateRequest) -> web.StreamResponse:
    """Send an event for each token."""
    generator, given = call.generator, request.parameters
    generate_call = _generate_call(call, request, details=True, stream=True)
    events = call.event_stream(call.compute_headers([request.inputs]))
    tokens, limits = convert.TokenConverter(generator), generator.server_info.limits
    num_input_tokens, last = 0, RequestOutput().tokens
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
                        reason = convert.finish_reason(output, num_input_tokens, given, limits)
                        seed = output.seed if given.samples else None
                        event.details = StreamDetails(reason, event.index, seed, num_input_tokens)
                await events.send(msgspec.json.encode(event))
    return events.response


async def _tokens(call: HttpCall, text: str, *, add_special_tokens: bool) -> bytes:
    """The tokens of a text, as JSON."""
    data, max_bytes = text.encode(), _MAX_REPLY_RATIO * call.config.payload_limit
    tokenize_call = TokenizeCall(
        texts=[text],
        truncate_input_tokens=0,
        return_tokens=True,
        return_offsets=True,
        add_special_tokens=add_special_tokens,
        max_tokens=max_bytes // _MIN_TOKEN_BYTES,
    )
    (encoding,) = await call.generator.tokenize(tokenize_call)

    def make_json() -> bytes:
        spans = zip(encoding.packed_ids, encoding.offsets, strict=True)
        return msgspec.json.encode(
            [SimpleToken(id_, data[start:stop].decode(errors="replace"), start, stop) for id_, (start, stop) in spans]
        )

    tokens = await call.generator.pool.run(len(encoding.packed_ids), make_json)
    if len(tokens) > max_bytes:
        raise reply_too_large(max_bytes)
    return tokens


def _full_text(output: RequestOutput, request: GenerateRequest) -> str:
    return request.inputs + output.text if request.parameters.return_full_text else output.text
