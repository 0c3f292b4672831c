"""tgis.api.openai.chat_template: against apply_chat_template of transformers' tokenizers."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chat_templates import HERMES, LAST_MESSAGE, TEMPLATES, load_template, write_template
from tables import table
from transformers import PreTrainedTokenizerFast

from demo.fake_model import make_fake_model
from tgis.api.openai.bodies import ChatCompletionRequest
from tgis.api.openai.chat import render
from tgis.api.openai.chat_template import ChatTemplate
from tgis.api.openai.template_process import TemplateError, TemplateProcess
from tgis.errors import InvalidRequest, StartError, Unavailable

USER = {"role": "user", "content": "What's <b>the</b> weather in Köln? "}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "id": "a1B2c3D4e", "function": {}}]}
CALL["tool_calls"][0]["function"] = {"name": "weather", "arguments": {"city": "Köln", "days": 2}}  # type: ignore[index]
RESULT = {"role": "tool", "tool_call_id": "a1B2c3D4e", "content": '{"°C": 7}'}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "conversation": [USER, {"role": "assistant", "content": "Cold."}, {"role": "user", "content": "And\n\nnow?"}],
    "tools": [USER, CALL, RESULT],
    "called": [USER, {**CALL, "content": ""}],
    "continued": [USER, {"role": "assistant", "content": "It is about "}],
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "é", "parameters": PARAMETERS}}]


def model(directory: Path, template: str | list[dict[str, str]]) -> Path:
    write_template(make_fake_model(directory), template)
    return directory


def rendered(directory: Path, messages: list[dict[str, Any]], tools: Any = None, **variables: Any) -> str:
    return load_template(directory).render(messages, tools, variables)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str, chat: str, tools: Any, tmp_path: Path) -> None:
    directory = model(tmp_path, TEMPLATES[name])
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    continues = chat == "continued"
    expected = theirs.apply_chat_template(
        CHATS[chat],
        tools=tools,
        tokenize=False,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    assert rendered(directory, CHATS[chat], tools) == expected


@table("templates", "generation prompts")
def test_an_answer_begins_or_continues(row: dict[str, Any], tmp_path: Path) -> None:
    role, add, continues, expected = (row[name] for name in ("role", "add", "continues", "expected"))
    template, messages = load_template(model(tmp_path, LAST_MESSAGE)), [{"role": role, "content": "x"}]
    flags = {"add_generation_prompt": add, "continue_final_message": continues}
    assert template.render(messages, None, {"marks": expected != "x"}, **flags) == expected
    for variables, given in (({}, dict.fromkeys(flags, True)), ({"tools": 1, "messages": 1}, {})):
        with pytest.raises(InvalidRequest, match=r"exclusive$|chat_template_kwargs must not have messages$") as error:
            template.render(messages, None, variables, **given)
        assert error.value.field == ("chat_template_kwargs" if variables else "continue_final_message")


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    directory = model(tmp_path, HERMES)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }} {{ thinking }}")
    assert rendered(directory, [USER], thinking=False) == f"{USER['content']} False"


@table("templates", "variables")
def test_fields_of_a_request_are_variables_of_a_template(row: dict[str, Any], tmp_path: Path) -> None:
    shown = "{{ tools }} {{ reasoning_effort }} {{ enable_thinking }} {{ thinking }} {{ add_generation_prompt }}"
    body = msgspec.convert({"messages": [USER]} | row["body"], ChatCompletionRequest)
    assert render(load_template(model(tmp_path, shown)), body) == row["prompt"]


def test_tools_have_their_own_template(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "no tools"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    assert rendered(model(tmp_path, named), [USER], TOOLS) == "1"
    assert rendered(tmp_path, [USER]) == "no tools"


@table("templates", "what is said")
def test_what_a_template_says_is_an_error_of_the_request(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=row["said"]) as caught:
        rendered(model(tmp_path, row["template"]), [{"role": "system", "content": "x"}])
    assert caught.value.field == "messages"


ONCE = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
ALTERNATING = ONCE + (
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('alternate') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)


@table("templates", "later system messages")
def test_later_system_messages_where_a_template_forbids_them(row: dict[str, Any], tmp_path: Path) -> None:
    messages = [{"role": role, "content": f"{index}"} for index, role in enumerate(row["roles"])]
    body = msgspec.convert({"messages": messages}, ChatCompletionRequest)
    assert render(load_template(model(tmp_path, ALTERNATING)), body) == row["expected"]


def test_errors_do_not_show_the_messages(tmp_path: Path) -> None:
    """transformers' own error has the whole chat: the template drops the answer that is to be continued."""
    with pytest.raises(TemplateError) as caught:
        rendered(model(tmp_path, "{{ messages[0].content }}"), [USER, {"role": "assistant", "content": "secret"}])
    assert "secret" not in str(caught.value)
    assert str(USER["content"]) not in str(caught.value)


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    """Arguments of tool calls are JSON in JSON, so that they may escape what no text can have."""
    messages = [{"role": "user", "content": "a\ud800b\ud83d\ude00"}]
    assert rendered(model(tmp_path, "{{ messages[0].content }}"), messages) == "a\ufffdb\U0001f600"


def test_most_models_have_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(make_fake_model(tmp_path), TemplateProcess()) is None
    body = msgspec.convert({"messages": [USER], "tools": TOOLS}, ChatCompletionRequest)
    without_tools = load_template(model(tmp_path, "{{ messages[0].content }}"))
    no_tools = "the model's chat template takes no tools"
    for template, said in ((None, "the model has no chat template"), (without_tools, no_tools)):
        with pytest.raises(InvalidRequest, match=f"^{said}$"):
            render(template, body)


BROKEN = ["{% if x %}", "{{ x | zork }}", "a\n{{ x", "{% for x in x %}" * 99, f"{{% {'a' * 300} %}}"]


@pytest.mark.parametrize("template", BROKEN)
def test_one_that_does_not_compile_is_a_warning(template: str, tmp_path: Path, caplog: Any) -> None:
    """The model serves everything but chats."""
    load_template(model(tmp_path, [{"name": "default", "template": "x"}, {"name": "t", "template": template}]))
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path}: the chat template 't' does not compile: the chat template cannot be applied: ")
    assert ("\n" in said, len(said.partition(" compile: ")[2]) > 200) == (False, False)


# It ends in most probes, each of which would take a second, but not in that of thoughts.
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOP = f"{{% if thinking or 'Köln' in messages[0].content %}}{LOOP}{{% endif %}}"


@pytest.mark.parametrize("template", [LOOP, "{{ 'a' * 2000000000 }}", "{{ messages[0].content * 3000000 }}"])
def test_one_that_does_not_end_or_takes_too_much_memory_fails_alone(template: str, tmp_path: Path) -> None:
    either = f"{{% if messages[0].content == 'ok' %}}ok{{% else %}}{template}{{% endif %}}"
    with contextlib.closing(TemplateProcess(seconds=1)) as process:
        loaded = ChatTemplate.load(model(tmp_path, either), process)
        assert loaded is not None
        with pytest.raises(TemplateError, match=r"takes too long or too much memory|MemoryError"):
            loaded.render([USER])
        assert loaded.render([{"role": "user", "content": "ok"}]) == "ok"
        assert os.getpgid(process._process.pid) == process._process.pid  # Ctrl-C in a terminal does not end it
    with pytest.raises(Unavailable, match="shutting down"):
        loaded.render([USER])
    assert process._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("template", [7, [{"name": "default"}], [{"name": "rag", "template": "x"}]])
def test_broken_templates_are_refused_at_the_start(template: Any, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="template"):
        load_template(model(tmp_path, template))
