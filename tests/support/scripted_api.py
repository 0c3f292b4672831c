"""The HTTP APIs on a port of this process, with a generator whose outputs the test writes: bodies in, bodies out."""

import asyncio
import contextlib
import functools
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import aiohttp
import http_port
from scraped_metrics import make_metrics

from demo.fake_model import make_fake_model
from tgis.api.openai.reasoning import ReasoningFormat
from tgis.api.openai.template_probe import OutputFormats
from tgis.api.openai.tool_formats import HERMES
from tgis.config import Config
from tgis.frontend.calls import GenerateCall
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.engine_output import RequestTimings
from tgis.frontend.generation import Generator
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.tokenizer import Tokenizer
from tgis.frontend.validation import RequestLimits, validate
from tgis.ipc.messages import EngineInfo
from tgis.ipc.request import StopReason

LIMITS = RequestLimits(
    max_sequence_length=200, max_new_tokens=100, include_stop_sequence=True, vocab_size=257, input_vocab_size=257
)
CALL: Any = SimpleNamespace(  # what parameters of a request are read with
    config=Config(model_name="m"),
    generator=SimpleNamespace(
        server_info=SimpleNamespace(limits=LIMITS),
        special_token_ids=lambda texts: (2,) if "</s>" in texts else (),
    ),
)


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """The tokens of a text are its bytes."""
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer.load(make_fake_model(Path(directory)), workers=1)


class ScriptedGenerator(Generator):
    """Checks the parameters of calls, keeps the last call, and gives it the outputs."""

    def __init__(self, outputs: Sequence[RequestOutput | Exception]) -> None:
        self.outputs = outputs
        self.call: GenerateCall | None = None
        engine = EngineInfo("fake", "Fake", "cpu", "float32", 257, False, False, 4, 1000, 64, fingerprint="fp_1")
        self.server_info: Any = SimpleNamespace(limits=LIMITS, engine=engine)
        self._tokenizer = byte_tokenizer()
        self.token_decoder = TokenDecoder(self._tokenizer, (), encoder_decoder=False, output_special_tokens=True)
        self.pool, self.metrics = self._tokenizer.pool, make_metrics()

    async def generate(self, call: GenerateCall) -> list[RequestOutput]:
        return [output async for output in self.stream(call)]

    async def stream(self, call: GenerateCall) -> Any:
        self.call = call
        validate(call.params, LIMITS)
        for output in self.outputs:
            if isinstance(output, Exception):
                raise output
            yield output


class Answer(NamedTuple):
    """What a client gets, and the call that the generator has got."""

    status: int
    headers: Any
    body: Any  # JSON, or the list of a stream's events
    call: Any  # of the front end


def chat_template(reasoning: ReasoningFormat | None = None) -> Any:
    """The prompt is the last message; the model calls tools as Hermes does."""
    return SimpleNamespace(
        mentions=lambda text: text == "tools",
        render=lambda messages, *_, **_options: messages[-1]["content"],
        formats=OutputFormats(HERMES, reasoning),
    )


@contextlib.asynccontextmanager
async def _client(
    generator: ScriptedGenerator, reasoning: ReasoningFormat | None = None, **options: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    loop = asyncio.get_running_loop()
    config, template, loaded = Config(**{"model_name": "m", **options}), loop.create_future(), loop.create_future()
    template.set_result(chat_template(reasoning))
    loaded.set_result(generator)
    routes = [*http_port.api_routes(config, http_port.api_operations(config, template), loaded)]
    async with http_port.serving(routes) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        yield client


async def ask(path: str, body: Any, *outputs: RequestOutput | Exception, **options: Any) -> Answer:
    """Send a body to a server whose generator gives these outputs."""
    generator = ScriptedGenerator(outputs)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    async with _client(generator, **options) as client, client.post(path, data=data, headers=headers) as answer:
        text = await answer.text()
        content: Any = events(text) if answer.content_type == "text/event-stream" else json.loads(text)
        return Answer(answer.status, answer.headers, content, generator.call)


def events(stream: str) -> list[Any]:
    *parts, end = stream.split("\n\n")
    assert end == ""
    data = [part.partition("data: ")[2] for part in parts]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def output(
    text: str = "", reason: str = "NOT_FINISHED", tokens: Any = (), input_tokens: Any = (), **fields: Any
) -> RequestOutput:
    """An output as tables write it; tokens have one byte: text, logprob, rank, then text and logprob of candidates."""
    times = RequestTimings(arrived=0.0, submitted=0.0, scheduled=0.0)
    made = RequestOutput(text=text, timings=times, stop_reason=StopReason[fields.pop("stop_reason", reason)], **fields)
    made.tokens, made.input_tokens = [token(*row) for row in tokens], [token(*row) for row in input_tokens]
    return made


def token(text: str, logprob: float = -0.5, rank: int = 1, *tops: tuple[str, float]) -> TokenInfo:
    ids = [byte_tokenizer().encode_without_special_tokens(part)[0] for part in (text, *(top for top, _ in tops))]
    candidates = [(token_id, *top) for token_id, top in zip(ids[1:], tops, strict=True)]
    return TokenInfo(ids[0], text, logprob, rank, candidates)
