"""/ui in headless Chromium: what a person does there, with a server whose engine repeats its prompt."""

import json
import shlex
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from browser import CONTROL, SHIFT, BrowserPage, needs_chromium, open_page, running_chromium
from chat_templates import LAST_MESSAGE
from harness import Server, run_async, running_fake
from http_port import serving_while_loading

pytestmark = needs_chromium

SHARES = ["60.7 %", "22.3 %", "8.21 %", "3.02 %", "1.11 %"]  # e^-0.5, e^-1.5, ...: candidates of the fake engine
TOKEN = "secret-token"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running_chromium(tmp_path_factory.mktemp("chromium")) as port:
        yield port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("ui")
    adapter = directory / "store" / "tuned"
    adapter.mkdir(parents=True)
    (adapter / "decoder.pt").touch()
    options = {"DEBUG_BATCH": True, "PREFIX_STORE_PATH": directory / "store"}
    with running_fake(directory, {"step_seconds": 0.006}, LAST_MESSAGE, **options) as running:
        yield running


@asynccontextmanager
async def opened(
    chromium: int, server: Server, *, phone: bool = False, tokens: bool = True
) -> AsyncIterator[BrowserPage]:
    """/ui, once it knows what is served, showing tokens; nothing may go wrong, and nothing come from elsewhere."""
    url, size = f"http://localhost:{server.http_port}", (360, 640) if phone else (1200, 800)
    async with open_page(chromium, f"{url}/ui", *size, phone=phone) as page:
        await page.until("document.getElementById('served').textContent.includes('of context')")
        await page.click("#clear")  # what another test has left
        if tokens:
            await page.value("document.getElementById('shade').click()")
        yield page
        assert page.problems == []
        assert [each for each in page.requested if not each.startswith(url)] == []


async def answered(page: BrowserPage, how: str) -> None:
    await page.until(f"[...document.querySelectorAll('.facts')].at(-1)?.textContent.endsWith({how!r})")


async def ask(page: BrowserPage, text: str) -> None:
    await page.click("#text")
    await page.type(text)
    await page.press("Enter")


async def heading(page: BrowserPage) -> list[str]:
    """The heading of the card: the token and its probability."""
    found: list[str] = await page.value("[...document.querySelector('#card h2').childNodes].map(e => e.textContent)")
    return found


async def answer_with(page: BrowserPage, function: str) -> None:
    """Instead of the server's completions, what a function makes of fetch's options."""
    completions = f"path.endsWith('completions') ? ({function})(options) : real(path, options)"
    await page.value(f"const real = fetch; window.fetch = (path, options) => {completions}; 0")


async def focused(page: BrowserPage) -> str:
    found: str = await page.value("document.activeElement.id || document.activeElement.className")
    return found


@run_async
async def test_a_chat_is_streamed_and_its_tokens_explained(chromium: int, server: Server) -> None:
    async with opened(chromium, server) as page:
        names = await page.value("[...document.querySelectorAll('[name=model] option')].map(e => e.textContent)")
        assert names[1:] == ["tuned"]  # an adapter
        await page.fill("[name=max_tokens]", "20")
        await ask(page, "hello ")
        await answered(page, "cut at the limit")
        assert await page.value("document.querySelector('.answer').textContent") == "hello hello hello he"
        assert (await page.text(".facts")).startswith("6 tokens in · 20 out · first after ")
        await page.hover(".token", 4)
        card = await page.value("[...document.querySelectorAll('#card li')].map(e => e.innerText.split('\\n'))")
        assert card == [[letter, share] for letter, share in zip("opqrs", SHARES, strict=True)]
        assert await heading(page) == ["o", SHARES[0]]
        await page.hover("h1")
        assert not await page.value("document.querySelector('#card').matches(':popover-open')")
        await page.until("document.getElementById('batch').textContent.includes('0 running')")


@run_async
async def test_everything_works_by_keyboard(chromium: int, server: Server) -> None:
    async with opened(chromium, server) as page:
        assert await focused(page) == "text"
        await page.type("abc")
        await page.press("Enter", SHIFT)
        await page.type("def")
        await page.press("Enter")
        await answered(page, "cut at the limit")
        assert (await page.value("document.querySelector('.answer').textContent")).startswith("abc\ndefabc\n")
        while await focused(page) != "answer":
            await page.press("Tab", SHIFT)
        for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
            await page.press(key)
        others = [f"not {letter} {share}" for letter, share in zip("cdef", SHARES[1:], strict=True)]
        assert await page.text("#spoken") == ", ".join([f"b {SHARES[0]}", *others])
        assert await heading(page) == ["b", SHARES[0]]
        await page.press("Escape")
        assert not await page.value("document.querySelector('#card').matches(':popover-open')")
        await page.fill("[name=max_tokens]", "1000")
        while await focused(page) != "text":
            await page.press("Tab", SHIFT)
        await page.type("again")
        await page.press("Enter")
        await page.until("document.querySelectorAll('.answer')[1]?.children.length")
        await page.press("Escape")
        await answered(page, "stopped by you")


