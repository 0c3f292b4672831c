"""Converts the fields of a request to the parameters of the front end."""

from typing import Any

import msgspec

from tgis.api.http.calls import HttpCall
from tgis.api.openai.bodies import ChatCompletionRequest, CompletionRequest, SamplingBody
from tgis.api.openai.grammars import grammar
from tgis.errors import InvalidRequest
from tgis.frontend.params import MAX_CHOICES, MAX_TOP_LOGPROBS, OPENAI_CONSTRAINTS, Params
from tgis.ipc.request import LogprobOptions

# Parameters of the front end whose fields in a request have another name.
FIELDS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "top_n_tokens": "top_logprobs",
    "adapter_id": "model",
}
_SMALLEST_TOP_P = 1e-9  # instead of 0: the best token only
_MAX_COUNT = 2**32 - 1


def check_numbers(body: SamplingBody, call: HttpCall, num_prompts: int = 1) -> None:
    """Raise InvalidRequest for a number out of its range; `validation.py` checks the parameters of all APIs.

    The types of the fields that cannot be -1 have refused it.
    """
    max_choices = min(MAX_CHOICES, call.max_inputs // num_prompts)
    ranges = {
        "n": (1, max_choices),
        "best_of": (body.n or 1, body.n or 1 if body.stream else max_choices),
        "logprobs": (0, MAX_TOP_LOGPROBS),
        "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
        "max_tokens": (0 if is_echo_only(body) else 1, _MAX_COUNT),
        "max_completion_tokens": (1, _MAX_COUNT),
        "truncate_prompt_tokens": (1, _MAX_COUNT),
        "seed": (-(2**63), 2**64 - 1),
    }
    for field, (lowest, highest) in ranges.items():
        value = getattr(body, field, None)
        if value not in (None, -1) and not lowest <= value <= highest:
            bound = f">= {lowest}" if value < lowest else f"<= {highest}"
            raise InvalidRequest(field, f"{field} must be {bound}", str(value)[:40])


def chat_params(body: ChatCompletionRequest, call: HttpCall, *, keeps_marks: bool) -> Params:
    """Parameters of a chat completion; with `keeps_marks` the output has the special tokens around calls, thoughts."""
    return _params(
        body,
        call,
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprob_options=_logprob_options(body, body.top_logprobs or 0 if body.logprobs else None),
        add_special_tokens=bool(body.add_special_tokens),
        skip_special_tokens=False if keeps_marks else body.skip_special_tokens,
    )


def completion_params(body: CompletionRequest, call: HttpCall) -> Params:
    """Parameters of a completion."""
    if body.suffix:
        raise InvalidRequest("suffix", "suffix is not supported")
    logprobs = 0 if body.logprobs is None and num_candidates(body) > (body.n or 1) else body.logprobs
    options = _logprob_options(body, logprobs, of_prompt=body.logprobs is not None and bool(body.echo))
    return _params(body, call, 1 if is_echo_only(body) else body.max_tokens, logprob_options=options)


def is_echo_only(body: SamplingBody) -> bool:
    """True if the client wants the prompt only; the engine generates one token, which is dropped."""
    return isinstance(body, CompletionRequest) and body.max_tokens == 0 and bool(body.echo)


def num_candidates(body: CompletionRequest) -> int:
    """The number of outputs of each prompt, the best `n` of which are the choices."""
    return body.best_of or body.n or 1


def _logprob_options(body: SamplingBody, logprobs: int | None, *, of_prompt: bool = False) -> LogprobOptions:
    """`logprobs` is the number of candidates of each new token; None for no logprobs."""
    of_prompt |= body.prompt_logprobs is not None
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs", "prompt_logprobs are not available in a stream")
    return LogprobOptions(
        generated_tokens=logprobs is not None,
        input_tokens=of_prompt,
        logprobs=logprobs is not None or of_prompt,
        ranks=body.prompt_logprobs is not None,
        top_n_tokens=max(logprobs or 0, body.prompt_logprobs or 0),
        exact_top_n=True,
    )


def _params(body: SamplingBody, call: HttpCall, max_tokens: int | None, **more: Any) -> Params:
    """Convert the common fields; `Params.of` takes those with the same name."""
    limits = call.generator.server_info.limits
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    special_ids = call.generator.special_token_ids(stops[: OPENAI_CONSTRAINTS.max_stop_sequences])
    truncation = body.truncate_prompt_tokens
    return Params.of(
        msgspec.structs.asdict(body),
        top_k=max(body.top_k or 0, 0),
        top_p=_SMALLEST_TOP_P if body.top_p == 0.0 else body.top_p,
        seed=None if body.seed is None else body.seed % 2**64,
        max_new_tokens=None if max_tokens in (None, -1) else min(max_tokens, limits.max_new_tokens),
        min_new_tokens=body.min_tokens,
        stop_sequences=stops,
        stop_token_ids=(*(body.stop_token_ids or ()), *special_ids),
        include_stop_sequence=bool(body.include_stop_str_in_output),
        truncate_input_tokens=limits.longest_input if truncation == -1 else truncation,
        grammar=grammar(body),
        prediction=body.prediction and body.prediction.text,
        fill_context=True,
        constraints=OPENAI_CONSTRAINTS,
        **more,
    )
