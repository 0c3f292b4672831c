"""`tgis chat`: a conversation in the terminal, over the OpenAI API, which applies the model's chat template."""

import argparse
import contextlib
import importlib
import json
import sys

from tgis.cli import client, sampling
from tgis.errors import StartError
from tgis.utils.options import TEXT, Parser, integer


def main(argv: list[str], prog: str) -> int:
    chat = Chat(_parser(prog).parse_args(argv))
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        importlib.import_module("readline")  # has input() edit its line
        print(f"{chat.model}: Ctrl-C stops an answer, /reset forgets the chat, Ctrl-D leaves", file=sys.stderr)
    while True:
        try:
            chat.read(input("> " if on_terminal else "").strip())
        except EOFError:
            if on_terminal:
                print()  # the prompt of the shell begins its own line
            return 0
        except (KeyboardInterrupt, StartError) as error:
            if not on_terminal:
                raise
            print(f"\ntgis: {error}" if str(error) else "", file=sys.stderr)


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Chat with the model: each line is a message, /reset forgets the chat.")
    client.add_arguments(parser, timeout=None, target=client.HTTP_TARGET)
    parser.add_argument("--model", type=TEXT, metavar="NAME", help="adapter to chat with (default: the model)")
    parser.add_argument("--system", type=TEXT, metavar="TEXT", help="system message, sent before the chat")
    parser.add_argument("--max-tokens", type=integer(1), metavar="N", help="maximum number of tokens of each answer")
    sampling.add_sampling(parser.add_argument_group("Sampling (default: as the model suggests)").add_argument)
    sampling.add_decoding(parser.add_argument_group("Decoding").add_argument)
    return parser


class Chat:
    """The messages so far, and the server that continues them; StartError if that fails."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        timeout = options.timeout or client.UNARY_TIMEOUT_SECONDS
        models = b"".join(client.http_call(options, "/v1/models", None, timeout))
        try:
            self.model: str = options.model or json.loads(models)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise StartError(f"{options.target}: {client.NO_API}") from None
        self._messages: list[dict[str, str]] = []

    def read(self, line: str) -> None:
        """Write the answer as it grows, without its thought. One that is interrupted counts as far as it was shown."""
        if not line or line == "/reset":
            self._messages = self._messages if not line else []
            return
        asked, answer, thought = [*self._messages, {"role": "user", "content": line}], "", False
        system = [{"role": "system", "content": self._options.system}] if self._options.system else []
        body = {name: getattr(self._options, name) for name in ("max_tokens", *sampling.FIELDS)}
        body |= {"model": self.model, "messages": system + asked, "stream": True}
        try:
            lines = client.http_call(self._options, "/v1/chat/completions", body, self._options.timeout)
            with contextlib.closing(lines):
                for thinks, part in map(_delta, lines):
                    if thinks and not thought and sys.stdout.isatty():
                        thought = True
                        print("(thinking)")
                    answer += part
                    sys.stdout.write(client.terminal_safe(part) if sys.stdout.isatty() else part)
                    sys.stdout.flush()
        finally:
            if answer:
                self._messages = [*asked, {"role": "assistant", "content": answer}]
                print()


def _delta(line: bytes) -> tuple[bool, str]:
    """Whether a line of the stream has a part of a thought, and its text; StartError if the answer has failed."""
    if not line.startswith(b"data: {"):
        return False, ""
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise StartError(client.error_message(line.removeprefix(b"data: ")))
    deltas = [choice["delta"] for choice in event["choices"]]
    return any(delta.get("reasoning") for delta in deltas), "".join(delta.get("content") or "" for delta in deltas)
