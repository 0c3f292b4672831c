"""What is counted and logged about a call: the call once, each of its inputs once, however they end."""

import logging
import time
from types import TracebackType
from typing import Any, Self

import msgspec

from tgis.errors import InvalidRequest, Overloaded, RequestError, Unavailable, Unimplemented
from tgis.frontend.metrics import Failure, Kind, Metrics
from tgis.frontend.output import SHOWN_CHARACTERS, Row
from tgis.frontend.validation import Settings
from tgis.ipc.messages import Request, Sampling, StopReason

log = logging.getLogger(__name__)

_USUAL = msgspec.structs.asdict(Sampling()) | {"stop_sequences": 0, "time_limit": False, "details": False}


class Account:
    """The account of one call to generate: a context manager around its life."""

    def __init__(self, kind: Kind, inputs: int, metrics: Metrics, *, log_text: bool) -> None:
        self._kind = kind
        self._metrics = metrics
        self._started = time.monotonic()
        self._log_text = log_text
        self._rows: list[Row] = []  # still open
        self._unopened = inputs
        metrics.request_started(kind, inputs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, RequestError):
            self._metrics.request_failed(_failure(error))
            level = logging.INFO if isinstance(error, InvalidRequest | Unimplemented) else logging.ERROR
            log.log(level, "%s call failed: %s", self._kind, error)
        elif error is not None and self._unopened:  # its client left before its inputs were queued
            self._metrics.request_failed(Failure.CANCELLED, self._unopened)
        for row in list(self._rows):
            self.close(row)

    def tokenized(self, lengths: list[int]) -> None:
        """Note the lengths of the inputs before truncation."""
        for length in lengths:
            self._metrics.input_tokenized(length)

    def validated(self, requests: list[Request], settings: Settings) -> None:
        """Note that the call is valid."""
        lengths = [request.input_length for request in requests]
        self._metrics.request_validated(lengths, settings.max_new_tokens, time.monotonic() - self._started)

    def open(self, rows: list[Row]) -> list[Row]:
        """Note the rows that run from now on."""
        self._rows = list(rows)
        self._unopened = 0
        return rows

    def close(self, row: Row) -> None:
        """Note the end of a row: finished, failed, or left behind by its client or for a failed sibling."""
        self._rows.remove(row)
        if row.end:
            self._finished(row)
        elif not row.inbox.failed:
            self._metrics.request_failed(Failure.CANCELLED)
        self._log(row)

    def _finished(self, row: Row) -> None:
        times, now = row.inbox.times, time.monotonic()
        if row.expired:
            self._metrics.request_failed(Failure.TIMEOUT)
        else:
            self._metrics.first_token(times.first - self._started)
        self._metrics.request_succeeded(
            self._kind,
            row.end,
            input_tokens=row.inbox.request.input_length,
            generated_tokens=row.count,
            duration=now - self._started,
            inference=times.newest - times.joined if times.joined else 0.0,
            decoding=times.newest - times.first,
        )

    def _log(self, row: Row) -> None:
        how = row.end.name if row.end else "ERROR" if row.inbox.failed else "CANCELLED"
        ordinary = row.end not in (StopReason.NOT_FINISHED, StopReason.TOKEN_LIMIT)
        log.log(
            logging.INFO if ordinary else logging.WARNING,
            "%s request: %d tokens, %s",
            self._kind,
            row.count,
            how,
            extra=self._facts(row),
        )

    def _facts(self, row: Row) -> dict[str, Any]:
        times, now, request = row.inbox.times, time.monotonic(), row.inbox.request
        joined = times.joined or now
        inference = times.newest - joined if times.newest else 0.0
        return {
            "request_id": request.id,
            "input_tokens": request.input_length,
            "prefix_id": request.prefix.id if request.prefix else None,
            "generated_tokens": row.count,
            "queue_seconds": round(joined - times.submitted, 4),
            "inference_seconds": round(inference, 4),
            "total_seconds": round(now - self._started, 4),
            "parameters": _parameters(row),
            "input": row.input_text[:SHOWN_CHARACTERS] if self._log_text else None,
            "output": row.beginning if self._log_text else None,
        }


def _parameters(row: Row) -> str:
    """What the input ran with: numbers and switches, never text."""
    request, settings = row.inbox.request, row.settings
    values = msgspec.structs.asdict(request.sampling) | {
        "max_new_tokens": request.max_new_tokens,
        "stop_sequences": len(settings.stop_sequences),
        "time_limit": settings.deadline is not None,
        "details": any((settings.details.generated, settings.details.inputs)),
    }
    return " ".join(f"{name}={value}" for name, value in values.items() if value != _USUAL.get(name))


def _failure(error: RequestError) -> Failure:
    match error:
        case Overloaded():
            return Failure.TOO_MANY
        case InvalidRequest() | Unimplemented():
            return Failure.VALIDATION
        case Unavailable():
            return Failure.UNKNOWN
    return Failure.GENERATION
