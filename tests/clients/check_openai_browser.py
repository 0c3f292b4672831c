"""The package openai in Chromium, from a page of another origin, against the server at SERVER_URL, whose engine repeats
the last message and which allows all origins.
"""

import functools
import http.server
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

URL = f"{os.environ['SERVER_URL']}/v1"
PACKAGES = Path("node_modules").absolute()  # of the working directory
PAGE = """<script type="module">
import OpenAI from '/openai/index.mjs';
const client = new OpenAI({baseURL: 'BASE', apiKey: 'x', maxRetries: 0, dangerouslyAllowBrowser: true});
const asked = {model: 'any', messages: [{role: 'user', content: 'hello</s>'}]};
let told = {};
try {
  told.text = (await client.chat.completions.create(asked)).choices[0].message.content;
  told.chunks = [];
  for await (const chunk of await client.chat.completions.create({...asked, stream: true}))
    told.chunks.push(chunk.choices[0]?.delta.content ?? '');
  told.models = (await client.models.list()).data.map((model) => model.id);
  await client.chat.completions.create({...asked, temperature: -1});
} catch (error) { told.error = String(error); }
await fetch('/told', {method: 'POST', body: JSON.stringify(told)});
</script>""".replace("BASE", URL)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the page and the packages, and keeps what the page tells."""

    extensions_map = {".mjs": "text/javascript", "": "text/html"}  # noqa: RUF012 - of the base class
    told: "queue.Queue[Any]" = queue.Queue()

    def do_GET(self) -> None:
        if self.path != "/":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode())
        return None

    def do_POST(self) -> None:
        self.told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()


@pytest.fixture
def origin() -> Iterator[str]:
    handler = functools.partial(Handler, directory=str(PACKAGES))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")
def test_chat_from_a_page(origin: str, tmp_path: Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path}"]
    with subprocess.Popen(["chromium", *options, origin], stderr=subprocess.DEVNULL) as browser:
        try:
            told = Handler.told.get(timeout=120)
        finally:
            browser.terminate()
    assert told.get("text") == "hello", told
    assert "".join(told["chunks"]) == "hello"
    assert len(told["chunks"]) > 2
    assert told["models"] == ["any"]
    assert "400" in told["error"]
    assert "temperature" in told["error"]