@run_async
async def test_a_prompt_is_continued_with_the_parameters_given(chromium: int, server: Server) -> None:
    async with opened(chromium, server) as page:
        await page.click(".modes label:last-of-type")
        await page.fill("[name=max_tokens]", "30")
        await page.fill("[name=stop]", "y\\nz")
        await page.click("#text")
        await page.type("x\U0001f98ay\nz ")
        await page.press("Enter", CONTROL)
        await answered(page, "complete")
        spans = await page.value("[...document.querySelectorAll('.token:not(.special)')].map(e => e.textContent)")
        assert spans == ["x", "\U0001f98a"]  # of one token, and of four
        await page.hover(".token", 1)
        assert await page.value("document.querySelectorAll('#card h2').length") == 4


@run_async
async def test_text_is_never_markup(chromium: int, server: Server) -> None:
    hostile = "<img src=x onerror=alert(1)><script>document.title = 'hacked'</script>&amp;"
    async with opened(chromium, server) as page:
        await page.fill("[name=max_tokens]", str(len(hostile)))
        await ask(page, hostile)
        await answered(page, "cut at the limit")
        await page.value("document.getElementById('shade').click()")
        for selector in (".question", ".answer", ".markdown"):
            assert await page.value(f"document.querySelector('{selector}').textContent") == hostile
        assert await page.value("document.querySelectorAll('body img, body script').length") == 0
        assert await page.value("document.title") == "tgis"


MARKDOWN = """\
### A [title](https://a.example/x?y)
<img src=x onerror=alert(1)> ![x](https://evil.example/leak) [bad](javascript:alert(1)) **bold**, *it* and `a*b*`

1. one
   - deeper
2. two

> said <b>

```html
<script>alert(1)</script>
```
| a | b |
|---|---|
| 1 | **2** |
"""


@run_async
async def test_markdown_has_the_elements_that_it_names_and_no_others(chromium: int, server: Server) -> None:
    async with opened(chromium, server, tokens=False) as page:
        parts = [MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)]
        chunks = [{"choices": [{"delta": {"content": part}, "finish_reason": None}]} for part in parts]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        await answer_with(page, f"async () => new Response({json.dumps(events)})")
        await ask(page, "hello")
        await page.until("document.querySelector('article:not(.running) table')")
        tags = await page.value("[...document.querySelectorAll('.markdown *')].map(e => e.localName).join(' ')")
        assert tags == (
            "h5 a p a strong em code ol li ul li li blockquote p div div small button pre code "
            "div table tr th th tr td td strong"
        )
        hrefs = await page.value("[...document.querySelectorAll('.markdown a')].map(e => [e.href, e.rel])")
        rel = "noopener noreferrer nofollow"
        assert hrefs == [["https://a.example/x?y", rel], ["https://evil.example/leak", rel]]  # not before a click
        shown = await page.text(".markdown")
        for text in ("<img src=x onerror=alert(1)> ![x](", "[bad](javascript:alert(1))", "a*b*", "said <b>"):
            assert text in shown
        assert await page.text(".markdown pre") == "<script>alert(1)</script>"


async def chat(page: BrowserPage) -> list[str]:
    """Questions and answers."""
    texts: list[str] = await page.value("[...document.querySelectorAll('.question, .markdown')].map(e => e.innerText)")
    return texts


@run_async
async def test_a_chat_survives_a_reload_and_can_be_changed(chromium: int, server: Server) -> None:
    async with opened(chromium, server, tokens=False) as page:
        await page.value("navigator.clipboard.writeText = async text => { window.copied = text }; 0")
        await page.fill("[name=max_tokens]", "4")
        for text in ("ab'c", "defg"):
            await ask(page, text)
            await page.until(f"document.querySelectorAll('article:not(.running)').length === {1 + (text == 'defg')}")
        assert await chat(page) == ["ab'c", "ab'c", "defg", "defg"]
        await page.click("[name=copy]", 1)
        assert await page.value("copied") == "defg"
        await page.click("[name=curl]", 1)
        command = await page.text("pre.curl")
        assert command == await page.value("copied")
        words = shlex.split(command.replace("\\\n", ""))
        assert words[:3] == ["curl", "-N", f"http://localhost:{server.http_port}/v1/chat/completions"]
        sent = json.loads(words[-1])
        assert [each["content"] for each in sent["messages"]] == ["ab'c", "ab'c", "defg"]
        assert server.post("/v1/chat/completions", words[-1].encode())[0] == 200
        await page.go(f"http://localhost:{server.http_port}/ui")
        await page.until("document.getElementById('served')?.textContent.includes('of context')")
        assert await chat(page) == ["ab'c", "ab'c", "defg", "defg"]
        await page.fill("[name=max_tokens]", "2")
        await page.click("[name=regenerate]", 1)
        await answered(page, "cut at the limit")
        assert await chat(page) == ["ab'c", "ab'c", "defg", "de"]
        await page.click("[name=edit]", 0)
        assert (await chat(page), await focused(page)) == ([], "text")
        assert await page.value("document.querySelector('#text').value") == "ab'c"
        assert await page.value("localStorage.length") == 0


