"""A client of the streams of the OpenAI API, for servers that speak nothing else."""

import json
from time import perf_counter

import aiohttp

from tgis.bench.client import RequestRecord

_TIMEOUT = aiohttp.ClientTimeout(600.0)


async def complete(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str, record: RequestRecord, token: str = ""
) -> str:
    """Stream a completion and return its text; aiohttp.ClientError or TimeoutError if it fails."""
    body = {"model": model, "prompt": prompt, "max_tokens": record.requested_tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    record.sent_at, text, messages = perf_counter(), "", 0
    async with session.post(
        f"{url}/v1/completions", json=body, headers=headers, timeout=_TIMEOUT, raise_for_status=True
    ) as answer:
        async for line in answer.content:
            if not line.startswith(b"data:") or b"[DONE]" in line:
                continue
            chunk = json.loads(line[5:])
            if "error" in chunk:
                raise aiohttp.ClientPayloadError(str(chunk["error"]))
            if new := "".join(choice["text"] for choice in chunk["choices"]):
                text, messages = text + new, messages + 1
                record.record_output(perf_counter(), messages)
            if usage := chunk.get("usage"):
                record.input_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                record.first_message_tokens = record.output_tokens / max(messages, 1)
    record.succeed(perf_counter())
    return text
