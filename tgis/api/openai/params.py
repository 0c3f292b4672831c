"""From the fields of a request to the parameters of the front end, whose rules are those of all APIs."""

from tgis.api.openai.bodies import ChatCompletionRequest, CompletionRequest, SamplingBody
from tgis.api.openai.grammars import grammar
from tgis.errors import InvalidRequest
from tgis.frontend.sampling_params import Constraints, RawParams
from tgis.ipc.request import LogprobOptions

# Validation's name of a parameter -> the field of a request; others have the same name.
FIELDS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "top_n_tokens": "top_logprobs",
    "adapter_id": "model",
}
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


def chat_params(body: ChatCompletionRequest, *, parses_tools: bool) -> RawParams:
    """Parameters of a chat completion; with `parses_tools` the output keeps the special tokens around tool calls."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    options = LogprobOptions(generated_tokens=True, logprobs=True, top_n_tokens=body.top_logprobs or 0)
    return _params(
        body,
        max_tokens,
        options if body.logprobs else LogprobOptions(),
        add_special_tokens=False,  # the template writes them
        skip_special_tokens=False if parses_tools else body.skip_special_tokens,
    )


def completion_params(body: CompletionRequest) -> RawParams:
    """Parameters of a completion."""
    if body.suffix is not None:
        raise InvalidRequest("suffix", "suffix is not supported")
    wants_logprobs = body.logprobs is not None
    options = LogprobOptions(
        generated_tokens=wants_logprobs or num_candidates(body) > num_choices(body),
        input_tokens=wants_logprobs and bool(body.echo),
        logprobs=wants_logprobs or num_candidates(body) > num_choices(body),
        top_n_tokens=body.logprobs or 0,
    )
    return _params(
        body, body.max_tokens, options, add_special_tokens=True, skip_special_tokens=body.skip_special_tokens
    )


def num_choices(body: SamplingBody) -> int:
    """How many outputs of each prompt are wanted."""
    return _positive("n", body.n)


def num_candidates(body: CompletionRequest) -> int:
    """How many are generated, for the best ones to be chosen."""
    best_of = num_choices(body) if body.best_of is None else _positive("best_of", body.best_of)
    if best_of < num_choices(body):
        raise InvalidRequest("best_of", f"best_of must be >= n ({num_choices(body)})", str(best_of))
    if best_of > num_choices(body) and body.stream:
        raise InvalidRequest("best_of", "best_of must be n in a stream", str(best_of))
    return best_of


def _params(
    body: SamplingBody,
    max_tokens: int | None,
    options: LogprobOptions,
    *,
    add_special_tokens: bool,
    skip_special_tokens: bool | None,
) -> RawParams:
    if body.repetition_penalty == 0.0:
        raise InvalidRequest("repetition_penalty", "repetition_penalty must be > 0.0", "0")
    return RawParams(
        do_sample=body.temperature != 0.0,
        temperature=body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=_SMALLEST_TOP_P if body.top_p == 0.0 else body.top_p or 0.0,
        seed=_seed(body.seed),
        max_new_tokens=0 if max_tokens is None else _positive("max_tokens", max_tokens),
        min_new_tokens=body.min_tokens or 0,
        stop_sequences=_stop_sequences(body.stop),
        include_stop_sequence=bool(body.include_stop_str_in_output),
        logprob_options=options,
        repetition_penalty=body.repetition_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        ignore_eos=bool(body.ignore_eos),
        grammar=grammar(body),
        fill_context=True,
        add_special_tokens=add_special_tokens,
        skip_special_tokens=skip_special_tokens,
        constraints=_CONSTRAINTS,
    )


def _seed(seed: int | None) -> int | None:
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise InvalidRequest("seed", "seed must be a 64-bit integer", str(seed)[:40])
    return None if seed is None else seed % 2**64


def _stop_sequences(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _positive(field: str, value: int | None) -> int:
    if value == 0:
        raise InvalidRequest(field, f"{field} must be >= 1", "0")
    return value or 1
