"""The exceptions of tgis. Only api/grpc/status.py maps RequestErrors to gRPC status codes.

TgisError
├── StartError               the process cannot serve: one line on stderr, exit code 1
│   ├── Unsupported          the chosen engine cannot run this model; another may
│   └── OptionError          a bad option, found before anything loads: exit code 2
├── AdapterError             a soft prompt or LoRA adapter is missing or unusable; reported to whoever asked for it
├── GrammarError             a grammar cannot be used; reported likewise
└── RequestError             one call fails, others are not affected
    ├── InvalidRequest       INVALID_ARGUMENT, names the field
    │   └── TooLong          an input does not fit, or leaves too little room for the output
    ├── Overloaded           RESOURCE_EXHAUSTED, try again later
    │   └── QueueFull        the queue is too long, not the calls too many
    ├── OutOfMemory          RESOURCE_EXHAUSTED, the request does not even fit alone
    ├── Unavailable          UNAVAILABLE, loading, draining or the engine has died
    ├── ClientTimeout        DEADLINE_EXCEEDED, the client has not sent its message in time
    └── EngineFailure        INTERNAL, a bug or a failed step
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

RETRY_SECONDS = 1  # until a client that was refused may try again
# Why a server is Unavailable, or unhealthy, at its beginning and its end.
LOADING, SHUTTING_DOWN = "the model is still loading", "the server is shutting down"
_MAX_REASON = 200  # characters of what a library says


class TgisError(Exception):
    """Root of every exception that tgis raises for the outside world."""


class StartError(TgisError):
    """The service cannot start or continue; the text is the one line shown to the operator."""

    exit_code = 1


class Unsupported(StartError):
    """The engine cannot run the model."""


class OptionError(StartError):
    """An option has a value that can never work."""

    exit_code = 2


class AdapterError(TgisError):
    """An adapter is missing or unusable: the text is the reason, `problem` an ipc.lookups.AdapterProblem."""

    def __init__(self, reason: str, problem: str = "broken") -> None:
        super().__init__(reason)
        self.problem = problem


class GrammarError(TgisError):
    """A grammar cannot be compiled, or costs too much: the text is the reason.

    It may quote the grammar: the middle of a long one is left out, so that its end still says where.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason if len(reason) <= 200 else f"{reason[:140]} ... {reason[-55:]}")


class RequestError(TgisError):
    """A call ends with a status other than OK; the text is the status message."""

    @property
    def detail(self) -> str:
        """What status details say: the message and what it leaves out because TGIS does."""
        return str(self)

    @property
    def logged(self) -> str:
        """What the log says: no text of the request."""
        return self.detail


class InvalidRequest(RequestError):
    """The request breaks a rule; `field` is a parameter of `Params` or a path that the API has given.

    `value` is the offending value, unless the message has it. `logged` is for the log if the message may quote text.
    """

    def __init__(self, field: str, message: str, value: str = "", logged: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self._logged = logged

    @property
    def detail(self) -> str:
        return f"{self}, got {self.value}" if self.value else str(self)

    @property
    def logged(self) -> str:
        return self._logged or self.detail


class TooLong(InvalidRequest):
    """An input does not fit into the maximum sequence length, or leaves too little room for the output."""

    def __init__(self, field: str, message: str, max_length: int) -> None:
        super().__init__(field, message)
        self.max_length = max_length


class Overloaded(RequestError):
    """Too many requests in flight: `reason` says which limit was reached."""

    def __init__(self, reason: str) -> None:
        super().__init__("Model is overloaded")
        self.reason = reason

    @property
    def detail(self) -> str:
        return f"{self}: {self.reason}"


class QueueFull(Overloaded):
    """Too many input tokens are waiting."""


class OutOfMemory(RequestError):
    """The device has not enough memory for this request, even alone."""


class Unavailable(RequestError):
    """The server cannot take or finish the call now."""


class ClientTimeout(RequestError):
    """The client has not sent its message within this time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the message has not arrived within {seconds:g} s")


class EngineFailure(RequestError):
    """A step failed for this request."""


@contextmanager
def file_errors(what: str, kind: type[StartError] = StartError) -> Iterator[None]:
    """A StartError of one line for what the system says about a file, which is named unless `what` does."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None or str(error.filename) in what else f" ({error.filename})"
        raise kind(f"{what}: {error.strerror or error}{where}") from error


@contextmanager
def library_errors(what: str, kind: type[StartError] = StartError) -> Iterator[None]:
    """A StartError of one line for anything that a library raises about a model's files, which are not trusted."""
    try:
        yield
    except TgisError:
        raise
    except Exception as error:
        log.debug("%s", what, exc_info=True)
        name = "" if isinstance(error, ValueError | OSError | ImportError) else f"{type(error).__name__}: "
        raise kind(f"{what}: {name}{' '.join(str(error).split()):.{_MAX_REASON}}") from error
