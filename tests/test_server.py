"""tgis.server: what ends a start that waits for an adapter of LORA_MODULES; how the engine is watched."""

import asyncio
import gc
import logging
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil  # type: ignore[import-untyped]
import pytest
from chat_templates import LAST_MESSAGE
from config_parsing import read
from harness import run_async, wait_until
from local_server import local_server
from msgspec.structs import replace as replace_fields
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from demo.fake_model import make_fake_model
from tgis import server as server_module
from tgis.config import Config
from tgis.engine_core import main as engine_main
from tgis.engine_core.lookups import LookupTable
from tgis.engines.fake import FakeEngine
from tgis.errors import LOADING, StartError, Unavailable
from tgis.frontend import request_log
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.engine_process import wait_first
from tgis.frontend.metrics import Metrics
from tgis.ipc.lookups import Acquired, AdapterRef
from tgis.ipc.messages import EngineInfo, Ready
from tgis.prepare import Preparation, prepare
from tgis.server import Server

INFO = EngineInfo("x", "X", "cpu", "float32", 257, False, False, 4, 1000, 64, lora_targets={"q_proj": (8, 8)})


class Waits:
    """An engine's transport; `asked` is done when it has been asked for an adapter."""

    def __init__(self) -> None:
        self.asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write(self, data: bytes) -> None:
        if b"acquire" in data and not self.asked.done():
            self.asked.set_result(None)


