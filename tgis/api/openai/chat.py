"""The messages of a chat become a prompt, and its outputs become choices."""

import functools
import random
import string
from dataclasses import dataclass, field

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
from tgis.api.openai.template_process import TemplateError
from tgis.api.openai.tool_calls import Piece, ToolCallParser, ToolCallPiece, complete_calls
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
        variables=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    messages = template_messages(body.messages)
    try:
        return apply(messages)
    except TemplateError:  # the second attempt raises what else is wrong
        return apply(plain_messages(messages))


@dataclass(slots=True)
class Choice:
    """The choice of one output, complete or streamed."""

    index: int
    body: ChatCompletionRequest
    parser: ToolCallParser | None
    texts: TokenTexts
    has_begun: bool = False
    # The last piece of a tool call, until it is known to be the one with the finish reason.
    held: list[Piece] = field(default_factory=list)

    def whole(self, output: RequestOutput) -> ChatChoice:
        """Convert a complete output."""
        text, named = complete_calls(self._pieces(output))
        calls = [
            CalledTool(CalledFunction(arguments, name), id=_new_id(), type="function") for name, arguments in named
        ]
        message = AssistantMessage(text or (None if calls else ""), tool_calls=calls or UNSET)
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
        call = CalledTool(CalledFunction(piece.arguments, piece.name), piece.index)
        if piece.name is not None:
            call.id, call.type = _new_id(), "function"
        return Delta(tool_calls=[call])


def _limited(pieces: list[Piece], body: ChatCompletionRequest) -> list[Piece]:
    """Drop all calls but the first if the request forbids parallel calls."""
    if body.parallel_tool_calls is not False:
        return pieces
    return [piece for piece in pieces if isinstance(piece, str) or not piece.index]


def _new_id() -> str:
    return "".join(random.choices(string.ascii_letters + string.digits, k=_ID_LENGTH))
