"""Chat templates as those of well-known models are, but shorter."""

import json
from pathlib import Path

from repository import REPOSITORY

from tgis.api.openai.chat_template import ChatTemplate
from tgis.api.openai.template_process import TemplateProcess

FOLDER = REPOSITORY / "tests/golden/chat_templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
HERMES, MISTRAL = TEMPLATES["hermes"], TEMPLATES["mistral"]

# Of the engine `fake`, which repeats its prompt: the answer is the last message, whatever the tools; with `marks`, and
# what ends a message and begins an answer.
LAST_MESSAGE = (
    "{%- if tools %}{% endif %}{{- messages[-1].content -}}"
    "{% for call in messages[-1].tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if marks %}|{% if add_generation_prompt %}>{% endif %}{% endif %}"
)


_TOKEN = {"__type": "AddedToken", "content": "</s>", "special": True}  # as in files of transformers


def write_template(directory: Path, template: str | list[dict[str, str]]) -> None:
    """Give a model a template, and names for its special tokens."""
    config = {"chat_template": template, "bos_token": "</s>", "eos_token": _TOKEN}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


PROCESS = TemplateProcess()  # of all tests


def load_template(directory: Path, *parsers: str) -> ChatTemplate:
    """The template of a model that has one."""
    template = ChatTemplate.load(directory, PROCESS, *parsers)
    assert template is not None
    return template
