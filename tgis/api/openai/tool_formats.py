"""How families of models write tool calls: marks, names and the layout of arguments, by the names of vLLM's parsers.

All formats also read a JSON object with the name and the arguments: grammars write calls in that form where arguments
are not JSON.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class XmlParameters:
    """Arguments as marked texts; the types of the values come from the tool's schema."""

    before: str  # pattern before a value, with the parameter's name as the group `key`
    after: str  # pattern
    end: str  # mark after the last value
    call: tuple[str, str]  # written before and after the arguments
    parameter: tuple[str, str]  # written before and after a value


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are read, and one way to write them."""

    start: str  # before the first call
    end: str = ""  # after the last call; text may follow
    other_start: str = ""  # some models write this instead of `start`
    bare: str = ""  # characters that begin a call without a mark, at the beginning of an output
    skip: str = r"\s*"  # pattern of the text between calls
    named: str = r"(?!)"  # pattern of a name before its arguments, as the group `name`
    arguments: XmlParameters | str = "{}"  # behind such a name; or their brackets: {} for JSON, () for Python
    # Written are: start, unless it is bare, opening, calls with `between` between them, closing.
    opening: str = ""
    call: tuple[str, str] = ('{"name": "%s", "arguments": ', "}")  # before and after the arguments
    between: str | None = None  # None if there can be one call only
    closing: str = ""


_LIST = r"[\s\[\],]*"
_NAME = r"(?P<name>[\w.-]+)"

HERMES = ToolFormat(
    "<tool_call>",
    "</tool_call>",
    opening="\n",
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
)
QWEN3_CODER = replace(
    HERMES,
    named=f"<function={_NAME}>",
    arguments=XmlParameters(
        *(r"<parameter=(?P<key>[^<>\n]+)>\n?", r"\n?</parameter>", "</function>"),
        call=("<function=%s>\n", "</function>"),
        parameter=("<parameter=%s>\n", "\n</parameter>\n"),
    ),
)
GLM = ToolFormat(
    "<tool_call>",
    "</tool_call>",
    named=rf"{_NAME}\s*(?=<arg_key>|</tool_call>)",
    arguments=XmlParameters(
        *(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>", "</arg_value>", "</tool_call>"),
        call=("%s\n", ""),
        parameter=("<arg_key>%s</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    between="</tool_call>\n<tool_call>",
    closing="</tool_call>",
)
MISTRAL = ToolFormat(
    "[TOOL_CALLS]",
    skip=r"(?:(?!\[TOOL_CALLS\])[\s\[\],])*",
    named=rf"{_NAME}(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{{)",
    opening=" [",
    between=", ",
    closing="]",
)
MISTRAL_ARGS = replace(MISTRAL, opening="", call=("%s[ARGS]", ""), between="[TOOL_CALLS]", closing="")
LLAMA3 = ToolFormat("<|python_tag|>", bare="{", skip=r"[\s;]*", call=('{"name": "%s", "parameters": ', "}"))
PYTHONIC = ToolFormat(  # Llama 3.2 and 4
    "<|python_start|>",
    "<|python_end|>",
    other_start="<|python_tag|>",
    bare="[{",
    skip=_LIST,
    named=rf"{_NAME}\(",
    arguments="()",
)
OLMO3 = ToolFormat(
    "<function_calls>",
    "</function_calls>",
    named=rf"{_NAME}\(",
    arguments="()",
    opening="\n",
    between="\n",
    closing="\n</function_calls>",
)
GRANITE = ToolFormat(  # and Phi 4 mini with the template of its authors
    "<|tool_call|>", "<|/tool_call|>", skip=_LIST, opening="[", between=", ", closing="]"
)
PHI4 = ToolFormat("functools[", "]", skip=r"[\s,]*", between=", ", closing="]")
COMMAND = ToolFormat(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    skip=_LIST,
    opening="[\n    ",
    call=('{"tool_name": "%s", "parameters": ', "}"),
    between=",\n    ",
    closing="\n]<|END_ACTION|>",
)
COMMAND_R = replace(
    COMMAND,
    start="Action:",
    end="]```",
    skip=r"(?:\s*```json)?[\s\[,]*",
    opening=" ```json\n[\n    ",
    closing="\n]```",
)
DEEPSEEK_V3 = ToolFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    skip=r"\s*(?:```\s*)?(?:<｜tool▁call▁end｜>\s*)?",
    named=rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?{_NAME}(?:<｜tool▁sep｜>|\s*```json)\s*(?=\{{)",
    call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n", "\n```<｜tool▁call▁end｜>"),
    between="\n",
    closing="<｜tool▁calls▁end｜>",
)
DEEPSEEK_V31 = replace(DEEPSEEK_V3, call=("<｜tool▁call▁begin｜>%s<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), between="")
HARMONY = ToolFormat(
    "<|channel|>commentary to=functions.",
    other_start="to=functions.",
    named=rf"{_NAME}(?:<\|channel\|>\w+)?(?:\s*<\|constrain\|>)?\s*(?:json)?<\|message\|>\s*(?=\{{)",
    call=("%s <|constrain|>json<|message|>", ""),
)

# Formats by vLLM's names; of those that read a call, the first one that writes it as the template does is taken.
TOOL_FORMATS = {
    "hermes": (HERMES,),
    "mistral": (MISTRAL, MISTRAL_ARGS),
    "llama3_json": (LLAMA3,),
    "llama4_json": (LLAMA3,),
    "qwen3_coder": (QWEN3_CODER,),
    "qwen3_xml": (QWEN3_CODER,),
    "glm45": (GLM,),
    "glm47": (GLM,),
    "deepseek_v3": (DEEPSEEK_V3,),
    "deepseek_v31": (DEEPSEEK_V31,),
    "granite": (GRANITE,),
    "granite4": (HERMES,),
    "phi4_mini_json": (PHI4, GRANITE),
    "cohere_command3": (COMMAND, COMMAND_R),
    "olmo3": (OLMO3,),
    "pythonic": (PYTHONIC,),
    "llama4_pythonic": (PYTHONIC,),
    "openai": (HARMONY,),
}
