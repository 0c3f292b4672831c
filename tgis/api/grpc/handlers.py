"""Handlers that receive their message themselves, so that this can be bounded; on the wire, the call is the same.

Messages are bytes: a method prices its message before it makes objects of it.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from tgis.api.grpc.open_calls import OpenCall, OpenCalls
from tgis.api.grpc.status import Context, error_boundary

Unary = Callable[[bytes, Context], Awaitable[bytes]]
Stream = Callable[[bytes, OpenCall], Awaitable[None]]


def unary_handler(calls: OpenCalls, method: Unary, max_bytes: int | None = None) -> "grpc.RpcMethodHandler[Any, Any]":
    """Of a method that returns the answer."""

    async def handle(_requests: object, context: Context) -> bytes | None:
        async with error_boundary(context):
            with calls.open(context) as call:
                return await method(await call.receive(max_bytes), context)
        return None  # reached only if the client has disconnected

    return grpc.stream_unary_rpc_method_handler(handle)


def stream_handler(calls: OpenCalls, method: Stream, max_bytes: int | None = None) -> "grpc.RpcMethodHandler[Any, Any]":
    """Of a method that writes the messages of its answer."""

    async def handle(_requests: object, context: Context) -> None:
        async with error_boundary(context):
            with calls.open(context) as call:
                await method(await call.receive(max_bytes), call)

    return grpc.stream_stream_rpc_method_handler(handle)
