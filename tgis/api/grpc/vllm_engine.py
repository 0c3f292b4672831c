"""vllm.grpc.engine.VllmEngine, the protocol between the router SMG and its workers: token ids in and out.

The stubs are in the package smg-grpc-proto; the server imports this module only if it is installed.
"""

import asyncio
import functools
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tgis import __version__
from tgis.api.grpc import vllm_convert as convert
from tgis.api.grpc.calls import GrpcCall, GrpcCalls
from tgis.api.grpc.parsing import parse
from tgis.config import Config
from tgis.errors import InvalidRequest
from tgis.frontend.admission import Quota
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.generation import Generator, loaded
from tgis.frontend.output import RequestOutput
from tgis.frontend.params import OPENAI_CONSTRAINTS
from tgis.frontend.tokenizer import Tokenizer
from tgis.models.files import ModelFiles, eos_token_ids

VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"

_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
_CONFIG_FILES = ("config.json", "generation_config.json")
_CHUNK_BYTES = 64 << 10
_MAX_CONTROL_CALLS = 64
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class VllmEngine:
    """The service without embeddings, profiles and KV events, which fail with UNIMPLEMENTED."""

    def __init__(
        self,
        calls: GrpcCalls,
        config: Config,
        model: ModelFiles,
        tokenizer_path: Path,
        generator: asyncio.Future[Generator],
        unhealthy_reason: Callable[[], str | None],
    ) -> None:
        """`tokenizer_path` is the directory of the chat template."""
        self._calls, self._config, self._model, self._tokenizer_path = calls, config, model, tokenizer_path
        self._generator, self._unhealthy_reason = generator, unhealthy_reason
        self._started = time.monotonic()
        # The client, the identity and the request id of each running call to Generate.
        self._timeouts: dict[asyncio.Timeout, tuple[bytes, bytes, str]] = {}
        self._tokenizer_zip: asyncio.Task[tuple[bytes, str]] | None = None  # one for all callers

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handler to register with a server."""
        methods = {
            "Generate": self._generate,
            "Abort": self._abort,
            "HealthCheck": self._health_check,
            "GetModelInfo": self._get_model_info,
            "GetServerInfo": self._get_server_info,
            "GetLoads": self._get_loads,
            "GetTokenizer": self._get_tokenizer,
            "FlushCache": self._flush_cache,
        }
        control = Quota("open calls of HealthCheck and Abort", _MAX_CONTROL_CALLS, _MAX_CONTROL_CALLS // 2)
        quotas = {"HealthCheck": control, "Abort": control}  # so that they work on a full server
        handlers = {
            name: self._calls.handler(f"VllmEngine.{name}", method, quotas.get(name))
            for name, method in methods.items()
        }
        return grpc.method_handlers_generic_handler(VLLM_ENGINE, handlers)

    async def _generate(self, data: bytes, grpc_call: GrpcCall) -> None:
        generator = loaded(self._generator)
        message = parse(data, pb.GenerateRequest, max_inputs=1)
        limits, client, identity = generator.server_info.limits, grpc_call.client, grpc_call.identity
        params, timeout = message.sampling_params, asyncio.timeout(None)
        params.stop_token_ids.extend(generator.special_token_ids(params.stop[: OPENAI_CONSTRAINTS.max_stop_sequences]))
        self._timeouts[timeout] = client, identity, message.request_id
        try:
            if params.n > (most := self._calls.admission.inputs.most(client)):
                raise InvalidRequest("n", f"n must be from 1 to {most}", str(params.n))
            async with timeout:
                call = convert.generate_call(message, limits, client, identity, grpc_call.metadata)
                await _run(generator, call, convert.Answer(message), grpc_call)
        except InvalidRequest as error:
            raise convert.invalid_request(error) from None
        except TimeoutError:
            if not timeout.expired():
                raise
            await grpc_call.context.abort(grpc.StatusCode.CANCELLED, "the request was aborted")
        finally:
            self._timeouts.pop(timeout, None)

    async def _abort(self, data: bytes, grpc_call: GrpcCall) -> None:
        """End requests of the same caller; those without an id have none that could be named."""
        ids = set(parse(data, pb.AbortRequest).request_ids) - {""}
        callers = {(grpc_call.client, grpc_call.identity, request_id) for request_id in ids}
        for timeout in [timeout for timeout, caller in self._timeouts.items() if caller in callers]:
            del self._timeouts[timeout]  # it can end once only
            timeout.reschedule(0)
        await _reply(grpc_call, pb.AbortResponse())

    async def _health_check(self, _data: bytes, grpc_call: GrpcCall) -> None:
        """The state of the engine. Unavailable while the model loads: routers register any worker that answers."""
        loaded(self._generator)
        reason = self._unhealthy_reason()
        await _reply(grpc_call, pb.HealthCheckResponse(healthy=reason is None, message=reason or ""))

    async def _get_model_info(self, _data: bytes, grpc_call: GrpcCall) -> None:
        info, model = loaded(self._generator).server_info, self._model
        defaults = {} if self._config.generation_config == "none" else model.generation_config
        defaults = {name: defaults[name] for name in _SAMPLING_DEFAULTS if defaults.get(name) is not None}
        response = pb.GetModelInfoResponse(
            served_model_name=self._config.shown_model,
            tokenizer_path=str(self._tokenizer_path.absolute()),
            is_generation=True,
            max_context_length=info.limits.max_sequence_length,
            max_req_input_len=info.limits.longest_input,
            vocab_size=info.engine.vocab_size,
            model_type=str(model.config.get("model_type", "")),
            architectures=[info.engine.model_class],
            eos_token_ids=eos_token_ids(model),
            pad_token_id=info.limits.placeholder_id,
            bos_token_id=loaded(self._generator).token_decoder.tokenizer.bos_token_id,
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )
        await _reply(grpc_call, response)

    async def _get_server_info(self, _data: bytes, grpc_call: GrpcCall) -> None:
        """Grammars begin at the first token, so a router lets them begin with a thought if the prompt opens one."""
        engine = loaded(self._generator).server_info.engine
        response = pb.GetServerInfoResponse(
            active_requests=self._calls.admission.inputs.total,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype=engine.kv_cache_dtype,
            block_size=engine.block_size,
            model_dtype=f"torch.{engine.dtype}",
            max_num_seqs=engine.max_batch_size,
            constrained_decoding_start="first_token",
        )
        await _reply(grpc_call, response)

    async def _get_loads(self, _data: bytes, grpc_call: GrpcCall) -> None:
        generator = loaded(self._generator)
        state = await generator.batch_state()
        load = pb.SchedulerLoad(
            num_running_reqs=state.num_running,
            num_waiting_reqs=state.num_waiting,
            num_total_reqs=state.num_running + state.num_waiting,
            num_used_tokens=state.context_tokens,
            max_total_num_tokens=min(state.token_capacity, 2**31 - 1),
            token_usage=min(state.context_tokens / state.token_capacity, 1.0),
            max_running_requests=state.max_batch_size,
            num_waiting_uncached_tokens=generator.num_queued_tokens,
        )
        now = datetime.now(UTC).isoformat()
        await _reply(grpc_call, pb.GetLoadsResponse(timestamp=now, version=__version__, dp_rank_count=1, loads=[load]))

    async def _get_tokenizer(self, _data: bytes, grpc_call: GrpcCall) -> None:
        tokenizer = loaded(self._generator).token_decoder.tokenizer
        task = self._tokenizer_zip
        if task is None or (task.done() and task.exception()):  # too many files may have been open
            work = asyncio.to_thread(_tokenizer_zip, tokenizer, self._tokenizer_path)
            task = self._tokenizer_zip = asyncio.create_task(work)
        data, digest = await asyncio.shield(task)
        for start in range(0, len(data), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            sha256 = digest if end >= len(data) else ""
            await _reply(grpc_call, common_pb2.GetTokenizerChunk(data=data[start:end], sha256=sha256))

    async def _flush_cache(self, _data: bytes, grpc_call: GrpcCall) -> None:
        """Forget all cached prefixes. Needs credentials, because it slows down the requests of all clients."""
        if not grpc_call.identity:
            text = "FlushCache needs a bearer token or a client certificate"
            await grpc_call.context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
        loaded(self._generator).flush_cache()
        await _reply(grpc_call, common_pb2.FlushCacheResponse(success=True, message="no prefix is cached any more"))


async def _run(generator: Generator, call: GenerateCall, answer: convert.Answer, grpc_call: GrpcCall) -> None:
    streams = call.kind is CallKind.STREAM
    async with aclosing(generator.stream(call) if streams else _unary(generator, call)) as outputs:
        async for output in outputs:
            messages = functools.partial(answer.messages, output)
            for data in await generator.pool.run(output.num_details, messages):
                await grpc_call.write(data)


async def _unary(generator: Generator, call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
    for output in await generator.generate(call):
        yield output


async def _reply(grpc_call: GrpcCall, message: Message) -> None:
    await grpc_call.write(message.SerializeToString())


def _tokenizer_zip(tokenizer: Tokenizer, directory: Path) -> tuple[bytes, str]:
    """A zip file of the tokenizer with its added tokens and configuration files, and its SHA-256.

    All workers with the same files make the same bytes.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("tokenizer.json"), tokenizer.to_json(), zipfile.ZIP_DEFLATED)
        for name in (*_TOKENIZER_FILES, *_CONFIG_FILES):
            if (path := directory / name).is_file():
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest()
