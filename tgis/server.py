"""The front-end process from start to end: both ports, the engine process, health, drain, exit code.

Owns no rule of the service. It starts the ports first (not healthy, every call UNAVAILABLE), then the engine; it
ends on a signal (exit 0), on the engine's death or on a step that never ends (exit 1, the cause in the termination
log).
"""

import asyncio
import gc
import logging
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tgis import __version__
from tgis.api.grpc.server import GrpcServer, GrpcServerOptions
from tgis.api.grpc.servicer import GenerationServicer
from tgis.api.http.probes import ProbeServer
from tgis.config import Config
from tgis.errors import OptionError, StartError
from tgis.frontend.adapters import AdapterClient
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.generation import Generator, ServerInfo
from tgis.frontend.metrics import Metrics
from tgis.frontend.output import OutputBuilderFactory
from tgis.frontend.tokenizer import Tokenizer
from tgis.frontend.validation import RequestLimits
from tgis.ipc.adapters import AdapterStoreOptions
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.models.convert.fast_tokenizer import ensure_tokenizer
from tgis.models.files import (
    ModelFiles,
    eos_token_ids,
    find_model,
    find_weights,
    is_encoder_decoder,
    max_sequence_length,
    pad_token_id,
)

log = logging.getLogger(__name__)

_MONITOR_SECONDS = 0.25


def run(config: Config) -> int:
    """Serve until told to stop; the exit code. StartError for what ends it otherwise."""
    for warning in config.warnings:
        log.warning("%s", warning)
    log.info("tgis %s starts the engine %s for %s", __version__, config.engine, config.model_name)
    model = find_model(config.model_name, config.revision, str(config.hub_cache))
    if config.engine not in ("fake", "hf_optimum_ort"):  # which look for files of their own, or for none
        find_weights(model.path)
    tokenizer = ensure_tokenizer(model, config.cache_dir)
    return asyncio.run(Server(config, model, tokenizer).serve())


class Server:
    """One run of the service."""

    def __init__(self, config: Config, model: ModelFiles, tokenizer: Path) -> None:
        self._config = config
        self._model = model
        self._eos_ids = eos_token_ids(model, tokenizer)
        self._tokenizer = Tokenizer.load(tokenizer, config.tokenization_workers)
        self._decoder = TokenDecoder(
            self._tokenizer,
            encoder_decoder=is_encoder_decoder(model.config),
            output_special_tokens=config.output_special_tokens,
            eos_ids=frozenset(self._eos_ids),
        )
        self._limits = _limits(config, model)
        self._prompts = _prompt_options(config, self._limits)
        self._service = GenerationServicer(bearer_auth=config.auth_token_path is not None)
        self._started = time.monotonic()
        self._unhealthy_reason: str | None = "the model is still loading"
        self._metrics: Metrics | None = None  # the engine tells what a full batch is

    async def serve(self) -> int:
        """The whole life; StartError for what cannot start."""
        stop = _stop_signal()
        listener = GrpcServer([self._service.handler()], _listener_options(self._config))
        client = EngineClient()
        probes = self._probes(client)
        try:
            ports = listener.bind(), await probes.start()
            await listener.start()
            await client.start(self._engine_options())
            if info := await self._wait_until_ready(client, stop):
                self._start_serving(listener, client, info, ports)
                await self._monitor(client, stop)
            await self._drain(listener, client)
            return self._exit_code(client, stop)
        finally:
            await listener.stop(0)
            await client.stop()
            await probes.stop()
            self._tokenizer.close()

    async def _wait_until_ready(self, client: EngineClient, stop: asyncio.Future[None]) -> EngineInfo | None:
        """What the engine is, once it is ready; None if it dies or a signal comes first."""
        await _wait_first([client.ready, client.died, stop])
        return client.ready.result() if client.ready.done() and not client.died.done() else None

    def _start_serving(
        self,
        listener: GrpcServer,
        client: EngineClient,
        info: EngineInfo,
        ports: tuple[int, int],
    ) -> None:
        """Let calls in."""
        config = self._config
        rows = OutputBuilderFactory(self._tokenizer, self._decoder, info.encoder_decoder)
        serving = ServerInfo(
            limits=replace(self._limits, placeholder_id=self._placeholder_id(info.vocab_size)),
            encoder_decoder=info.encoder_decoder,
            max_request_tokens=info.max_request_tokens,
            max_positions=info.max_positions,
            max_concurrent_inputs=config.max_concurrent_requests,
            max_queued_tokens=config.max_queued_tokens,
            log_text=config.log_text,
        )
        self._metrics = self._make_metrics(info)
        client.observer = self._metrics
        adapters = AdapterClient(client, self._metrics, self._why_no_adapters(info))
        self._service.generator = Generator(serving, client, self._tokenizer, adapters, rows, self._metrics)
        self._unhealthy_reason = None
        listener.set_serving(True)
        gc.freeze()  # what is loaded stays
        log.info("serving %s: %s on %s as %s", config.model_name, info.model_class, info.device, info.dtype)
        log.info("ready after %.1f s", time.monotonic() - self._started)
        for line in _usage_hints(config, *ports):
            log.info("%s", line)

    async def _monitor(self, client: EngineClient, stop: asyncio.Future[None]) -> None:
        """Return when a signal comes, the engine dies, or it has work and no step for too long."""
        limit = self._config.step_timeout_seconds
        while not stop.done() and not client.died.done():
            if client.seconds_stalled() > limit:
                self._unhealthy_reason = f"no step for {limit:g} s with requests waiting"
                client.kill(self._unhealthy_reason)
            await _wait_first([client.died, stop], timeout=_MONITOR_SECONDS)

    async def _drain(self, listener: GrpcServer, client: EngineClient) -> None:
        """Take no more calls, let those in flight finish within the grace."""
        self._unhealthy_reason = client.died.result() if client.died.done() else "the server is shutting down"
        if self._metrics is not None and client.died.done():
            self._metrics.engine_up(False)
        if self._service.generator is not None:
            self._service.generator.stop_accepting()
        await listener.stop(self._config.shutdown_grace_seconds)

    def _probes(self, client: EngineClient) -> ProbeServer:
        config = self._config
        inspect = client.snapshot if config.debug_batch else None
        return ProbeServer(config.bind_address, config.port, lambda: self._unhealthy_reason, self._scrape, inspect)

    def _placeholder_id(self, vocab_size: int) -> int:
        """The token shown for virtual ones: the one that pads, else one that ends a text, else 0."""
        ids = (pad_token_id(self._model.config), *self._eos_ids)
        return next((id_ for id_ in ids if id_ is not None and 0 <= id_ < vocab_size), 0)

    def _why_no_adapters(self, info: EngineInfo) -> str | None:
        """Why no adapter can be had, if so."""
        if self._prompts is None:
            return "no adapter store was configured"
        if not info.supports_adapters:
            log.warning("PREFIX_STORE_PATH is without effect: %s takes no adapters", info.model_class)
            return f"{info.model_class} takes no adapters"
        return None

    def _scrape(self) -> bytes:
        return self._metrics.scrape() if self._metrics else b""

    def _make_metrics(self, info: EngineInfo) -> Metrics:
        metrics = Metrics(
            max_sequence_length=self._limits.max_sequence_length,
            max_new_tokens=self._limits.max_new_tokens,
            max_batch_size=info.max_batch_size,
            token_capacity=info.token_capacity,
        )
        metrics.engine_up(True)
        return metrics

    def _exit_code(self, client: EngineClient, stop: asyncio.Future[None]) -> int:
        if stop.done() and not client.died.done():
            return 0
        raise StartError(client.died.result())

    def _engine_options(self) -> EngineOptions:
        config = self._config
        return EngineOptions(
            engine=config.engine,
            model_path=str(self._model.path),
            dtype=config.dtype,
            eos_ids=self._eos_ids,
            max_sequence_length=self._limits.max_sequence_length,
            max_batch_size=config.max_batch_size,
            max_prefill_padding=config.max_prefill_padding,
            max_waiting_tokens=config.max_waiting_tokens,
            batch_safety_margin=config.batch_safety_margin,
            compile=config.pt2_compile,
            estimate_memory=config.estimate_memory,
            cache_dir=str(config.cache_dir),
            cuda_memory_fraction=config.cuda_process_memory_fraction,
            num_threads=config.num_threads,
            log_level=config.log_level,
            json_output=config.json_output,
            prefix_cache=config.prefix_cache,
            num_shards=config.num_shard,
            kv_cache_bytes=config.kv_cache_size_mb << 20 if config.kv_cache_size_mb else None,
            adapter_store=self._prompts,
        )


