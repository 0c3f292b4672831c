"""The lifecycle of the front-end process: ports, engine process, health, drain, exit code.

The ports open first (unhealthy, every call UNAVAILABLE), then the engine starts. The process exits with 0 on a
signal, and with 1 when the engine dies or hangs in a step; the cause is then in the termination log. An engine whose
heartbeats stop only turns health off, until they go on.
"""

import asyncio
import functools
import gc
import logging
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tgis import __version__
from tgis.api.clients import Clients
from tgis.api.grpc import private
from tgis.api.grpc.calls import GrpcCalls
from tgis.api.grpc.server import GrpcServer
from tgis.api.grpc.servicer import GenerationServicer
from tgis.api.http.auth import HttpAuth
from tgis.api.http.operations import HttpApi
from tgis.api.http.pages.routes import page_routes
from tgis.api.http.ports import HttpPorts
from tgis.api.http.probes import Probes
from tgis.api.openai.chat_template import ChatTemplate
from tgis.api.openai.operations import OpenAIApi
from tgis.api.tgi.routes import TgiApi
from tgis.config import Config
from tgis.errors import StartError, Unavailable
from tgis.frontend import request_log
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.engine_process import TICK_SECONDS, wait_first
from tgis.frontend.generation import Generator, ServerInfo
from tgis.frontend.lookups import ADAPTER_TIMEOUT, Lookups
from tgis.frontend.metric_families import ServiceState
from tgis.frontend.metrics import Metrics, ServiceMetrics
from tgis.frontend.tokenizer import Tokenizer
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.limits import adapter_store_options, admission, engine_options, placeholder_id, request_limits
from tgis.models.convert.fast_tokenizer import ensure_tokenizer
from tgis.models.convert.gguf import ensure_directory
from tgis.models.convert.weights import ensure_weights, needs_conversion
from tgis.models.files import (
    ModelFiles,
    eos_token_ids,
    find_model,
    find_weights,
    is_encoder_decoder,
)
from tgis.node import serve_node
from tgis.prompts.catalog import AdapterCatalog
from tgis.security.bearer import TokenFile
from tgis.security.tls import Certificates, TlsFiles
from tgis.startup_log import startup_lines
from tgis.tracing import make_tracer
from tgis.utils import logs, stop_signals
from tgis.utils.file_lock import scratch_directory
from tgis.utils.memory import return_unused_memory

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.00002  # until threads give the GIL to the event loop, which lets go of it in every call of gRPC
_LATE_SECONDS = 1.0  # worth a line in the log

Credentials = tuple[Certificates | None, TokenFile | None]  # of TLS and of bearer authentication, where it is on
_OTHER_WEIGHTS = ("fake", "hf_optimum_ort")  # engines with weights in other formats, or none
# Hundreds of streams make thousands of objects in each step, and drop them before the next. The collector would look at
# them four times a step at its first threshold of 700, the default, which takes a tenth of the CPU time.
_GC_THRESHOLDS = 5_000, 10, 10


def run(config: Config) -> int:
    """Serve until a signal, then return 0; StartError if the server cannot start or the engine fails."""
    server = prepare(config)
    server.convert_weights()  # not part of a check: it may take minutes
    with scratch_directory(config.cache_dir / "tmp") as scratch:
        if scratch:  # also of compilers: what they make becomes code, so nobody else may write there
            os.environ["TMPDIR"] = str(scratch)
        gc.freeze()  # what was imported stays: the end of an interrupted start would look at all of it
        sys.setswitchinterval(SWITCH_SECONDS)
        if config.node_rank:
            return private.run(serve_node(config, server.engine_options()))
        return private.run(server.serve())


def prepare(config: Config) -> "Server":
    """A server that can start; StartError if something is refused before the engine process looks at the weights."""
    for warning in config.warnings:
        log.warning("%s", warning)
    if not config.log_requests:
        logging.getLogger(request_log.__name__).setLevel(logging.WARNING)
    credentials = load_credentials(config)
    log.info("tgis %s, starting engine %s with model %s", __version__, config.engine, config.model_name)
    revision, hub_cache = config.revision, str(config.hub_cache)
    name = ensure_directory(config.model_name, config.cache_dir, revision, hub_cache)
    model = find_model(name, revision, hub_cache)
    if config.engine not in _OTHER_WEIGHTS and not needs_conversion(model.path):
        find_weights(model.path)
    tokenizer = ensure_tokenizer(model, config.cache_dir)
    return Server(config, model, tokenizer, credentials)


