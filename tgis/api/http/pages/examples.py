"""What each operation is for, and a command that calls it."""

import shlex
from typing import Any

import msgspec

HOST = "localhost:3000"  # in the commands, until a page knows better

_PROMPT = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}}
_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}
_EXAMPLES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "compat_generate": ("As /generate, with the prompt in the text; `stream` makes it /generate_stream.", _PROMPT),
    "generate": ("Continues a prompt and answers once it has ended; `details` tells about each token.", _PROMPT),
    "generate_stream": ("Continues a prompt and sends each token as an event; the last has the whole text.", _PROMPT),
    "tokenize": ("Says which tokens a text has, and where they are in it.", {"inputs": "Hello world"}),
    "get_chat_tokenize": ("Applies the model's chat template and says which tokens that makes.", _CHAT),
    "sagemaker_compatibility": ("Does what the body is a request for: as POST /, or either of OpenAI's.", _PROMPT),
    "get_model_info": ("Says which model is served, and its limits.", None),
    "chat_completions": (
        "Answers the last message of a chat, by the model's chat template; `stream` sends the answer as it grows.",
        _CHAT | {"stream": True},
    ),
    "completions": (
        "Continues one prompt or several; here, with the most likely candidates for each token.",
        {"prompt": "The capital of France is", "max_tokens": 8, "logprobs": 2},
    ),
    "openai_get_model_info": ("Lists the model and the adapters that `model` of a request may name.", None),
    "openai_get_model": ("Says whether there is such a model or adapter.", None),
}  # fmt: skip


def sentence(operation_id: str) -> str:
    return _EXAMPLES.get(operation_id, ("", None))[0]


def command(operation_id: str, path: str, *, needs_token: bool) -> str:
    """With curl; its address begins with HOST."""
    _, body = _EXAMPLES.get(operation_id, ("", None))
    parts = [f"curl {HOST}{path}"]
    if needs_token:
        parts.append('-H "Authorization: Bearer $TOKEN"')
    if body is not None:
        parts += ["-H 'Content-Type: application/json'", f"-d {shlex.quote(msgspec.json.encode(body).decode())}"]
    return " \\\n  ".join(parts)
