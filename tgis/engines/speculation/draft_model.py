"""Models that draft tokens for another one, which verifies them: an MLP speculator, or a small model of any kind.

The latter is a paged engine of its own, with the same blocks in a second cache. It computes a sequence when it is first
asked to draft for it, and goes on from there as far as the tokens have come that it drafted. What its cache holds
changes nothing but how good drafts are. It samples as the sequence does, with the same noise: what it draws is often
what will be drawn, as far as the two models agree.
"""

from collections.abc import Callable, Collection
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedConfig, PreTrainedModel

from tgis.batcher.sequence import Sequence, StepPlan, num_common
from tgis.engines.loading.loader import DEFAULT_MAX_BATCH_SIZE, input_vocab_size
from tgis.engines.loading.memory_estimate import UnloadedModel
from tgis.engines.speculation.mlp_speculator import MLPConfig, MLPSpeculator
from tgis.engines.speculation.proposals import Drafter, rows_of
from tgis.errors import StartError, Unsupported, library_errors
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import LogprobOptions

_MAX_PROMPT_TOKENS = 512  # computed in a step before it drafts
_MAX_ROWS = 8  # rows of a sequence in one pass; more tokens are a prompt chunk
DraftEngine = Any  # a PagedEngine, whose package imports this one


def load_drafter(
    options: EngineOptions, model: PreTrainedModel, load: Callable[[EngineOptions], DraftEngine]
) -> Drafter:
    """The draft model of `model`, loaded as an engine by `load`, or its MLP speculator. StartError if the two do not
    fit together.
    """
    path, name = options.speculator_path or "", type(model).__name__
    if config := _mlp_config(path, model):
        rows = max(options.max_batch_size or DEFAULT_MAX_BATCH_SIZE["cpu"], 1 + options.speculation_max_tokens)
        with library_errors(path):
            return MLPSpeculator(Path(path), config, model, rows)
    try:
        engine = load(_draft_options(options))
        if engine.runner.states:
            raise Unsupported("states of recurrent layers cannot be taken back")
    except Unsupported as error:
        raise StartError(f"{path} cannot draft: {error}") from error
    sizes = input_vocab_size(model), model.get_output_embeddings().out_features
    for size, needed in zip((engine.info.input_vocab_size, engine.info.vocab_size), sizes, strict=True):
        if size != needed:
            raise StartError(f"{path} has a vocabulary of {size}, and {name} one of {needed}")
    if options.max_sequence_length > (positions := engine.info.max_positions):
        raise StartError(
            f"MAX_SEQUENCE_LENGTH {options.max_sequence_length} exceeds the {positions} positions of {path}"
        )
    return DraftModel(engine, options.speculation_max_tokens)


def unloaded_drafter(options: EngineOptions, model: PreTrainedModel) -> tuple[int, list[UnloadedModel]]:
    """The bytes of weights that a start would load to draft for `model`, and the draft model, unless it is an MLP
    speculator. StartError if it is too big or does not fit `model`.
    """
    if config := _mlp_config(options.speculator_path or "", model):
        return config.num_bytes(model.dtype), []
    unloaded = UnloadedModel(_draft_options(options))
    return unloaded.weights, [unloaded]


def _mlp_config(path: str, model: PreTrainedModel) -> MLPConfig | None:
    """The configuration of an MLP speculator; None for other draft models."""
    if model.config.is_encoder_decoder:
        raise StartError(f"{path}: SPECULATOR_NAME is for decoder-only models, which {type(model).__name__} is not")
    with library_errors(path):
        config = PreTrainedConfig.get_config_dict(path, local_files_only=True)[0]
    if config.get("is_encoder_decoder"):
        raise StartError(f"{path} is an encoder-decoder, which cannot draft")
    return MLPConfig.of(Path(path), config, model) if config.get("model_type") == "mlp_speculator" else None


def _draft_options(options: EngineOptions) -> EngineOptions:
    """The options with which a draft model is loaded."""
    plain = {"quantize": "none", "quantize_logits": False, "quantize_activations": "auto", "kv_cache_dtype": "auto"}
    plain |= {"compile": False, "speculator_path": None, "num_shards": 1}
    return msgspec.structs.replace(options, model_path=options.speculator_path, adapter_store=None, **plain)


class DraftModel(Drafter):
    """Drafts the tokens that a smaller model would choose."""

    def __init__(self, engine: DraftEngine, max_tokens: int) -> None:
        self.max_tokens, self.caches = max_tokens, engine.caches
        self._engine = engine
        # By request id: the number of tokens with keys and values in the cache, and the drafted tokens after them.
        self._computed: dict[int, tuple[int, list[int]]] = {}

    def draft(self, plan: StepPlan) -> dict[int, list[int]]:
        """Drafts, except for sequences with more uncomputed tokens than a step may compute."""
        left = _MAX_PROMPT_TOKENS
        asked = {seq.id: self._start(seq) for seq in plan.seqs if seq.id in plan.drafts}
        for seq in asked.values():
            if (tokens := min(seq.num_uncomputed_tokens - 1, left)) >= _MAX_ROWS:
                self._engine.runner.compute_logits(StepPlan([seq], [tokens], [], has_prefill=True))
                seq.num_computed_tokens += tokens
                left -= tokens
        ready = {id_: len(seq.tokens) for id_, seq in asked.items() if seq.num_uncomputed_tokens <= _MAX_ROWS}
        for done in range(max((plan.drafts[request_id] for request_id in ready), default=0)):
            self._extend([asked[request_id] for request_id in ready if plan.drafts[request_id] > done])
        drafts = dict[int, list[int]]()
        for seq in plan.seqs:
            if seq.id in ready:
                drafted = asked[seq.id].tokens[ready[seq.id] :]
                drafts[seq.id] = drafted[: seq.num_allowed(drafted)]
        for request_id, seq in asked.items():
            end = seq.num_computed_tokens
            length = min(ready.get(request_id, end), end)
            self._computed[request_id] = length, seq.tokens[length:end]
        return drafts

    def release(self, seqs: Collection[Sequence]) -> None:
        for seq in seqs:
            self._computed.pop(seq.id, None)

    def warm_up(self, num_blocks: int) -> None:
        self._engine.warm_up_with(num_blocks)
        self.caches = self._engine.caches

    def _start(self, seq: Sequence) -> Sequence:
        """A copy of the sequence for the draft model, without adapter and details."""
        length, drafted = self._computed.get(seq.id, (0, []))
        draft = copy(seq)
        draft.request = msgspec.structs.replace(seq.request, logprob_options=LogprobOptions())
        draft.tokens, draft.adapter = [*seq.tokens], None
        draft.num_computed_tokens = min(length + num_common(drafted, seq.tokens[length:]), len(seq.tokens) - 1)
        return draft

    def _extend(self, seqs: list[Sequence]) -> None:
        """Append the draft model's next token to each sequence, in one pass with a row for each token."""
        rows = []
        for seq in seqs:
            *known, newest = rows_of(seq, seq.tokens, seq.num_computed_tokens)
            for row in known:
                row.grammar = None  # its next token is known
            newest.max_length = len(seq.tokens) + 1  # forced tokens have separate passes
            rows += [*known, newest]
        result = self._engine.step(StepPlan(rows, [1] * len(rows), rows, has_prefill=False))
        ends = [*accumulate(seq.num_uncomputed_tokens for seq in seqs)]
        for seq, end in zip(seqs, ends, strict=True):
            seq.num_computed_tokens = len(seq.tokens)
            seq.tokens += result.tokens[end - 1] or [0]  # empty if scores are not finite or no token is allowed
