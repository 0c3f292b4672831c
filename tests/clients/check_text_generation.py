"""text-generation, the client package of TGI, against the server at SERVER_URL, whose engine repeats its prompt.

Its streamed chats are left out: they cannot work with any server that ends streams as OpenAI does.
"""

import os
from typing import Any

import pytest
from text_generation import Client, errors  # type: ignore[import-not-found]
from text_generation.types import FinishReason  # type: ignore[import-not-found]

URL = os.environ["SERVER_URL"]
TOO_LONG, POISONED = {"prompt": "a", "max_new_tokens": 10**6}, {"prompt": "a!", "max_new_tokens": 3}
ERRORS = [
    (TOO_LONG, errors.ValidationError),
    ({"prompt": "a", "max_new_tokens": 3, "stop_sequences": ["a"] * 9}, errors.ValidationError),
    (POISONED, errors.GenerationError),
]


@pytest.fixture
def client() -> Client:
    return Client(URL, timeout=30)


def test_every_parameter(client: Client) -> None:
    options: dict[str, Any] = {"max_new_tokens": 5, "decoder_input_details": True, "top_n_tokens": 2, "seed": 7}
    options |= {"return_full_text": True, "stop_sequences": ["o"], "truncate": 3, "watermark": True, "do_sample": True}
    options |= {"temperature": 0.5, "top_p": 0.9, "top_k": 10, "typical_p": 0.9}
    answer = client.generate("hello ", repetition_penalty=1.2, frequency_penalty=0.1, **options)
    details = answer.details
    assert details
    assert answer.generated_text == "hello lo"  # what it repeats are the last three tokens, up to the stop sequence
    assert (details.finish_reason, details.seed) == (FinishReason.StopSequence, 7)
    assert [token.text for token in details.prefill] == list("lo ")
    assert details.top_tokens
    assert [len(tops) for tops in details.top_tokens] == [2] * details.generated_tokens


def test_stream(client: Client) -> None:
    *rest, last = client.generate_stream("hello ", max_new_tokens=9, do_sample=True, seed=3)
    assert [part.generated_text for part in rest] == [None] * 8
    assert last.generated_text == "".join(part.token.text for part in (*rest, last)) == "hello hel"
    assert last.details
    assert (last.details.finish_reason, last.details.generated_tokens, last.details.seed) == (FinishReason.Length, 9, 3)


@pytest.mark.parametrize(("params", "error"), ERRORS)
def test_errors(client: Client, params: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        client.generate(**params)
    with pytest.raises(error):
        list(client.generate_stream(**params))
