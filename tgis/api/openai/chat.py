"""The messages of a chat become a prompt, and its outputs become choices."""

import functools
import random
import string
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from tgis.api.openai.answers import finish_reason
from tgis.api.openai.bodies import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    Delta,
)
from tgis.api.openai.chat_template import ChatTemplate
from tgis.api.openai.logprobs import TokenTexts
from tgis.api.openai.messages import plain_messages, template_messages, template_tools
from tgis.api.openai.reasoning import OutputParser, Part, Thought
from tgis.api.openai.template_process import TemplateError
from tgis.api.openai.tool_calls import ToolCallPiece, complete_calls
from tgis.api.openai.tool_choice import ToolChoice
from tgis.errors import InvalidRequest
from tgis.frontend.output import RequestOutput

# The only length of a tool call id that Mistral templates accept.
_ID_LENGTH = 9


def render(template: ChatTemplate | None, body: ChatCompletionRequest) -> str:
    """Return the messages and tools in the model's chat template."""
    tools = ToolChoice.of(body).tools
    if template is None:
        raise TemplateError("messages", "the model has no chat template")
    if tools and not template.mentions("tools"):
        raise InvalidRequest("tools", "the model's chat template takes no tools")
    apply = functools.partial(
        template.render,
        tools=template_tools(tools) or None,
        variables=_variables(body),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    messages = template_messages(body.messages)
    try:
        return apply(messages)
    except TemplateError:  # the second attempt raises what else is wrong
        return apply(plain_messages(messages))


def _variables(body: ChatCompletionRequest) -> dict[str, Any]:
    """The variables of a template, some of which are fields of the request."""
    thinking = False if body.reasoning_effort == "none" else body.enable_thinking
    given = {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinking, "thinking": thinking}
    return {name: value for name, value in given.items() if value is not None} | (body.chat_template_kwargs or {})


@dataclass(slots=True)
class Choice:
    """The choice of one output, complete or streamed."""

    index: int
    body: ChatCompletionRequest
    parser: OutputParser
    texts: TokenTexts
    has_begun: bool = False
    thoughts: list[str] = field(default_factory=list)  # pieces
    # The last piece of a tool call, until it is known to be the one with the finish reason.
    held: list[Part] = field(default_factory=list)

    def whole(self, output: RequestOutput) -> ChatChoice:
        """Convert a complete output."""
        pieces = [piece for piece in self._pieces(output) if not isinstance(piece, Thought)]
        text, named = complete_calls(pieces)
        calls = [
            CalledTool(CalledFunction(arguments, name), id=_new_id(), type="function") for name, arguments in named
        ]
        message = AssistantMessage(text or (None if calls or self.thoughts else ""), tool_calls=calls or UNSET)
        if self.thoughts:
            message.reasoning = message.reasoning_content = "".join(self.thoughts)
        return ChatChoice(self.index, message, self._logprobs(output), self._finish_reason(output) or "stop")

    def chunks(self, output: RequestOutput) -> list[ChunkChoice]:
        """Convert an output message of a stream."""
        if not output.generated_token_count and not output.stop_reason:
            return []  # before the first token
        deltas = [self._delta(piece) for piece in self._pieces(output)]
        finish, logprobs = self._finish_reason(output), self._logprobs(output)
        if not deltas and (finish or logprobs):
            deltas = [Delta() if finish else Delta(content="")]
        if deltas and not self.has_begun:
            self.has_begun, deltas[0].role = True, "assistant"
        chunks = [ChunkChoice(self.index, delta) for delta in deltas]
        if chunks:
            chunks[0].logprobs, chunks[-1].finish_reason = logprobs, finish
        return chunks

    def _finish_reason(self, output: RequestOutput) -> str | None:
        return finish_reason(output.stop_reason, self.parser.num_calls)

    def _logprobs(self, output: RequestOutput) -> ChatLogprobs | None:
        return self.texts.chat_logprobs(output.tokens, self.body.top_logprobs or 0) if self.body.logprobs else None

    def _pieces(self, output: RequestOutput) -> list[Part]:
        new = self.parser.add(output.text, ended=bool(output.stop_reason))
        pieces = [*self.held, *_limited(new, self.body)]
        self.held = []
        if not output.stop_reason and pieces and isinstance(pieces[-1], ToolCallPiece):
            self.held = [pieces.pop()]
        self.thoughts += [piece.text for piece in pieces if isinstance(piece, Thought)]
        return pieces

    def _delta(self, piece: Part) -> Delta:
        if isinstance(piece, str):
            return Delta(content=piece)
        if isinstance(piece, Thought):
            return Delta(reasoning=piece.text, reasoning_content=piece.text)
        call = CalledTool(CalledFunction(piece.arguments, piece.name), piece.index)
        if piece.name is not None:
            call.id, call.type = _new_id(), "function"
        return Delta(tool_calls=[call])


def _limited(pieces: list[Part], body: ChatCompletionRequest) -> list[Part]:
    """Drop all calls but the first if the request forbids parallel calls."""
    if body.parallel_tool_calls is not False:
        return pieces
    return [piece for piece in pieces if not isinstance(piece, ToolCallPiece) or not piece.index]


def _new_id() -> str:
    return "".join(random.choices(string.ascii_letters + string.digits, k=_ID_LENGTH))
