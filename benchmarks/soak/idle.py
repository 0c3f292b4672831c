"""Checks that an idle server has released everything."""

import asyncio
import time

import grpc.aio

from benchmarks.serving import Server
from benchmarks.soak import reconcile
from benchmarks.soak.calls import CALL_TIMEOUT_SECONDS
from benchmarks.soak.client_log import ClientLog
from benchmarks.soak.requests import ServerLimits, batch_request
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

IDLE_TIMEOUT_SECONDS = 30.0


async def server_limits(stub: GenerationServiceStub, max_inputs: int) -> ServerLimits:
    info = await stub.ModelInfo(pb.ModelInfoRequest(), timeout=CALL_TIMEOUT_SECONDS)
    return ServerLimits(info.max_sequence_length, info.max_new_tokens, max_inputs)


async def wait_until_idle(server: Server, log: ClientLog) -> reconcile.MetricValues:
    """Wait until all gauges are zero and return the metrics; records a problem if they never are."""
    until = time.monotonic() + IDLE_TIMEOUT_SECONDS
    while busy := reconcile.nonzero_gauges(series := reconcile.parse_metrics(await asyncio.to_thread(server.metrics))):
        if time.monotonic() > until:
            log.add_problems(f"{gauge} though nothing is left to do" for gauge in busy)
            break
        await asyncio.sleep(0.1)
    return series


async def use_full_capacity(stub: GenerationServiceStub, bounds: ServerLimits, log: ClientLog) -> None:
    """Make one call that needs every place and the whole token queue, which shows that none of them leaked."""
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=1), truncate_input_tokens=100)
    request = batch_request(["word " * bounds.max_sequence_length] * bounds.max_inputs, params)
    try:
        await stub.Generate(request, timeout=CALL_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        log.add_problem(
            f"a call with {bounds.max_inputs} inputs to the idle server: {error.code().name} {error.details()}"
        )
