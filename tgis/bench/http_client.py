"""Requests over HTTP and server-sent events; what is in them is the business of `tgi` and `openai`."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ssl import SSLContext
from time import perf_counter
from typing import Any

import aiohttp
import msgspec

from tgis.bench.client import BenchSettings, FailedAnswer, RequestRecord
from tgis.bench.openai import OpenAIRequests
from tgis.bench.tgi import TgiRequests
from tgis.errors import StartError

_IDLE_SECONDS = 2.0  # of a connection that is used again; servers close theirs later
_MAX_ERROR_BYTES = 2000
# ValueError: bytes that are no UTF-8, headers that are no numbers.
_BAD_ANSWERS = (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError)


@asynccontextmanager
async def connect(
    settings: BenchSettings,
    headers: Sequence[tuple[str, str]] = (),
    tls: SSLContext | None = None,
    tls_server_name: str | None = None,
) -> AsyncIterator["HttpClient"]:
    """A client with as many connections as it has requests in flight; `tls` is for https."""
    connector = aiohttp.TCPConnector(limit=0, ssl=tls or True, keepalive_timeout=_IDLE_SECONDS)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        yield HttpClient(session, settings, tls_server_name)


class HttpClient:
    """Calls one server."""

    def __init__(self, session: aiohttp.ClientSession, settings: BenchSettings, tls_server_name: str | None) -> None:
        self._session = session
        self._api = TgiRequests(settings) if settings.api == "tgi" else OpenAIRequests(settings)
        self._settings = settings
        self._tls_server_name = tls_server_name

    async def model_name(self) -> str | None:
        try:
            async with self._request("GET", self._api.model_path, None, self._settings.setup_timeout) as response:
                return self._api.model_name(await response.read())
        except FailedAnswer as error:
            if error.status == "HTTP 404":
                return None
            raise StartError(f"{self._settings.target}{self._api.model_path}: {error.status}: {error}") from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        except (msgspec.DecodeError, ValueError) as error:
            raise StartError(f"{self._settings.target}{self._api.model_path}: {error}") from error

    async def send(self, text: str, record: RequestRecord) -> None:
        body = self._api.body(text, record.requested_tokens)
        record.sent_at = perf_counter()
        try:
            async with self._request("POST", self._api.path, body, self._settings.timeout) as response:
                if self._settings.stream:
                    await self._read_events(response, record)
                else:
                    self._api.record_answer(await response.read(), response.headers, record)
        except FailedAnswer as error:
            record.fail(perf_counter(), error.status, str(error))
        except _BAD_ANSWERS as error:
            record.fail(perf_counter(), type(error).__name__, str(error))
        else:
            record.succeed(perf_counter())

    async def _read_events(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        rest, is_complete = b"", False
        async for data in response.content.iter_any():
            now = perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    is_complete = self._api.record_event(line[5:].strip(), now, record) or is_complete
        if not is_complete:
            raise FailedAnswer("INCOMPLETE", "the stream has ended without its last event")

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._session.request(
            method,
            self._settings.target + path,
            data=None if body is None else msgspec.json.encode(body),
            headers=None if body is None else {"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=timeout),
            server_hostname=self._tls_server_name,
        ) as response:
            if response.status != 200:
                error = await response.content.read(_MAX_ERROR_BYTES)
                raise FailedAnswer(f"HTTP {response.status}", error.decode(errors="replace") or response.reason or "")
            yield response
