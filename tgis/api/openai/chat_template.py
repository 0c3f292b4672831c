"""The model's chat template: from messages to the text of a prompt, by transformers' own renderer, in a sandbox."""

import logging
from pathlib import Path
from typing import Any, Self

from tgis.api.openai.template_probe import OutputFormats, probe_template
from tgis.api.openai.template_process import TemplateError, TemplateProcess
from tgis.errors import InvalidRequest, StartError
from tgis.models.files import read_if_any, read_text, special_tokens

log = logging.getLogger(__name__)

_DEFAULT, _TOOL_USE = "default", "tool_use"
_OUR_VARIABLES = frozenset(
    {"messages", "tools", "conversations", "chat_template", "add_generation_prompt", "continue_final_message"}
)

Message = dict[str, Any]
Tools = list[dict[str, Any]]


class ChatTemplate:
    """The templates of one model."""

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str], process: TemplateProcess) -> None:
        self._templates = templates
        self._special_tokens = special_tokens
        self._process = process
        self.formats = OutputFormats()

    @classmethod
    def load(cls, directory: Path, process: TemplateProcess, *parsers: str | None) -> Self | None:
        """Read it from a model's files; None if the model has none, StartError if it is broken.

        `parsers` are the formats of tool calls and of thoughts, by vLLM's names; without, the template is probed.
        """
        templates = _read_templates(directory)
        if not templates:
            return None
        for name, template in templates.items():
            try:
                process.render(conversations=[], chat_template=template)
            except TemplateError as error:
                text = "%s: the chat template %.80r does not compile: %.200s"
                log.warning(text, directory, name, " ".join(error.detail.split()))
        loaded = cls(templates, special_tokens(directory), process)
        loaded.formats = probe_template(loaded.render, *parsers)
        return loaded

    def mentions(self, text: str) -> bool:
        """True if any of the templates contains the text."""
        return any(text in template for template in self._templates.values())

    def render(
        self,
        messages: list[Message],
        tools: Tools | None = None,
        variables: dict[str, Any] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
    ) -> str:
        """Return the prompt of a chat; this takes long for long chats.

        As in transformers, the answer continues the last message if that is the assistant's and the flags are None.
        A TemplateError has the text of the template's own error. `variables` are additional ones for the template.
        """
        if add_generation_prompt and continue_final_message:
            text = "continue_final_message and add_generation_prompt are mutually exclusive"
            raise InvalidRequest("continue_final_message", text)
        variables = variables or {}
        if reserved := _OUR_VARIABLES & variables.keys():
            raise InvalidRequest("chat_template_kwargs", f"chat_template_kwargs must not have {min(reserved)}")
        if continue_final_message is None:
            continue_final_message = add_generation_prompt is None and _ends_with_answer(messages)
        template = self._templates[_TOOL_USE if tools and _TOOL_USE in self._templates else _DEFAULT]
        text = self._process.render(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=not continue_final_message and add_generation_prompt is not False,
            continue_final_message=continue_final_message,
            **self._special_tokens | variables,
        )
        return _without_lone_surrogates(text)


def _ends_with_answer(messages: list[Message]) -> bool:
    """True if the last message is text of the assistant."""
    last = messages[-1] if messages else {}
    given = last.get("content") if last.get("role") == "assistant" and not last.get("tool_calls") else None
    return isinstance(given, str) and bool(given.strip())


def _without_lone_surrogates(text: str) -> str:
    """JSON in JSON may escape them, but no text that is sent or tokenized has any."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _read_templates(directory: Path) -> dict[str, str]:
    """Read the templates by name, where transformers looks: template files, else the tokenizer's configuration."""
    files = {_DEFAULT: directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    found = {name: read_text(path) for name, path in files.items() if path.is_file()}
    if not found:
        config = directory / "tokenizer_config.json"
        given = read_if_any(config).get("chat_template")
        found = {_DEFAULT: given} if isinstance(given, str) else _named(given or [], config)
    if found and _DEFAULT not in found:
        raise StartError(f"{directory} has chat templates, but none with the name default")
    return found


def _named(templates: Any, path: Path) -> dict[str, str]:
    try:
        return {str(template["name"]): str(template["template"]) for template in templates}
    except (TypeError, KeyError) as error:
        raise StartError(f"{path}: chat_template is neither text nor a list of templates with names") from error
