"""The lifecycle of the front-end process: ports, engine process, health, drain, exit code.

The ports open first (unhealthy, every call UNAVAILABLE), then the engine starts. The process exits with 0 on a
signal, and with 1 when the engine dies or hangs in a step; the cause is then in the termination log. An engine whose
heartbeats stop only turns health off, until they go on.
"""

import asyncio
import gc
import logging
import sys
import time
from contextlib import ExitStack

import uvloop

from tgis import __version__
from tgis.api.http.probes import Probes
from tgis.api.openai.chat_template import ChatTemplate
from tgis.api.openai.template_process import TemplateProcess
from tgis.apis import Apis
from tgis.config import Config
from tgis.errors import LOADING, SHUTTING_DOWN, StartError, Unavailable
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.engine_process import TICK_SECONDS, EngineProcess, wait_first
from tgis.frontend.generation import Generator, ServerInfo
from tgis.frontend.lookups import ADAPTER_TIMEOUT, Lookups
from tgis.frontend.metric_families import ServiceState
from tgis.frontend.metrics import Metrics, ServiceMetrics
from tgis.frontend.records import Recorder
from tgis.ipc.messages import BatchState, EngineInfo
from tgis.limits import admission
from tgis.node import serve_node
from tgis.prepare import Preparation, prepare
from tgis.startup_log import startup_lines
from tgis.tracing import make_tracer
from tgis.utils import logs, stop_signals
from tgis.utils.memory import return_unused_memory, trim_regularly

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.00002  # until threads give the GIL to the event loop, which lets go of it in every call of gRPC
_LATE_SECONDS = 1.0  # worth a line in the log
# After the last call: gRPC sends its status, and HTTP connections that clients reuse are answered with 503 and closed.
_LAST_ANSWERS_SECONDS = 0.5
# Hundreds of streams make thousands of objects in each step, and drop them before the next. The collector would look at
# them four times a step at its first threshold of 700, the default, which takes a tenth of the CPU time.
_GC_THRESHOLDS = 5_000, 10, 10


def run(config: Config) -> int:
    """Serve until a signal, then return 0; StartError if the server cannot start or the engine fails."""
    preparation = prepare(config).with_safetensors()
    gc.freeze()  # what was imported stays: the end of an interrupted start would look at all of it
    sys.setswitchinterval(SWITCH_SECONDS)
    if config.node_rank:
        return uvloop.run(serve_node(config, preparation.engine_options()))
    return uvloop.run(serve(preparation))


async def serve(preparation: Preparation) -> int:
    return await Server(preparation).serve()