@run_async
async def test_a_refusal_is_shown_beside_its_field_and_the_question_kept(chromium: int, server: Server) -> None:
    async with opened(chromium, server) as page:
        await page.fill("[name=temperature]", "-1")
        await page.click("#text")
        await page.type("hello")
        await page.click("#send")
        await page.until("!document.getElementById('error').hidden")
        assert await page.text("#error") == "temperature must be >= 0, got -1"
        assert await page.value("document.querySelector('[aria-invalid]').name") == "temperature"
        assert await page.value("document.querySelector('#text').value") == "hello"
        await page.fill("[name=temperature]", "0")
        await page.click("#send")
        await answered(page, "cut at the limit")
        assert await page.value("document.querySelectorAll('[aria-invalid]').length") == 0
        assert await page.value("document.querySelectorAll('article').length") == 1


@run_async
async def test_a_field_out_of_sight_that_is_wrong_is_shown(chromium: int, server: Server) -> None:
    async with opened(chromium, server, phone=True) as page:
        await page.value("document.querySelector('[name=max_tokens]').value = '1.5'")
        await page.tap("#text")
        await page.until("document.activeElement.id === 'text'")
        await page.type("hello")
        await page.tap("#send")
        await page.until("document.querySelector('#parameters').open")
        assert await page.value("document.querySelectorAll('article').length") == 0


@run_async
async def test_a_stop_frees_the_row(chromium: int, server: Server) -> None:
    async with opened(chromium, server, phone=True) as page:
        assert not await page.value("document.querySelector('#parameters').open")
        await page.tap("#parameters summary")
        await page.until("document.querySelector('#parameters').open")
        await page.fill("[name=max_tokens]", "1000")
        await page.tap("#text")
        await page.until("document.activeElement.id === 'text'")
        await page.type("hello ")
        await page.tap("#send")
        await page.until("document.querySelectorAll('.token').length > 9")
        await page.tap("#send")
        await answered(page, "stopped by you")
        server.wait_for_metric("tgi_batch_current_size 0.0")
        assert await page.value("document.documentElement.scrollWidth") <= 360
        await page.tap(".token")
        await page.until("document.querySelector('#card').matches(':popover-open')")
        assert await heading(page) == ["h", SHARES[0]]


@run_async
async def test_a_model_without_a_template_continues_prompts(chromium: int, tmp_path: Path) -> None:
    with running_fake(tmp_path) as plain:
        async with opened(chromium, plain) as page:
            await page.until("document.querySelector('[value=chat]').disabled")
            assert await page.value("document.querySelector('[value=prompt]').checked")
            assert await page.text("#batch") == ""  # /debug/batch is off
            await page.type("ab")
            plain.process.kill()
            await page.click("#send")
            await page.until("document.getElementById('error').textContent === 'The server cannot be reached.'")


@run_async
async def test_a_model_that_is_loading_is_waited_for(chromium: int) -> None:
    async with serving_while_loading() as url, open_page(chromium, f"{url}/ui") as page:
        await page.until("document.getElementById('served').textContent === 'the model is still loading'")


@run_async
async def test_the_page_asks_for_a_token(chromium: int, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKEN)
    with running_fake(tmp_path, AUTH_TOKEN_PATH=tmp_path / "tokens") as guarded:
        url = f"http://localhost:{guarded.http_port}/ui"
        async with open_page(chromium, url) as page:
            await page.until("document.activeElement.name === 'token'")
            assert await page.text("#error") == "a valid bearer token is required"
            await page.type(TOKEN)
            await page.press("Tab")
            await page.until("document.getElementById('error').hidden")
            await page.until("document.querySelector('[value=chat]').disabled")  # the model has no template
            await page.click("#text")
            await page.type("ab")
            await page.press("Enter", CONTROL)
            await answered(page, "cut at the limit")
            assert page.problems == []
