"""Separates the thoughts of an output from its answer, as it grows; white space around a thought is dropped."""

import functools
from dataclasses import dataclass

import regex

from tgis.api.openai.tool_calls import Piece, ToolCallParser

_MAX_GAP = 64  # characters of white space before a thought


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks of a family of models."""

    begin: str
    end: str
    hidden: tuple[str, ...] = ()  # marks that are no text either; with them, a thought may begin anywhere
    next_message: str = ""  # written after a thought
    answer: str = ""  # written before an answer


THINK = ReasoningFormat("<think>", "</think>")
MISTRAL = ReasoningFormat("[THINK]", "[/THINK]")
GRANITE = ReasoningFormat("Here is my thought process:", "Here is my response:")
COMMAND = ReasoningFormat(
    "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>"), answer="<|START_RESPONSE|>"
)
_FINAL = "<|channel|>final<|message|>"
HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    (_FINAL, "<|channel|>commentary<|message|>", "<|start|>assistant", "<|end|>", "<|return|>", "<|call|>"),
    next_message="<|start|>assistant",
    answer=_FINAL,
)

# By the names of vLLM's parsers, in the order in which their marks are looked for.
REASONING_FORMATS = {
    "openai_gptoss": HARMONY,
    "cohere_command3": COMMAND,
    "mistral": MISTRAL,
    "granite": GRANITE,
    **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "olmo3", "nemotron_v3", "ernie45"), THINK),
}


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of a thought."""

    text: str


Part = Thought | Piece


class ReasoningParser:
    """The parser of one output."""

    def __init__(self, form: ReasoningFormat, prompt: str) -> None:
        """The end of the `prompt` may have begun a thought, or ended one that the model is not to have."""
        self._form = form
        state = thought_state(form, prompt)
        self._in_thought, self._may_begin = bool(state), state is None
        self._in_gap = self._in_thought
        self._held = ""  # perhaps the beginning of a mark

    def add(self, text: str, *, ended: bool) -> list[str | Thought]:
        """Parse more text, perhaps the last one."""
        parts: list[str | Thought] = []
        held, at = self._held + text, 0
        while at < len(held):
            mark = self._pattern().search(held, at, partial=not ended)
            part, at = held[at : mark.start() if mark else None], mark.start() if mark else len(held)
            if shown := part.lstrip() if self._in_gap else part:
                self._in_gap = self._may_begin = False
                parts.append(Thought(shown) if self._in_thought else shown)
            if mark is None or mark.partial:
                break
            begins = not self._in_thought and mark[0].endswith(self._form.begin)
            self._in_gap = self._in_gap or begins or self._in_thought
            self._in_thought, self._may_begin, at = begins, False, mark.end()
        self._held = held[at:]
        return parts

    def _pattern(self) -> "regex.Pattern[str]":
        """A pattern of the next marks."""
        first, anywhere, end, never = _patterns(self._form)
        if self._in_thought:
            return end
        return anywhere if self._form.hidden else first if self._may_begin else never


@functools.cache
def _patterns(form: ReasoningFormat) -> "list[regex.Pattern[str]]":
    begin, end = regex.escape(form.begin), regex.escape(form.end)
    anywhere = "|".join(map(regex.escape, (form.begin, *form.hidden)))
    return [regex.compile(pattern) for pattern in (rf"\A\s{{0,{_MAX_GAP}}}{begin}", anywhere, end, "(?!)")]


def thought_state(form: ReasoningFormat, prompt: str) -> bool | None:
    """True if the output continues a thought of the prompt; False if it has none, None if it may begin with one."""
    prompt = prompt.rstrip()
    if prompt.endswith(form.begin):
        return True
    return False if prompt.endswith(form.end) and not form.hidden else None


class OutputParser:
    """Finds thoughts and tool calls in one output. Nothing in a thought is a tool call."""

    def __init__(self, tools: ToolCallParser | None = None, reasoning: ReasoningParser | None = None) -> None:
        """Without parsers, all is text."""
        self._tools, self._reasoning = tools, reasoning

    @property
    def num_calls(self) -> int:
        return self._tools.num_calls if self._tools else 0

    def add(self, text: str, *, ended: bool) -> list[Part]:
        """Parse more text, perhaps the last one."""
        parsed: list[Part] = []
        for part in self._reasoning.add(text, ended=ended) if self._reasoning else [text]:
            parsed += self._tools.add(part) if self._tools and isinstance(part, str) else [part] if part else []
        return [*parsed, *(self._tools.finish() if self._tools and ended else ())]
