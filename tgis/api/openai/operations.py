"""The operations of the OpenAI API."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from tgis import __version__
from tgis.api.http.calls import HttpCall
from tgis.api.http.operations import Operation
from tgis.api.http.responses import json_response
from tgis.api.openai.answers import Answer
from tgis.api.openai.bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    Model,
    ModelList,
    PromptTokenizeRequest,
)
from tgis.api.openai.chat import Choice, render
from tgis.api.openai.chat_template import ChatTemplate
from tgis.api.openai.completions import CompletionText, best_outputs, split_prompt
from tgis.api.openai.errors import ERRORS, RESPONSES_ERRORS
from tgis.api.openai.grammars import GrammarMarks
from tgis.api.openai.logprobs import TokenTexts
from tgis.api.openai.models import ServedModels
from tgis.api.openai.params import chat_params, check_numbers, completion_params, num_candidates
from tgis.api.openai.reasoning import OutputParser, ReasoningParser
from tgis.api.openai.requests import RequestReader
from tgis.api.openai.response_events import Response, ResponseStream
from tgis.api.openai.responses import ResponsesRequest, chat_body
from tgis.api.openai.template_probe import OutputFormats
from tgis.api.openai.tool_calls import ToolCallParser
from tgis.api.openai.tool_choice import ToolChoice, ToolGrammar
from tgis.config import Config
from tgis.frontend.calls import TokenizeCall
from tgis.frontend.output import RequestOutput
from tgis.prompts.catalog import AdapterCatalog


class OpenAIApi:
    """The routes, the served models and the request reader."""

    def __init__(
        self,
        config: Config,
        catalog: AdapterCatalog,
        generation_config: Mapping[str, Any],
        template: asyncio.Future[ChatTemplate | None],
    ) -> None:
        """`generation_config` and `template` are the model's; the template is set before the generator."""
        self._models = ServedModels((config.shown_model, *config.served_model_name, config.model_name), catalog)
        self._reader = RequestReader({} if config.generation_config == "none" else generation_config)
        self._template = template

    def operations(self) -> list[Operation]:
        """All of them, with the types of their bodies."""
        chat = (ChatCompletionRequest,), ChatCompletion, ChatCompletionChunk
        responses = (ResponsesRequest,), Response, dict[str, Any]
        completions = (CompletionRequest,), Completion, Completion
        any_id = r"{id:[\s\S]+}"  # an id may have slashes and line breaks
        return [
            Operation("POST", "/v1/chat/completions", self.chat_completions, ERRORS, *chat),
            Operation("POST", "/v1/responses", self.responses, RESPONSES_ERRORS, *responses),
            Operation("POST", "/v1/completions", self.completions, ERRORS, *completions),
            Operation("GET", "/v1/models", self._models.list_models, ERRORS, response=ModelList),
            Operation("GET", f"/v1/models/{any_id}", self._models.get_model, ERRORS, response=Model),
            Operation("POST", "/detokenize", self.detokenize, ERRORS, (DetokenizeRequest,), dict[str, str], kind=None),
            Operation("GET", "/version", self.version, ERRORS, response=dict[str, str]),
            Operation("GET", "/load", self.load, ERRORS, response=dict[str, int]),
        ]

    async def chat_completions(self, call: HttpCall) -> web.StreamResponse:
        """Answer a chat."""
        body = self._reader.read(call, ChatCompletionRequest)
        answer, choices = await self._chat(call, body, "chatcmpl-")
        decoder = call.generator.token_decoder

        def make_fields(outputs: list[RequestOutput]) -> dict[str, Any]:
            return {
                "choices": [choices[output.index].whole(output) for output in outputs],
                "prompt_logprobs": TokenTexts(decoder).prompt_logprobs(outputs[0].input_tokens, body.prompt_logprobs),
            }

        if body.stream:
            return await answer.stream(ChatCompletionChunk, lambda output: choices[output.index].chunks(output))
        return await answer.whole(ChatCompletion, make_fields)

    async def responses(self, call: HttpCall) -> web.StreamResponse:
        """Create a response."""
        request = self._reader.read(call, ResponsesRequest)
        body = await asyncio.to_thread(chat_body, request)
        answer, (choice,) = await self._chat(call, body, "resp_")
        response = ResponseStream(request, answer.common)
        answer.convert = response.events
        if body.stream:
            return await answer.stream(ChatCompletionChunk, choice.chunks)
        return await answer.whole(response.whole, lambda outputs: {"choices": choice.chunks(outputs[0])})

    async def _chat(self, call: HttpCall, body: ChatCompletionRequest, id_prefix: str) -> tuple[Answer, list[Choice]]:
        adapter = await self._models.adapter(body.model)
        check_numbers(body, call)
        choice, template = ToolChoice.of(body), self._template.result()
        known = template.formats if template else OutputFormats()
        form, reasoning = choice.format(known.tools), known.reasoning
        decoder = call.generator.token_decoder
        params = chat_params(body, call, keeps_marks=bool(form or reasoning))
        marks = GrammarMarks(decoder.tokenizer.special_token_id)
        if form and (choice.needs_grammar or params.grammar):
            answer_mark = reasoning.answer if reasoning else ""
            params.grammar = ToolGrammar(form, marks, answer_mark).spec(choice, params.grammar)
        n = body.n or 1
        text = await self.prompt(body)
        if reasoning and params.grammar:
            rules = marks.after_thought(reasoning, text, marks_answer=form is None)
            params.grammar = msgspec.structs.replace(params.grammar, after_thought=rules)
        generate_call = call.generate_call(params, [text], ["messages"], adapter, n=n, stream=bool(body.stream))
        answer = Answer(id_prefix, call, generate_call, body, adapter or self._models.names[0])

        def make_parser() -> OutputParser:
            tools = ToolCallParser(form, choice.schemas) if form else None
            return OutputParser(tools, ReasoningParser(reasoning, text) if reasoning else None)

        choices = [Choice(index, body, make_parser(), TokenTexts(decoder)) for index in range(n)]
        if reasoning:
            answer.thoughts = lambda: ["".join(choice.thoughts) for choice in choices]

        return answer, choices

    async def completions(self, call: HttpCall) -> web.StreamResponse:
        """Continue prompts."""
        body = self._reader.read(call, CompletionRequest)
        adapter = await self._models.adapter(body.model)
        max_tokens = call.generator.server_info.limits.max_sequence_length
        texts, token_ids = split_prompt(body.prompt, call.max_inputs, max_tokens)
        check_numbers(body, call, len(texts))
        n, candidates, decoder = body.n or 1, num_candidates(body), call.generator.token_decoder
        fields = [f"prompt[{index}]" for index in range(len(texts))]
        params = completion_params(body, call)
        generate_call = call.generate_call(
            params, texts, fields, adapter, n=candidates, stream=bool(body.stream), token_ids=token_ids
        )
        answer = Answer("cmpl-", call, generate_call, body, adapter or self._models.names[0])
        if body.echo and token_ids is not None:  # prompts that are too long fail later, so decode their end only
            texts = await decoder.tokenizer.decode_batch([ids[-max_tokens:] for ids in token_ids])
        choices = [
            CompletionText(index, body, text, TokenTexts(decoder))
            for index, text in enumerate(text for text in texts for _ in range(n))
        ]

        def make_fields(outputs: list[RequestOutput]) -> dict[str, Any]:
            pairs = zip(choices, best_outputs(outputs, candidates, n), strict=True)
            return {"choices": [chunk for choice, output in pairs for chunk in choice.chunks(output)]}

        if body.stream:
            return await answer.stream(Completion, lambda output: choices[output.index].chunks(output))
        return await answer.whole(Completion, make_fields)

    async def tokenize(self, call: HttpCall) -> web.StreamResponse:
        """Tokenize a prompt or a chat, as vLLM does."""
        body, generator = call.body(PromptTokenizeRequest, strict=False), call.generator
        text = await self.prompt(body) if body.prompt is None else body.prompt
        special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
        most = call.config.payload_limit // 2
        tokenize_call = TokenizeCall([text], 0, True, False, add_special_tokens=special, max_tokens=most)
        (encoding,) = await generator.tokenize(tokenize_call)

        def make_json() -> bytes:
            texts = map(generator.token_decoder.tokenizer.token_text, encoding.packed_ids)
            max_length = generator.server_info.limits.max_sequence_length
            answer = {"count": encoding.num_tokens, "max_model_len": max_length, "tokens": encoding.ids}
            return msgspec.json.encode(answer | {"token_strs": [*texts] if body.return_token_strs else None})

        return json_response(await generator.pool.run(encoding.num_tokens, make_json))

    async def detokenize(self, call: HttpCall) -> web.StreamResponse:
        """Convert tokens to text, as vLLM does."""
        ids = call.body(DetokenizeRequest).tokens
        (text,) = await call.generator.token_decoder.tokenizer.decode_batch([ids])
        return json_response({"prompt": text})

    async def version(self, _call: HttpCall) -> web.StreamResponse:
        """Report the version of the server."""
        return json_response({"version": __version__})

    async def load(self, call: HttpCall) -> web.StreamResponse:
        """Report the number of inputs in flight."""
        return json_response({"server_load": call.generator.admission.inputs.total})

    async def prompt(self, body: ChatCompletionRequest) -> str:
        """Return the messages and tools in the model's chat template."""
        return await asyncio.to_thread(render, self._template.result(), body)
