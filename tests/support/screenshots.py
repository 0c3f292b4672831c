"""The pages as they look: `python tests/support/screenshots.py` makes the images of docs/images anew."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from browser import BrowserPage, open_page, running_chromium
from harness import Server, running_server
from repository import REPOSITORY, TEST_CACHE

from demo.fetch import ensure

IMAGES = REPOSITORY / "docs/images"


async def ask(page: BrowserPage, text: str) -> None:
    """Wait for the end; with the same tokens each time where the parameters are open."""
    await page.until("document.querySelector('[name=model]').value")
    await page.fill("[name=seed]", "7")
    await page.click("#text")
    await page.type(text)
    await page.click("#send")
    await page.until("document.querySelector('#send').textContent === 'Send'", 60)


async def show_ui(server: Server, chromium: int) -> None:
    url = f"http://localhost:{server.http_port}/ui"
    async with open_page(chromium, url, 1100, 760) as page:
        await ask(page, "Who was Ada Lovelace? Answer in two sentences.")
        await page.until("document.getElementById('batch').textContent.includes('tokens/s')")
        await page.click("#shade")
        await page.hover(".token[data-p='3']", 2)
        await page.screenshot(IMAGES / "ui.png")
    async with open_page(chromium, url, 360, 640, dark=True, phone=True) as page:
        await page.click(".modes label:last-of-type")
        await ask(page, "Once upon a time, a small gray cat")
        await page.value("document.querySelector('#shade').click()")
        await page.tap(".token[data-p='2']")
        await page.until("document.querySelector('#card').matches(':popover-open')")
        await page.screenshot(IMAGES / "ui-phone.png")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made, running_chromium(Path(made)) as chromium:
        directory = Path(made)
        options: dict[str, Any] = {"DEBUG_BATCH": "true", "SERVED_MODEL_NAME": "SmolLM2-135M-Instruct"}
        with running_server(directory, ensure("smollm2", TEST_CACHE), **options) as server:
            asyncio.run(show_ui(server, chromium))


if __name__ == "__main__":
    main()