@pytest.fixture
def preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Preparation:
    monkeypatch.setattr(server_module, "ADAPTER_TIMEOUT", 1e6)
    model, adapter = make_fake_model(tmp_path / "model"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    options = {"MODEL_NAME": str(model), "DEPLOYMENT_FRAMEWORK": "fake", "CACHE_DIR": str(tmp_path)}
    return prepare(read(**options, LORA_MODULES=f"x={adapter}"))


async def waiting(
    preparation: Preparation, stop: asyncio.Future[None], info: EngineInfo = INFO
) -> tuple[Server, "asyncio.Task[bool]"]:
    """A start that has asked the engine for the adapter, or has failed."""
    server, transport = Server(preparation), Waits()
    server._process._transport = transport  # type: ignore[assignment]
    server._process.handle(Ready(info))
    start = asyncio.create_task(server._until_ready(stop))
    await wait_first([transport.asked, start])
    return server, start


@run_async
async def test_a_signal_does(preparation: Preparation) -> None:
    stop = asyncio.get_running_loop().create_future()
    certificates: Any = mock.Mock(expiry={"server": 5.0})
    server, start = await waiting(replace(preparation, certificates=certificates), stop)
    scrape = (await server._scrape()).decode().splitlines()
    shown = {'tgi_state{state="loading"} 1.0', 'tgi_state{state="serving"} 0.0', "tgi_engine_up 0.0"}
    assert shown | {'tgi_certificate_expiry_timestamp_seconds{certificate="server"} 5.0'} <= {*scrape}
    stop.set_result(None)
    assert not await start


@pytest.mark.parametrize(
    ("info", "problem", "reason"),
    [
        (replace_fields(INFO, lora_targets={}), "", "X takes no adapters"),
        (INFO, "a file is broken", "x: a file is broken"),
    ],
)
@run_async
async def test_an_unusable_adapter_does(preparation: Preparation, info: EngineInfo, problem: str, reason: str) -> None:
    server, start = await waiting(preparation, asyncio.get_running_loop().create_future(), info)
    server._process.handle(Acquired(1, reason=problem))
    with pytest.raises(StartError, match=f"^LORA_MODULES: {reason}$"):
        await start
    with pytest.raises(Unavailable, match=LOADING):
        await Server(preparation)._batch_state()
    off = Server(replace(preparation, config=replace(preparation.config, structured_output=False)))
    said = [off._why_no_grammars(INFO, has_vocabulary=True), server._why_no_grammars(INFO, has_vocabulary=False)]
    reasons = "turned off (STRUCTURED_OUTPUT)", "not supported with this tokenizer"
    assert said == [f"structured output is {reason}" for reason in reasons]


@run_async
async def test_the_engine_limits_requests_and_knows_the_adapters(preparation: Preparation, caplog: Any) -> None:
    of_engine: Any = {"max_request_tokens": 90, "max_positions": 80, "input_vocab_size": 257, "vocab_size": 250}
    stop, info = asyncio.get_running_loop().create_future(), replace_fields(INFO, **of_engine)
    config = replace(preparation.config, max_queued_tokens=7, random_seed=5, log_text=True)
    server, start = await waiting(replace(preparation, config=config), stop, info)
    server._process.handle(Acquired(1, adapter=AdapterRef("x", 0, 0, 1, 9)))
    assert await start
    known = server._generator.result().server_info
    assert known.limits == replace(preparation.limits, placeholder_id=256, **of_engine)
    assert (known.max_queued_tokens, known.random_seed, known.log_text) == (7, 5, True)
    for size in (257, 256):
        server._compare_vocabularies(replace_fields(INFO, input_vocab_size=size))
    warning = "the tokenizer has token '</s>' with id 256, the model has only ids below 256: inputs with it are refused"
    assert caplog.messages == [warning]


@run_async
async def test_the_end_of_the_engine_does_and_is_the_reason(preparation: Preparation) -> None:
    stop = asyncio.get_running_loop().create_future()
    server, start = await waiting(preparation, stop)
    server._process._process = mock.Mock(wait=mock.AsyncMock(return_value=-9))
    server._process.connection_lost(None)
    assert not await start
    assert "signal 9" in (reason := server._process.died.result())
    server._service_metrics.engine_up.set(1)
    await server._drain(stop)
    scrape = (await server._scrape()).decode().splitlines()
    assert {'tgi_state{state="draining"} 1.0', "tgi_engine_up 0.0"} <= {*scrape}
    assert (server._why_unhealthy(), server._admission.draining) == (reason, True)


@run_async
async def test_pauses_and_changes_of_health_are_logged(
    preparation: Preparation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, stop = Server(preparation), asyncio.get_running_loop().create_future()
    late, reasons = iter((100.0, 0.9, 1.5)), [None, "it hangs", "it hangs", None]  # a long start is no pause

    def silence(_now: float) -> str | None:
        if len(reasons) == 1:
            stop.set_result(None)
        return reasons.pop(0)

    monkeypatch.setattr(server_module, "TICK_SECONDS", 0.001)
    server._process.watchdog = mock.Mock(tick=lambda _now: next(late, 0.0), silence=silence)
    server._client.set_result(EngineClient(server._process, Metrics(preparation.limits, INFO)))
    server._unhealthy_reason = None
    monkeypatch.setattr(server._grpc, "set_serving", reported := mock.Mock())
    monkeypatch.setattr(server._service_metrics.engine_up, "set", reported)
    await server._monitor(stop)
    assert reported.mock_calls == [mock.call(False)] * 2 + [mock.call(True)] * 2
    pause = "this process did not run for 1.5 s: it was paused, or busy with something else"
    assert caplog.messages == [pause, "health is off: it hangs", "health is on again"]


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_process_serves_as_a_server_or_as_a_node(node_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served = {name: mock.AsyncMock(return_value=7) for name in ("serve", "serve_node")}
    monkeypatch.setattr(sys, "setswitchinterval", switch := mock.Mock())
    for name, replaced in {"prepare": (prepared := mock.Mock()), **served}.items():
        monkeypatch.setattr(server_module, name, replaced)
    frozen = gc.get_freeze_count()
    assert server_module.run(Config(model_name="m", node_rank=node_rank)) == 7
    assert [task.await_count for task in served.values()] == [1 - node_rank, node_rank]
    assert node_rank or served["serve"].mock_calls == [mock.call(prepared().with_safetensors())]
    assert gc.get_freeze_count() > frozen
    switch.assert_called_once_with(server_module.SWITCH_SECONDS)


def test_a_tokenizer_must_be_found(preparation: Preparation, tmp_path: Path) -> None:
    options = {"MODEL_NAME": str(preparation.model.path), "DEPLOYMENT_FRAMEWORK": "fake", "CACHE_DIR": str(tmp_path)}
    options |= {"HF_HUB_CACHE": str(tmp_path), "ADD_SPECIAL_TOKENS": "false", "OUTPUT_SPECIAL_TOKENS": "true"}
    backend = Tokenizer.from_file(str(preparation.model.path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing("</s> $A", special_tokens=[("</s>", 256)])
    (tokens := tmp_path / "tokens").mkdir()
    backend.save(str(tokens / "tokenizer.json"))
    made = prepare(read(**options, TOKENIZER_NAME=str(tokens)))
    assert (made.template_path, made.model.path) == (tokens, preparation.model.path)
    assert made.tokenizer.bos_token_id is None
    assert made.token_decoder().hidden_eos_ids == {*made.eos_ids}
    with pytest.raises(StartError, match=rf"^TOKENIZER_NAME: .* in the cache {tmp_path} "):
        prepare(read(**options, TOKENIZER_NAME="org/none", LOG_REQUESTS="false"))
    assert logging.getLogger(request_log.__name__).level == logging.WARNING
    logging.getLogger(request_log.__name__).setLevel(logging.NOTSET)


RUN = """tgis N, starting engine fake with model N
versions N
engine N
device N
limits N
ports N
try N
serving m after N s
single request: 3 tokens, MAX_TOKENS
draining: 0 inputs in flight have 30 s to finish
drained in N s: 0 of 0 inputs were cancelled"""


def test_a_run_from_start_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """What it logs, what the garbage collector leaves alone, and that no thread, child or span is left."""
    tracer, trim, freeze, closed = mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock()
    replaced = [(server_module, "make_tracer", tracer), (gc, "freeze", freeze), (FakeEngine, "close", closed.engine)]
    replaced += [(module, "return_unused_memory", trim) for module in (server_module, engine_main)]
    for target, name, value in [*replaced, (LookupTable, "close", closed.lookups)]:
        monkeypatch.setattr(target, name, value)
    gc.set_threshold(700, 10, 10)
    others, children = threading.enumerate(), psutil.Process().children()

    def left() -> set[str]:
        threads = {thread.name for thread in threading.enumerate() if thread not in others and not thread.daemon}
        return threads | {child.name() for child in psutil.Process().children() if child not in children}

    body = {"messages": [{"role": "user", "content": "a" * 300}], "max_tokens": 3}
    with local_server(tmp_path, None, LAST_MESSAGE, SERVED_MODEL_NAME="m") as server:
        assert (gc.get_threshold(), trim.call_count, freeze.call_count) == ((5_000, 10, 10), 2, 3)
        assert server.post("/v1/chat/completions", body)[0] == 200
        assert {"tokenizer_0", "python"} <= left()
    assert closed.mock_calls == [mock.call.lookups(), mock.call.engine()]
    assert tracer.mock_calls[0] == mock.call(None, None, "m")
    assert tracer.mock_calls[-1] == mock.call().close()
    wait_until(lambda: not left(), "end")
    (serving,) = [record for record in caplog.records if record.message.startswith("serving")]
    facts = {"engine": "fake", "model_class": "FakeEngine", "device": "none", "dtype": "none"}
    facts |= {"max_batch_size": "256", "token_capacity": str(1 << 40)}
    assert vars(serving).items() >= facts.items()
    logged = [line for line in caplog.messages if "did not run" not in line]  # where CPUs are short
    assert re.fullmatch(RUN.replace("N", ".*"), "\n".join(logged))
