"""POST /v1/chat/completions."""

import functools
import random
import string
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web
from msgspec import UNSET

from tgis.api.http.calls import HttpCall
from tgis.api.openai.answers import Answer, check_at_most, finish_reason
from tgis.api.openai.bodies import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    ToolCallDelta,
)
from tgis.api.openai.chat_template import ChatTemplate, TemplateError
from tgis.api.openai.logprobs import TokenTexts
from tgis.api.openai.messages import template_messages, template_tools
from tgis.api.openai.models import ServedModels
from tgis.api.openai.params import MAX_CHOICES, MAX_TOP_LOGPROBS, chat_params, num_choices
from tgis.api.openai.requests import RequestReader
from tgis.api.openai.tool_calls import (
    LLAMA3,
    Piece,
    ToolCallParser,
    ToolCallPiece,
    ToolFormat,
    complete_calls,
    tool_format,
)
from tgis.api.openai.tool_choice import ToolChoice, ToolGrammar
from tgis.errors import InvalidRequest
from tgis.frontend.output import RequestOutput

_MICROSECONDS_PER_MESSAGE = 4  # to make what the template takes of it
_ID_LENGTH = 9  # of a tool call: the templates of Mistral take no other


class ChatCompletions:
    """The route."""

    def __init__(self, models: ServedModels, reader: RequestReader) -> None:
        self._models = models
        self._reader = reader
        self.template: ChatTemplate | None = None  # of the model, which is known once it has loaded

    async def __call__(self, call: HttpCall) -> web.StreamResponse:
        body = self._reader.read(call, ChatCompletionRequest)
        choice, n = ToolChoice.of(body), num_choices(body)
        check_at_most("n", n, min(MAX_CHOICES, call.max_inputs))
        check_at_most("prompt_logprobs", body.prompt_logprobs or 0, MAX_TOP_LOGPROBS)
        form, decoder = self._tool_format(choice), call.generator.token_decoder
        params = chat_params(body, call, parses_tools=form is not None)
        if choice.tools and params.grammar:
            raise InvalidRequest("response_format", "Grammar and tools are mutually exclusive")
        if form and choice.needs_grammar:
            params = replace(params, grammar=ToolGrammar(form, decoder.tokenizer.special_token_id).spec(choice))
        text = await self.prompt(call, body)
        adapter = await self._models.adapter(body.model)
        generate_call = call.generate_call(params, [text], ["messages"], adapter, n=n, stream=bool(body.stream))
        answer = Answer("chatcmpl-", call, generate_call, body, adapter or self._models.names[0])
        parsers = [ToolCallParser(form, choice.names) if form else None for _ in range(n)]
        choices = [Choice(index, body, parser, TokenTexts(decoder)) for index, parser in enumerate(parsers)]
        if body.stream:
            return await answer.stream(ChatCompletionChunk, lambda output: choices[output.index].chunks(output))

        def make_fields(outputs: list[RequestOutput]) -> dict[str, Any]:
            return {
                "choices": [choices[output.index].whole(output) for output in outputs],
                "prompt_logprobs": TokenTexts(decoder).prompt_logprobs(outputs[0].input_tokens, body.prompt_logprobs),
            }

        return await answer.whole(ChatCompletion, make_fields)

    async def prompt(self, call: HttpCall, body: ChatCompletionRequest) -> str:
        """The messages and tools in the model's chat template."""
        shown = ToolChoice.of(body).tools
        if self.template is None:
            raise TemplateError("messages", "the model has no chat template")
        if shown and not self.template.mentions("tools"):
            raise InvalidRequest("tools", "the model's chat template takes no tools")
        convert = functools.partial(template_messages, body.messages)
        messages = await call.generator.pool.run(_MICROSECONDS_PER_MESSAGE * len(body.messages), convert)
        tools = list(template_tools(shown))
        return await self.template.render(
            messages,
            tools or None,
            body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )

    def _tool_format(self, choice: ToolChoice) -> ToolFormat | None:
        """The format of tool calls in the output; required calls are plain JSON if the template has no known format."""
        if not choice.tools:
            return None
        known = tool_format(self.template) if self.template else None
        return known or (LLAMA3 if choice.required else None)


@dataclass(slots=True)
class Choice:
    """One output, whole or while it is streamed."""

    index: int
    body: ChatCompletionRequest
    parser: ToolCallParser | None
    texts: TokenTexts
    has_begun: bool = False
    held: list[Piece] = field(default_factory=list)  # of a tool call: the last one must have the finish reason

    def whole(self, output: RequestOutput) -> ChatChoice:
        """The choice that a whole output becomes."""
        text, named = complete_calls(self._pieces(output))
        calls = [CalledTool(CalledFunction(arguments, name), _new_id()) for name, arguments in named]
        message = AssistantMessage(text or (None if calls else ""), tool_calls=calls or UNSET)
        return ChatChoice(self.index, message, self._logprobs(output), self._finish_reason(output) or "stop")

    def chunks(self, output: RequestOutput) -> list[ChunkChoice]:
        """The chunks that a message of the front end becomes."""
        if not output.generated_token_count and not output.stop_reason:
            return []  # before the first token
        deltas = [self._delta(piece) for piece in self._pieces(output)]
        finish, logprobs = self._finish_reason(output), self._logprobs(output)
        if not deltas and (finish or logprobs):
            deltas = [Delta() if finish else Delta(content="")]
        if deltas and not self.has_begun:
            self.has_begun, deltas[0].role = True, "assistant"
        found = [ChunkChoice(self.index, delta) for delta in deltas]
        if found:
            found[0].logprobs, found[-1].finish_reason = logprobs, finish
        return found

    def _finish_reason(self, output: RequestOutput) -> str | None:
        return finish_reason(output.stop_reason, self.parser.num_calls if self.parser else 0)

    def _logprobs(self, output: RequestOutput) -> ChatLogprobs | None:
        return self.texts.chat_logprobs(output.tokens, self.body.top_logprobs or 0) if self.body.logprobs else None

    def _pieces(self, output: RequestOutput) -> list[Piece]:
        if self.parser is None:
            return [output.text] if output.text else []
        pieces = [*self.held, *_limited(self.parser.add(output.text), self.body)]
        self.held = []
        if output.stop_reason:
            return [*pieces, *self.parser.finish()]
        if pieces and isinstance(pieces[-1], ToolCallPiece):
            self.held = [pieces.pop()]
        return pieces

    def _delta(self, piece: Piece) -> Delta:
        if isinstance(piece, str):
            return Delta(content=piece)
        function = CalledFunction(piece.arguments, piece.name)
        if piece.name is None:
            return Delta(tool_calls=[ToolCallDelta(function, piece.index)])
        return Delta(tool_calls=[ToolCallDelta(function, piece.index, _new_id(), "function")])


def _limited(pieces: list[Piece], body: ChatCompletionRequest) -> list[Piece]:
    """The pieces; only the first call is kept if the request allows no parallel calls."""
    if body.parallel_tool_calls is not False:
        return pieces
    return [piece for piece in pieces if isinstance(piece, str) or not piece.index]


def _new_id() -> str:
    return "".join(random.choices(string.ascii_letters + string.digits, k=_ID_LENGTH))
