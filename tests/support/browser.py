"""Headless Chromium, driven over its DevTools protocol: what a person does with a page, and what they see."""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root has not, nor most containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
_KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
_TEXTS = {"Enter": "\r", " ": " "}  # of keys that have one
SHIFT, CONTROL = 8, 2


@contextmanager
def running_chromium(directory: Path) -> Iterator[int]:
    """The port of a browser's DevTools."""
    assert CHROMIUM is not None
    with (directory / "chromium.log").open("wb") as log:
        arguments = [CHROMIUM, *_FLAGS, f"--user-data-dir={directory}/chromium", "about:blank"]
        process = subprocess.Popen(arguments, stdout=log, stderr=log)
    try:
        yield _devtools_port(directory / "chromium/DevToolsActivePort", process)
    finally:
        process.terminate()
        process.wait()


def _devtools_port(path: Path, process: subprocess.Popen[bytes]) -> int:
    until = time.monotonic() + 60
    while not (path.exists() and "\n" in path.read_text()):
        assert process.poll() is None, "Chromium has ended"
        assert time.monotonic() < until, "Chromium does not start"
        time.sleep(0.02)
    return int(path.read_text().split()[0])


@asynccontextmanager
async def open_page(
    port: int, url: str, width: int = 1200, height: int = 800, *, dark: bool = False, phone: bool = False
) -> AsyncIterator["BrowserPage"]:
    """A tab of a browser, at this address."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        async with client.put("/json/new?about:blank") as answer:
            tab = await answer.json()
        async with client.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = BrowserPage(socket)
            try:
                await page.enable()
                await page.view(width, height, dark=dark, phone=phone)
                await page.go(url)
                yield page
            finally:
                await page.close()


class BrowserPage:
    """One tab, with everything in it that went wrong and every address that it asked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loaded: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)  # by loader: one for each address
        self._reader = asyncio.create_task(self._read())
        self.problems: list[str] = []  # exceptions of scripts, and violations of policies
        self.requested: list[str] = []

    async def enable(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.setLifecycleEventsEnabled", enabled=True)

    async def view(self, width: int, height: int, *, dark: bool, phone: bool) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        await self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def go(self, url: str) -> None:
        answer = await self.call("Page.navigate", url=url)
        await self._loaded[answer["loaderId"]].wait()

    async def value(self, expression: str) -> Any:
        """The value of an expression in JavaScript, awaited if it is a promise."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, condition: str, seconds: float = 20) -> None:
        """Until an expression is true, looked at whenever the page is drawn."""
        poll = f"new Promise(done => {{ const look = () => ({condition}) ? done() : setTimeout(look, 10); look() }})"
        try:
            async with asyncio.timeout(seconds):
                await self.value(poll)
        except TimeoutError:
            raise AssertionError(f"not {condition} in: {await self.value('document.body.innerText')}") from None

    async def text(self, selector: str) -> str:
        found: str = await self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    async def type(self, text: str) -> None:
        """Where the focus is."""
        await self.call("Input.insertText", text=text)

    async def fill(self, selector: str, text: str) -> None:
        """Instead of what a field had."""
        await self.value(f"document.querySelector({json.dumps(selector)}).select()")
        await self.type(text)

    async def press(self, key: str, modifiers: int = 0) -> None:
        keys = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=_TEXTS.get(key, ""), **keys)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **keys)

    async def hover(self, selector: str, index: int = 0) -> None:
        x, y = await self._middle(selector, index)
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def click(self, selector: str, index: int = 0) -> None:
        x, y = await self._middle(selector, index)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def tap(self, selector: str, index: int = 0) -> None:
        """With a finger; what comes of it comes later."""
        x, y = await self._middle(selector, index)
        await self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        await self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    async def screenshot(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    async def call(self, method: str, **params: Any) -> Any:
        """A command of the protocol."""
        id_ = next(self._ids)
        self._answers[id_] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": id_, "method": method, "params": params})
        return await self._answers[id_]

    async def close(self) -> None:
        await self.call("Page.close")
        self._reader.cancel()

    async def _middle(self, selector: str, index: int) -> tuple[float, float]:
        find = f"document.querySelectorAll({json.dumps(selector)})[{index}]"
        x, y = await self.value(
            f"(e => {{ e.scrollIntoView({{block: 'nearest'}}); const b = e.getClientRects()[0];"
            f" return [b.x + b.width / 2, b.y + b.height / 2] }})({find})"
        )
        return x, y

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                self._answered(said)
            else:
                self._happened(said["method"], said["params"])

    def _answered(self, said: Any) -> None:
        future = self._answers.pop(said["id"])
        if future.done():
            return
        if "error" in said:
            future.set_exception(AssertionError(said["error"]))
        else:
            future.set_result(said["result"])

    def _happened(self, event: str, params: Any) -> None:
        match event:
            case "Page.lifecycleEvent" if params["name"] == "load":
                self._loaded[params["loaderId"]].set()
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["source"] != "network":  # statuses of refusals
                self.problems.append(params["entry"]["text"])
