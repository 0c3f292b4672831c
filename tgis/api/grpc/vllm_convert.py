"""Converts between messages of vllm.grpc.engine and the values of the front end."""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tgis.api.grpc.convert import grammar_spec, set_fields
from tgis.errors import InvalidRequest
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.params import MAX_CHOICES, MAX_TOP_LOGPROBS, OPENAI_CONSTRAINTS, Params
from tgis.frontend.validation import RequestLimits
from tgis.ipc.lookups import GrammarKind
from tgis.ipc.request import LogprobOptions, StopReason
from tgis.tracing import Headers

# Fields of SamplingParams whose parameters of the front end have another name.
_PARAMETERS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop": "stop_sequences",
    "truncate_prompt_tokens": "truncate_input_tokens",
}
_FIELDS = {name: field for field, name in _PARAMETERS.items()} | {"top_n_tokens": "logprobs"}
_RANGES = {
    "n": (1, MAX_CHOICES),
    "logprobs": (0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
    "max_tokens": (1, 2**32 - 1),
    "truncate_prompt_tokens": (-1, 2**31 - 1),  # -1: as many as fit
}
_MEDIA = ("mm_inputs", "extra_mm_inputs", "media_refs")
_UNSUPPORTED = (*_MEDIA, "data_parallel_rank", "kv_transfer_params", "kv_transfer_params_json")
_FINISH_REASONS = {StopReason.EOS_TOKEN: "stop", StopReason.STOP_SEQUENCE: "stop"}


def generate_call(
    message: pb.GenerateRequest, limits: RequestLimits, client: bytes, identity: bytes, headers: Headers
) -> GenerateCall:
    for descriptor, _ in message.ListFields():
        if descriptor.name in _UNSUPPORTED:
            raise InvalidRequest(descriptor.name, f"{descriptor.name} is not supported")
    if (given := message.WhichOneof("input")) is None:
        raise InvalidRequest("input", "one of tokenized and text must be set")
    n, tokenized = message.sampling_params.n or 1, given == "tokenized"
    return GenerateCall(
        kind=CallKind.STREAM if message.stream else CallKind.SINGLE if n == 1 else CallKind.BATCH,
        texts=[message.text],
        token_ids=[message.tokenized.input_ids] if tokenized else None,
        fields=["tokenized.input_ids" if tokenized else "text"],
        params=params(message.sampling_params, limits),
        client=client,
        identity=identity,
        n=n,
        headers=headers,
    )


def params(message: pb.SamplingParams, limits: RequestLimits) -> Params:
    """The parameters of a message. Zero is unset, unless the field is optional."""
    fields = dict(set_fields(message))
    for name, (lowest, highest) in _RANGES.items():
        if not lowest <= fields.get(name, lowest) <= highest:
            raise InvalidRequest(name, f"{name} must be from {lowest} to {highest}", str(fields[name]))
    if "structural_tag" in fields:
        raise InvalidRequest("structural_tag", "structural_tag is not supported")
    logprobs, prompt_logprobs = fields.get("logprobs"), fields.get("prompt_logprobs")
    grammar = grammar_spec(fields)
    if grammar and grammar.kind is GrammarKind.JSON_SCHEMA:  # routers do not say whether it is strict
        grammar = msgspec.structs.replace(grammar, exact=False)
    truncation = fields.pop("truncate_prompt_tokens", None)
    return Params.of(
        {_PARAMETERS.get(name, name): value for name, value in fields.items()},
        max_new_tokens=min(fields["max_tokens"], limits.max_new_tokens) if "max_tokens" in fields else None,
        fill_context=True,
        include_stop_sequence=message.include_stop_str_in_output,
        skip_special_tokens=message.skip_special_tokens,
        truncate_input_tokens=limits.longest_input if truncation == -1 else truncation,
        grammar=grammar,
        logprob_options=LogprobOptions(
            generated_tokens=True,
            input_tokens=prompt_logprobs is not None,
            logprobs=logprobs is not None or prompt_logprobs is not None,
            top_n_tokens=max(logprobs or 0, prompt_logprobs or 0),
            exact_top_n=True,
        ),
        constraints=OPENAI_CONSTRAINTS,
    )


def invalid_request(error: InvalidRequest) -> InvalidRequest:
    """The error in the names of this API."""
    message, field = str(error), _FIELDS.get(error.field, error.field)
    for name, renamed in _FIELDS.items():
        message = message.replace(name, renamed)
    path = f"sampling_params.{field}" if field in pb.SamplingParams.DESCRIPTOR.fields_by_name else field
    return InvalidRequest(path, message, error.value, error.logged)


class Answer:
    """The messages of one call, from its outputs."""

    def __init__(self, message: pb.GenerateRequest) -> None:
        self._params = message.sampling_params
        self._streams = message.stream
        self._prompt_tokens = 0

    def messages(self, output: RequestOutput) -> list[bytes]:
        """The messages for a chunk of a stream, or for a whole output. Those of a chunk count its new tokens."""
        self._prompt_tokens = output.input_token_count or self._prompt_tokens
        messages = []
        if self._streams and (output.tokens or output.input_tokens):
            chunk = pb.GenerateStreamChunk(completion_tokens=len(output.tokens))
            messages.append(pb.GenerateResponse(chunk=self._filled(chunk, chunk.token_ids, output)))
        if output.stop_reason:
            complete = pb.GenerateComplete(
                finish_reason=_FINISH_REASONS.get(output.stop_reason, "length"),
                completion_tokens=output.generated_token_count,
                cached_tokens=output.num_cached_tokens,
                matched_stop_str=output.stop_sequence or None,
            )
            if output.stop_reason is StopReason.EOS_TOKEN and output.tokens[-1].id in self._params.stop_token_ids:
                complete.matched_token_id = output.tokens[-1].id
            ended = RequestOutput(output.index) if self._streams else output
            messages.append(pb.GenerateResponse(complete=self._filled(complete, complete.output_ids, ended)))
        return [message.SerializeToString() for message in messages]

    def _filled(self, message: Any, token_ids: Any, output: RequestOutput) -> Any:
        """The message with what chunks and whole outputs have in common."""
        params = self._params
        message.index, message.prompt_tokens = output.index, self._prompt_tokens
        token_ids.extend(token.id for token in output.tokens)
        if params.HasField("logprobs") and output.tokens:
            _add_logprobs(message.output_logprobs, output.tokens, params.logprobs)
            message.output_logprobs.token_logprobs.extend(token.logprob for token in output.tokens)
        if output.input_tokens:
            tokens = [*output.input_tokens]
            _add_logprobs(message.input_logprobs, tokens, params.prompt_logprobs)
            for token in tokens:  # nothing comes before the first
                value = None if math.isnan(token.logprob) else token.logprob
                message.input_logprobs.token_logprobs.add(value=value)
        return message


def _add_logprobs(message: Any, tokens: Iterable[TokenInfo], num_candidates: int) -> None:
    for token in tokens:
        message.token_ids.append(token.id)
        if num_candidates:
            candidates = token.top_tokens[:num_candidates]
            message.top_logprobs.add(token_ids=[top[0] for top in candidates], values=[top[2] for top in candidates])