async def _wait_first(events: list[asyncio.Future[Any]], timeout: float | None = None) -> None:
    await asyncio.wait(events, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def _stop_signal() -> asyncio.Future[None]:
    """Done at the first signal to stop; a second one has no further effect."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(name, _set_done, stop)
    return stop


def _set_done(stop: asyncio.Future[None]) -> None:
    if not stop.done():
        stop.set_result(None)


def _limits(config: Config, model: ModelFiles) -> RequestLimits:
    """What requests may ask for, from the options and the model."""
    model_length = max_sequence_length(model.config)
    length = config.max_sequence_length or model_length
    if length > model_length:
        log.warning("MAX_SEQUENCE_LENGTH %d is more than the model's %d", length, model_length)
    new_tokens = config.max_new_tokens
    if new_tokens >= length:
        new_tokens = length - 1
        log.warning("MAX_NEW_TOKENS %d lowered to %d, below MAX_SEQUENCE_LENGTH", config.max_new_tokens, new_tokens)
    return RequestLimits(length, new_tokens, config.default_include_stop_seqs)


def _prompt_options(config: Config, limits: RequestLimits) -> AdapterStoreOptions | None:
    """What the engine needs to know of soft prompts, if there are to be any."""
    if config.prefix_store_path is None:
        return None
    most = limits.max_sequence_length - 1
    length = config.max_prompt_prefix_length or (limits.max_sequence_length + 1) // 2
    if length > most:
        raise OptionError(f"MAX_PROMPT_PREFIX_LENGTH={length} must be at most {most}, below MAX_SEQUENCE_LENGTH")
    return AdapterStoreOptions(str(config.prefix_store_path), config.prompt_cache_size_mb << 20, length)


def _listener_options(config: Config) -> GrpcServerOptions:
    return GrpcServerOptions(
        host=config.bind_address,
        port=config.grpc_port,
        max_message_bytes=config.grpc_max_message_bytes,
        max_concurrent_streams=config.grpc_max_concurrent_streams,
        keepalive_seconds=config.grpc_keepalive_seconds,
        tls=config.tls,
        tokens=config.auth_token_path,
    )


def _usage_hints(config: Config, grpc_port: int, http_port: int) -> list[str]:
    tls = "" if config.tls else "-plaintext "
    body = '{"requests": [{"text": "Once upon a time"}]}'
    return [
        f"gRPC on port {grpc_port}, health and metrics on port {http_port}; try:",
        f'    tgis generate --target localhost:{grpc_port} "Once upon a time"',
        f"    grpcurl {tls}-d '{body}' localhost:{grpc_port} fmaas.GenerationService/Generate",
        f"    curl localhost:{http_port}/{'debug/batch' if config.debug_batch else 'health'}",
    ]
