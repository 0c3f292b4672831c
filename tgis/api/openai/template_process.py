"""A child process that compiles and renders chat templates, with limits on its memory and on the time of a render.

A template comes with the model, and clients' messages drive its loops: in the front end it could hold everything up.
The child runs `python -m tgis.api.openai.template_process SECONDS`, and dies of a render that takes longer.
"""

import json
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

from tgis.errors import SHUTTING_DOWN, InvalidRequest, Unavailable
from tgis.utils.memory import return_unused_memory

_MAX_BYTES = 512 << 20  # beyond what the child has imported
_MAX_ANSWER_BYTES = 64 << 20
_MAX_ERROR_LENGTH = 200
# What a template raises on purpose, and what it runs into with messages that it does not expect.
_ERRORS = TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, SyntaxError, MemoryError


class TemplateError(InvalidRequest):
    """The model has no chat template, or it refuses these messages."""


class TemplateProcess:
    """The child, started when it is needed; safe to use from several threads."""

    def __init__(self, seconds: int = 10) -> None:
        self._command = sys.executable, "-m", __name__, str(seconds)
        self._lock = threading.Lock()
        self._process: Any = None  # a Popen, whose pipes are optional to mypy
        self._closed = False

    def render(self, **arguments: Any) -> str:
        """The text of transformers' `render_jinja_template` for at most one conversation."""
        with self._lock:
            if self._closed:
                raise Unavailable(SHUTTING_DOWN)
            if self._process is None or self._process.poll() is not None:
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, process_group=0)  # no Ctrl-C
            try:
                self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
                self._process.stdin.flush()
                problem, text = json.loads(self._process.stdout.readline(_MAX_ANSWER_BYTES))
            except (OSError, ValueError):  # it has ended, or the answer is too long
                self._end()
                problem, text = "it takes too long or too much memory", ""
        if problem:
            raise TemplateError("messages", f"the chat template cannot be applied: {problem}")
        return str(text)

    def close(self) -> None:
        """End the child, and with it a render that has not ended; any thread may call this."""
        self._closed = True
        if self._process:
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Answer each line of arguments with a problem and a text, until the parent has gone."""
    from jinja2 import TemplateError as JinjaError  # noqa: PLC0415 - only for the child, as all of transformers
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - 0.7 s, and 50 MB

    return_unused_memory()
    with open("/proc/self/statm") as sizes:
        size = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MAX_BYTES, size + _MAX_BYTES))
    for line in sys.stdin:
        problem, texts = "", [""]
        signal.alarm(int(sys.argv[1]))  # ends this process
        try:
            texts, _ = render_jinja_template(**json.loads(line))
        except (JinjaError, *_ERRORS) as error:
            may_quote_messages = isinstance(error, ValueError | LookupError | MemoryError)
            problem = type(error).__name__ if may_quote_messages else str(error)[:_MAX_ERROR_LENGTH]
        print(json.dumps([problem, "".join(texts)]), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