class Server:
    """One run of the service; create it inside the event loop."""

    def __init__(self, preparation: Preparation) -> None:
        config, loop = preparation.config, asyncio.get_running_loop()
        self._preparation = preparation
        self._started = time.monotonic()
        self._unhealthy_reason: str | None = LOADING
        self._admission = admission(config)
        self._service_metrics = ServiceMetrics(__version__, config.git_commit_hash or "", config.shown_model)
        self._process = EngineProcess()
        self._client: asyncio.Future[EngineClient] = loop.create_future()
        self._generator: asyncio.Future[Generator] = loop.create_future()
        self._template: asyncio.Future[ChatTemplate | None] = loop.create_future()
        self._template_process = TemplateProcess()
        apis = Apis(preparation, self._admission, self._service_metrics, self._generator, self._template)
        probes = Probes(self._why_unhealthy, self._scrape)
        self._grpc, self._http = apis.grpc_server(self._why_unhealthy), apis.http_ports(probes, self._batch_state)

    async def serve(self) -> int:
        """Start, serve, drain and stop; see `run`."""
        stop, second_signal = stop_signals.futures()
        background = [
            asyncio.create_task(self._service_metrics.watch_event_loop()),
            asyncio.create_task(trim_regularly()),
        ]
        try:
            ports = self._grpc.bind(), *await self._http.start()
            await self._grpc.start()
            self._service_metrics.engine_started(await self._process.start(self._preparation.engine_options()))
            if await self._until_ready(stop):
                self._start_serving(ports)
                await self._monitor(stop)
            await self._drain(second_signal)
            if self._process.died.done() or not stop.done():
                raise StartError(self._process.died.result())
            return 0
        finally:
            await self._grpc.stop()
            await self._process.stop()
            await self._http.stop()
            for task in background:
                task.cancel()
            self._preparation.tokenizer.close()
            self._template_process.close()
            if self._generator.done():
                self._generator.result().close()
            stop_signals.ignore()

    async def _until_ready(self, stop: asyncio.Future[None]) -> bool:
        """Return true once the engine has loaded everything, false if it dies or a signal arrives first."""
        loading = asyncio.create_task(self._load())
        await wait_first([loading, self._process.died, stop])
        loading.cancel()
        if not loading.done() or self._process.died.done():
            return False
        self._generator.set_result(loading.result())
        return True

    async def _load(self) -> Generator:
        config, decoder = self._preparation.config, self._preparation.token_decoder()
        # At most a second, before anything is served. glibc would keep the 9 MB that another thread frees.
        vocabulary = decoder.vocabulary()
        self._process.send(vocabulary)
        digest = asyncio.create_task(self._preparation.file_digest())
        path, process = self._preparation.template_path, self._template_process
        parsers = config.tool_call_parser, config.reasoning_parser
        self._template.set_result(await asyncio.to_thread(ChatTemplate.load, path, process, *parsers))
        info = await asyncio.shield(self._process.ready)
        info = self._preparation.with_fingerprint(info, await digest)
        metrics = Metrics(self._preparation.limits, info)
        client = EngineClient(self._process, metrics)
        self._client.set_result(client)
        await self._load_lora_modules(client, info)
        lookups = Lookups(
            client,
            metrics,
            why_no_adapters=self._why_no_adapters(info),
            why_no_grammars=self._why_no_grammars(info, has_vocabulary=bool(vocabulary.tokens)),
        )
        server_info = ServerInfo(
            engine=info,
            limits=self._preparation.limits_of(info),
            max_queued_tokens=config.max_queued_tokens,
            random_seed=config.random_seed,
            log_text=config.log_text,
        )
        recorder = Recorder(info, config.shown_model, config.record_path, config.record_max_mb << 20)
        tracer = make_tracer(config.otlp_endpoint, config.otlp_service_name, config.shown_model)
        return Generator(server_info, client, decoder, lookups, metrics, self._admission, tracer, recorder)

    async def _load_lora_modules(self, client: EngineClient, info: EngineInfo) -> None:
        """Report at start what is wrong with an adapter, not at the first request that names it."""
        modules = self._preparation.config.lora_modules or {}
        if modules and not info.supports_adapters:
            raise StartError(f"LORA_MODULES: {info.model_class} takes no adapters")
        for name in modules:
            with ExitStack() as resources:
                try:
                    answer = await client.acquire(name, ADAPTER_TIMEOUT, resources)
                except Unavailable as error:
                    raise StartError(await self._process.died) from error
                if answer is not None and answer.reason:
                    raise StartError(f"LORA_MODULES: {name}: {answer.reason}")

    def _start_serving(self, ports: tuple[int, int, int | None]) -> None:
        config, limits = self._preparation.config, self._preparation.limits
        info, seconds = self._generator.result().server_info.engine, time.monotonic() - self._started
        self._compare_vocabularies(info)
        self._service_metrics.engine_ready(info, seconds)
        self._service_metrics.set_state(ServiceState.SERVING)
        self._unhealthy_reason = None
        self._grpc.set_serving(True)
        return_unused_memory()
        gc.freeze()  # long-lived objects: keep them out of later collections
        gc.set_threshold(*_GC_THRESHOLDS)
        lengths = limits.max_sequence_length, limits.max_new_tokens
        for line in startup_lines(config, info, self._process.fallback_reason, lengths, ports):
            log.info("%s", line)
        facts = {"engine": info.engine, "model_class": info.model_class, "device": info.device, "dtype": info.dtype}
        facts |= {"max_batch_size": str(info.max_batch_size), "token_capacity": str(info.token_capacity)}
        log.info("serving %s after %.1f s", config.shown_model, seconds, extra=facts)

    def _compare_vocabularies(self, info: EngineInfo) -> None:
        tokenizer = self._preparation.tokenizer
        largest = tokenizer.max_token_id
        if largest >= info.input_vocab_size:
            text = "the tokenizer has token %r with id %d, the model has only ids below %d: inputs with it are refused"
            log.warning(text, tokenizer.token_text(largest), largest, info.input_vocab_size)

    async def _monitor(self, stop: asyncio.Future[None]) -> None:
        """Return on a signal or when the engine dies; kill it if it has work but finishes no step for too long."""
        process, limit = self._process, self._preparation.config.step_timeout_seconds
        process.watchdog.tick(time.monotonic())  # the time of loading is not counted
        while not stop.done() and not process.died.done():
            if (late := process.watchdog.tick(time.monotonic())) > _LATE_SECONDS:
                log.warning("this process did not run for %.1f s: it was paused, or busy with something else", late)
            reason = process.watchdog.silence(time.monotonic())
            if self._client.result().seconds_stalled() > limit:
                reason = f"no step for {limit:g} s with requests waiting"
                process.kill(reason)
            self._set_health(reason)
            await wait_first([process.died, stop], timeout=TICK_SECONDS)

    def _set_health(self, unhealthy_reason: str | None) -> None:
        healthy = unhealthy_reason is None
        if healthy != (self._unhealthy_reason is None):
            log.warning("health is %s", "on again" if healthy else f"off: {unhealthy_reason}")
            self._grpc.set_serving(healthy)
            self._service_metrics.engine_up.set(healthy)
        self._unhealthy_reason = unhealthy_reason

    async def _drain(self, second_signal: asyncio.Future[None]) -> None:
        """Refuse new calls; give those in flight the grace period to finish, unless a second signal comes."""
        died = self._process.died
        self._unhealthy_reason = died.result() if died.done() else SHUTTING_DOWN
        self._service_metrics.set_state(ServiceState.DRAINING)
        self._admission.draining = True
        if died.done():
            self._service_metrics.engine_up.set(0)
        if not self._generator.done():
            return
        started, grace = time.monotonic(), self._preparation.config.shutdown_grace_seconds
        num_inputs = self._admission.inputs.total
        log.info("draining: %d inputs in flight have %g s to finish", num_inputs, grace)
        stopped = asyncio.create_task(self._grpc.refuse_calls())
        await wait_first([asyncio.create_task(self._admission.wait_until_idle()), second_signal], timeout=grace)
        num_cancelled = self._admission.inputs.total
        await self._admission.end_calls()
        await asyncio.sleep(_LAST_ANSWERS_SECONDS)
        await self._grpc.stop()
        await stopped
        seconds = time.monotonic() - started
        log.info("drained in %.1f s: %d of %d inputs were cancelled", seconds, num_cancelled, num_inputs)

    def _why_unhealthy(self) -> str | None:
        return self._unhealthy_reason

    def _why_no_adapters(self, info: EngineInfo) -> str | None:
        """Why adapters are unavailable, None if they are available."""
        if self._preparation.adapter_store is None:
            return "no adapter store was configured"
        if not info.supports_adapters:
            return f"{info.model_class} takes no adapters"
        return None

    def _why_no_grammars(self, info: EngineInfo, *, has_vocabulary: bool) -> str | None:
        if not self._preparation.config.structured_output:
            return "structured output is turned off (STRUCTURED_OUTPUT)"
        if not has_vocabulary:
            return "structured output is not supported with this tokenizer"
        no_end = "structured output is not supported with this model: it has no token that ends an output"
        return None if info.has_end(self._preparation.eos_ids) else no_end

    async def _batch_state(self) -> BatchState:
        if not self._client.done():
            raise Unavailable(LOADING)
        return await self._client.result().batch_state()

    async def _scrape(self) -> bytes:
        """The metrics as text, rendered in a thread."""
        service, process, render = self._service_metrics, self._process, self._service_metrics.scrape
        service.set_log_lines_dropped(logs.num_dropped_lines() + process.num_dropped_log_lines)
        service.resident_cache.set(process.resident_cache_bytes)
        if certificates := self._preparation.certificates:
            service.set_certificate_expiry(certificates.expiry)
        if not self._generator.done():
            return await asyncio.to_thread(render)
        client, metrics = self._client.result(), self._generator.result().metrics
        service.set_lora_adapters(*client.lora_adapters())
        metrics.set_num_queued(len(client.queued()))
        return await asyncio.to_thread(lambda: render() + metrics.scrape())
