"""The exceptions of tgis. `service.py` alone maps the request half to gRPC status codes.

TgisError
├── StartError               the process cannot serve: one line on stderr, exit code 1
│   ├── Unsupported          the chosen engine cannot run this model; another may
│   └── OptionError          a bad option, found before anything loads: exit code 2
├── PromptError              a soft prompt is not to be had; caught where it was asked for
└── RequestError             one call fails, nothing else is disturbed
    ├── InvalidRequest       INVALID_ARGUMENT, names the field
    ├── Unimplemented        UNIMPLEMENTED, a field whose part is not built
    ├── Overloaded           RESOURCE_EXHAUSTED, try again later
    ├── OutOfMemory          RESOURCE_EXHAUSTED, the request alone does not fit
    ├── Unavailable          UNAVAILABLE, loading, draining or the engine is gone
    └── EngineFailure        INTERNAL, a bug or a broken step
"""


class TgisError(Exception):
    """Root of every exception that tgis raises for the outside world."""


class StartError(TgisError):
    """The service cannot start or go on; the text is the one line that a person reads."""

    exit_code = 1


class Unsupported(StartError):
    """The engine cannot run the model."""


class OptionError(StartError):
    """An option has a value that can never work."""

    exit_code = 2


class AdapterError(TgisError):
    """A soft prompt cannot be had: the text is the reason, `problem` a value of `prefix.PromptProblem`."""

    def __init__(self, problem: str, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


class RequestError(TgisError):
    """A call ends with a status other than OK; the text is the status message."""


class InvalidRequest(RequestError):
    """The request breaks a rule; `field` is a parameter of `RawParams` or a path that the face has given."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Unimplemented(RequestError):
    """The request asks for something that this server does not do."""


class Overloaded(RequestError):
    """Too much is in flight; `retry_after` is a hint in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OutOfMemory(RequestError):
    """The device has no room for this request, even alone."""


class Unavailable(RequestError):
    """The server cannot take or finish the call now."""


class EngineFailure(RequestError):
    """A step failed for this request."""
