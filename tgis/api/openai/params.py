"""From the fields of a request to the parameters of the front end, whose rules are those of all APIs."""

from typing import Any

import msgspec

from tgis.api.http.calls import HttpCall
from tgis.api.openai.bodies import ChatCompletionRequest, CompletionRequest, SamplingBody
from tgis.api.openai.grammars import grammar
from tgis.errors import InvalidRequest
from tgis.frontend.params import Constraints, Params
from tgis.frontend.validation import RequestLimits
from tgis.ipc.request import LogprobOptions

# Validation's name of a parameter -> the field of a request; others have the same name.
FIELDS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "top_n_tokens": "top_logprobs",
    "adapter_id": "model",
}
MAX_CHOICES = 128  # of a prompt
MAX_TOP_LOGPROBS = 20
MAX_STOP_SEQUENCES = 16
MAX_STOP_SEQUENCE_BYTES = 1024
_MIN_ROOM = 1024  # tokens that must fit into the context where more are asked for
_SMALLEST_TOP_P = 1e-9  # for 0: the best token only

_CONSTRAINTS = Constraints(
    min_temperature=0.0,
    max_stop_sequences=MAX_STOP_SEQUENCES,
    max_stop_sequence_bytes=MAX_STOP_SEQUENCE_BYTES,
    max_top_n_tokens=MAX_TOP_LOGPROBS,
    min_room=_MIN_ROOM,
)


def chat_params(body: ChatCompletionRequest, call: HttpCall, *, parses_tools: bool) -> Params:
    """Parameters of a chat completion; with `parses_tools` the output keeps the special tokens around tool calls."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    top_logprobs = body.top_logprobs or 0 if body.logprobs else None
    return _params(
        body,
        call,
        max_tokens,
        logprob_options=_logprob_options(body, top_logprobs),
        add_special_tokens=bool(body.add_special_tokens),
        skip_special_tokens=False if parses_tools else body.skip_special_tokens,
    )


def completion_params(body: CompletionRequest, call: HttpCall) -> Params:
    """Parameters of a completion."""
    if body.suffix:
        raise InvalidRequest("suffix", "suffix is not supported")
    logprobs = 0 if body.logprobs is None and num_candidates(body) > num_choices(body) else body.logprobs
    options = _logprob_options(body, logprobs, of_prompt=body.logprobs is not None and bool(body.echo))
    max_tokens = 1 if only_prompt(body) else body.max_tokens
    return _params(body, call, max_tokens, logprob_options=options)


def only_prompt(body: SamplingBody) -> bool:
    """Whether the prompt is all that is wanted; the engine generates one token, which nobody sees."""
    return isinstance(body, CompletionRequest) and body.max_tokens == 0 and bool(body.echo)


def num_choices(body: SamplingBody) -> int:
    """How many outputs of each prompt are wanted."""
    return _positive("n", body.n)


def num_candidates(body: CompletionRequest) -> int:
    """How many outputs of each prompt are generated, for the best ones to be chosen."""
    best_of = num_choices(body) if body.best_of is None else _positive("best_of", body.best_of)
    if best_of < num_choices(body):
        raise InvalidRequest("best_of", f"best_of must be >= n ({num_choices(body)})", str(best_of))
    if best_of > num_choices(body) and body.stream:
        raise InvalidRequest("best_of", "best_of must be n in a stream", str(best_of))
    return best_of


def _logprob_options(body: SamplingBody, logprobs: int | None, *, of_prompt: bool = False) -> LogprobOptions:
    """For `logprobs` candidates of each new token, None for no logprobs at all; and what is wanted of the prompt."""
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
    """The parameters of both kinds of completions; those of the same name need no line here."""
    limits = call.generator.server_info.limits
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    params = Params.of(
        msgspec.structs.asdict(body),
        top_k=max(body.top_k or 0, 0),
        top_p=_SMALLEST_TOP_P if body.top_p == 0.0 else body.top_p,
        seed=_seed(body.seed),
        max_new_tokens=None if max_tokens is None else min(_positive("max_tokens", max_tokens), limits.max_new_tokens),
        min_new_tokens=body.min_tokens,
        stop_sequences=stops,
        stop_token_ids=(*(body.stop_token_ids or ()), *call.special_token_ids(stops[:MAX_STOP_SEQUENCES])),
        include_stop_sequence=bool(body.include_stop_str_in_output),
        truncate_input_tokens=_truncation(body.truncate_prompt_tokens, limits),
        grammar=grammar(body),
        fill_context=True,
        constraints=_CONSTRAINTS,
        **more,
    )
    if params.sampling.greedy:  # greedy decoding ignores filters, even invalid ones
        params.sampling = params.sampling.without_filters()
    return params


def _seed(seed: int | None) -> int | None:
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise InvalidRequest("seed", "seed must be a 64-bit integer", str(seed)[:40])
    return None if seed is None else seed % 2**64


def _truncation(num_tokens: int | None, limits: RequestLimits) -> int | None:
    if num_tokens == -1:
        return limits.max_input_tokens or limits.max_sequence_length - 1
    return None if num_tokens is None else _positive("truncate_prompt_tokens", num_tokens)


def _positive(field: str, value: int | None) -> int:
    if value == 0:
        raise InvalidRequest(field, f"{field} must be >= 1", "0")
    return value or 1