def load_credentials(config: Config) -> Credentials:
    """Load certificates and tokens, None where TLS or authentication is off; OptionError for unusable files."""
    cert, key, client_ca = config.tls_cert_path, config.tls_key_path, config.tls_client_ca_cert_path
    files = TlsFiles(str(cert), str(key), str(client_ca) if client_ca else None)
    certificates = Certificates(files) if cert and key else None
    return certificates, TokenFile(config.auth_token_path) if config.auth_token_path else None


class Server:
    """One run of the service."""

    def __init__(self, config: Config, model: ModelFiles, tokenizer: Path, credentials: Credentials) -> None:
        self._config = config
        self._certificates, self._tokens = credentials
        self._model = model
        self._tokenizer = Tokenizer.load(
            tokenizer, config.tokenization_workers, add_special_tokens=config.add_special_tokens
        )
        self._eos_ids = eos_token_ids(model) or self._tokenizer.eos_ids
        self._decoder = TokenDecoder(
            self._tokenizer,
            encoder_decoder=is_encoder_decoder(model.config),
            output_special_tokens=config.output_special_tokens,
            eos_ids=frozenset(self._eos_ids),
        )
        self._limits = request_limits(config, model)
        self._adapter_store = adapter_store_options(config, self._limits)
        self._structured_output = False  # until it is known whether the tokenizer supports it
        self._clients = Clients(config)
        self._admission = admission(config)
        self._service_metrics = ServiceMetrics(__version__, config.git_commit_hash or "", config.shown_model)
        count = self._service_metrics.call_ended
        on_rejected = self._service_metrics.authentication_failure.inc
        self._calls = GrpcCalls(self._clients, config, self._tokens, on_rejected, count)
        self._servicer = GenerationServicer(self._calls, config)
        self._started = time.monotonic()
        self._unhealthy_reason: str | None = "the model is still loading"
        self._metrics: Metrics | None = None  # created when the engine reports its limits
        api_key = config.api_key.text if config.api_key else None
        self._http_auth = HttpAuth(self._tokens, api_key, on_rejected)
        self._openai_api = OpenAIApi(config, AdapterCatalog(self._adapter_store), model.generation_config)
        self._chat_template: ChatTemplate | None = None
        self._tracer = make_tracer(config.otlp_endpoint, config.otlp_service_name, config.shown_model)

    def convert_weights(self) -> None:
        """Make safetensors if the model has older weights; StartError if that fails."""
        path, engine = self._model.path, self._config.engine
        has_graphs = engine == "hf_optimum_ort" and any(path.glob("**/*.onnx"))  # else hf_transformers takes its place
        if engine != "fake" and not has_graphs:
            self._model = replace(self._model, path=ensure_weights(path, self._config.cache_dir))

    def engine_options(self) -> EngineOptions:
        """The options that the engine process starts with."""
        return engine_options(self._config, self._limits, self._model, self._eos_ids, self._adapter_store)

    async def serve(self) -> int:
        """Start, serve, drain and stop; see `run`."""
        stop, hurry = stop_signals.futures()
        grpc_server = GrpcServer([self._servicer.handler()], self._config, self._calls, self._certificates)
        client = EngineClient()
        generator: asyncio.Future[Generator] = asyncio.get_running_loop().create_future()
        http_ports = self._make_http_ports(client, generator)
        loop_lag = asyncio.create_task(self._service_metrics.watch_event_loop(self._clients.awake))
        sweep = asyncio.create_task(self._clients.sweep_forever())
        try:
            ports = grpc_server.bind(), *await http_ports.start()
            await grpc_server.start()
            self._service_metrics.engine_started(await client.start(self.engine_options()))
            if info := await self._wait_until_ready(client, stop):
                generator.set_result(self._start_serving(grpc_server, client, info, ports))
                await self._monitor(grpc_server, client, stop)
            await self._drain(grpc_server, client, hurry)
            return self._exit_code(client, stop)
        finally:
            await grpc_server.stop()
            await client.stop()
            await http_ports.stop()
            loop_lag.cancel()
            sweep.cancel()
            self._tokenizer.close()
            if self._chat_template:
                self._chat_template.close()
            if self._tracer:
                self._tracer.close()
            stop_signals.ignore()

    async def _wait_until_ready(self, client: EngineClient, stop: asyncio.Future[None]) -> EngineInfo | None:
        """The engine's description once it has loaded everything; None if it dies or a signal arrives first."""
        loading = asyncio.create_task(self._load(client))
        await wait_first([loading, client.died, stop])
        loading.cancel()
        return loading.result() if loading.done() and not client.died.done() else None

    async def _load(self, client: EngineClient) -> EngineInfo:
        vocabulary = await asyncio.to_thread(self._decoder.vocabulary)
        client.send(vocabulary)
        self._structured_output = bool(vocabulary.tokens)
        if template := await asyncio.to_thread(ChatTemplate.load, self._model.path):
            self._chat_template = template
            self._openai_api.chat.template = template
        info = await asyncio.shield(client.ready)
        try:
            await self._load_lora_modules(client, info)
        except Unavailable as error:
            raise StartError(await client.died) from error
        return info

    async def _load_lora_modules(self, client: EngineClient, info: EngineInfo) -> None:
        """Find out at start what is wrong with an adapter, not at the first request that names it."""
        if self._config.lora_modules and not info.supports_adapters:
            raise StartError(f"LORA_MODULES: {info.model_class} takes no adapters")
        for name in self._config.lora_modules or {}:
            with ExitStack() as kept:
                found = await client.look_up(name, ADAPTER_TIMEOUT, kept)
                if found is not None and found.reason:
                    raise StartError(f"LORA_MODULES: {name}: {found.reason}")

    def _start_serving(
        self, grpc_server: GrpcServer, client: EngineClient, info: EngineInfo, ports: tuple[int, int, int | None]
    ) -> Generator:
        config = self._config
        server_info = ServerInfo(
            engine=info,
            limits=replace(
                self._limits,
                placeholder_id=placeholder_id(self._model, self._eos_ids, info.input_vocab_size),
                max_request_tokens=info.max_request_tokens,
                max_positions=info.max_positions,
                input_vocab_size=info.input_vocab_size,
                vocab_size=info.vocab_size,
            ),
            max_queued_tokens=config.max_queued_tokens,
            random_seed=config.random_seed,
            log_text=config.log_text,
        )
        self._compare_vocabularies(info)
        self._metrics = Metrics(self._limits, info)
        self._metrics.num_queued = lambda: len(client.queued())
        client.metrics = self._metrics
        lookups = Lookups(
            client,
            self._metrics,
            why_no_adapters=self._why_no_adapters(info),
            why_no_grammars=self._why_no_grammars(info),
        )
        generator = Generator(
            server_info, client, self._decoder, lookups, self._metrics, self._tracer, admission=self._admission
        )
        self._servicer.generator = generator
        self._service_metrics.engine_ready(info, time.monotonic() - self._started)
        self._service_metrics.set_state(ServiceState.SERVING)
        self._unhealthy_reason = None
        grpc_server.set_serving(True)
        return_unused_memory()
        gc.freeze()  # long-lived objects: keep them out of later collections
        gc.set_threshold(*_GC_THRESHOLDS)
        lengths = self._limits.max_sequence_length, self._limits.max_new_tokens
        for line in startup_lines(config, info, client.fallback_reason, lengths, ports):
            log.info("%s", line)
        facts = {"engine": info.engine, "model_class": info.model_class, "device": info.device, "dtype": info.dtype}
        facts |= {"max_batch_size": str(info.max_batch_size), "token_capacity": str(info.token_capacity)}
        log.info("serving %s after %.1f s", config.shown_model, time.monotonic() - self._started, extra=facts)
        return generator

    def _compare_vocabularies(self, info: EngineInfo) -> None:
        largest = self._tokenizer.max_token_id
        if largest >= info.input_vocab_size:
            text = "the tokenizer has token %r with id %d, the model has only ids below %d: inputs with it are refused"
            log.warning(text, self._tokenizer.token_text(largest), largest, info.input_vocab_size)

    async def _monitor(self, grpc_server: GrpcServer, client: EngineClient, stop: asyncio.Future[None]) -> None:
        """Return on a signal or when the engine dies; kill it if it has work but finishes no step for too long."""
        limit = self._config.step_timeout_seconds
        client.watchdog.tick(time.monotonic())  # nobody has, while the model was loading
        while not stop.done() and not client.died.done():
            if (late := client.watchdog.tick(time.monotonic())) > _LATE_SECONDS:
                log.warning("this process did not run for %.1f s: it was paused, or busy with something else", late)
            reason = client.watchdog.silence(time.monotonic())
            if client.seconds_stalled() > limit:
                reason = f"no step for {limit:g} s with requests waiting"
                client.kill(reason)
            self._set_health(grpc_server, reason)
            await wait_first([client.died, stop], timeout=TICK_SECONDS)

    def _set_health(self, grpc_server: GrpcServer, unhealthy_reason: str | None) -> None:
        healthy = unhealthy_reason is None
        if healthy != (self._unhealthy_reason is None):
            log.warning("health is %s", "on again" if healthy else f"off: {unhealthy_reason}")
            grpc_server.set_serving(healthy)
            self._service_metrics.engine_up.set(healthy)
        self._unhealthy_reason = unhealthy_reason

    async def _drain(self, grpc_server: GrpcServer, client: EngineClient, hurry: asyncio.Future[None]) -> None:
        """Reject new calls; give those in flight the grace period to finish, unless there is a `hurry`.

        Streams that nobody reads, reflection and calls without a message do not delay it.
        """
        self._unhealthy_reason = client.died.result() if client.died.done() else "the server is shutting down"
        self._service_metrics.set_state(ServiceState.DRAINING)
        self._clients.draining = self._admission.draining = True
        if client.died.done():
            self._service_metrics.engine_up.set(0)
        if (generator := self._servicer.generator) is None:
            return
        started, grace = time.monotonic(), self._config.shutdown_grace_seconds
        num_inputs, num_cancelled = generator.num_inputs, generator.num_cancelled
        log.info("draining: %d inputs in flight have %g s to finish", num_inputs, grace)
        stopped = asyncio.create_task(grpc_server.refuse_calls())
        idle = asyncio.gather(self._clients.wait_until_idle(), self._admission.wait_until_idle())
        await wait_first([idle, hurry], timeout=grace)
        await asyncio.gather(self._clients.end_calls(), self._admission.end_calls())
        await grpc_server.stop()
        await stopped
        cancelled = generator.num_cancelled - num_cancelled + generator.num_inputs  # some have yet to notice
        log.info("drained in %.1f s: %d of %d inputs were cancelled", time.monotonic() - started, cancelled, num_inputs)

    def _make_http_ports(self, client: EngineClient, generator: "asyncio.Future[Generator]") -> HttpPorts:
        batch_state = client.batch_state if self._config.debug_batch else None
        scrape = functools.partial(self._scrape, client)
        probes = Probes(lambda: self._unhealthy_reason, scrape, self._http_auth, batch_state)
        count = self._service_metrics.call_ended
        api = HttpApi(self._config, self._http_auth, self._admission, count, generator)
        openai = self._openai_api
        operations = [*TgiApi(self._config, openai.chat, openai.completions).operations(), *openai.operations()]
        api_routes = [api.route(operation) for operation in operations]
        pages = page_routes(operations, self._config.shown_model, needs_token=self._http_auth.needed)
        return HttpPorts(self._config, probes, [*api_routes, *pages], self._admission, self._certificates)

    def _why_no_adapters(self, info: EngineInfo) -> str | None:
        """Why adapters are unavailable, None if they are available."""
        if self._adapter_store is None:
            return "no adapter store was configured"
        if not info.supports_adapters:
            return f"{info.model_class} takes no adapters"
        return None

    def _why_no_grammars(self, info: EngineInfo) -> str | None:
        if not self._structured_output:
            return "structured output is not supported with this tokenizer"
        no_end = "structured output is not supported with this model: it has no token that ends an output"
        return None if info.has_end(self._eos_ids) else no_end

    def _scrape(self, client: EngineClient) -> bytes:
        self._service_metrics.set_lora_adapters(*client.lora_adapters())
        self._service_metrics.set_log_lines_dropped(logs.num_dropped_lines() + client.num_dropped_log_lines)
        self._service_metrics.resident_cache.set(client.resident_cache_bytes)
        if self._certificates:
            self._service_metrics.set_certificate_expiry(self._certificates.expiry)
        return self._service_metrics.scrape() + (self._metrics.scrape() if self._metrics else b"")

    def _exit_code(self, client: EngineClient, stop: asyncio.Future[None]) -> int:
        if stop.done() and not client.died.done():
            return 0
        raise StartError(client.died.result())
