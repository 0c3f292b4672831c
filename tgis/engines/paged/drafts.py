"""Models that draft tokens for another one, which verifies them: an MLP speculator, or a small model of any kind.

The latter is a paged engine of its own, with the same blocks in a second cache. It computes a sequence when it is first
asked to draft for it, and goes on from there as far as the tokens have come that it drafted. What its cache holds
changes nothing but how good drafts are.
"""

from collections.abc import Callable, Collection, Iterator
from copy import copy
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.loading.loader import DEFAULT_MAX_BATCH_SIZE, library_errors, model_info
from tgis.engines.paged.attention import PagedKVCache
from tgis.engines.paged.mlp_speculator import HiddenStates, MLPSpeculator
from tgis.errors import StartError, Unsupported
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.ipc.request import Request

_MAX_PROMPT_TOKENS = 512  # that a step computes before it drafts
_MAX_ROWS = 8  # of a sequence in one pass; more tokens are a chunk of a prompt
_row_ids = count(-1, -1)


class DraftEngine(Protocol):
    """The part of a paged engine that drafts need."""

    info: EngineInfo

    def compute_logits(self, plan: StepPlan) -> tuple[Tensor, dict[int, slice]]: ...

    @property
    def cache(self) -> PagedKVCache: ...

    def warm_up_with(self, num_blocks: int) -> None: ...


class Drafter(Protocol):
    """Drafts tokens in the steps of an engine."""

    kind: str
    max_tokens: int

    def draft(self, plan: StepPlan) -> None:
        """Add the drafts that the plan asks for to its proposals, as far as there are any."""

    def computed(self, rows: Tensor | None) -> None:
        """The engine has computed a pass; the first logits are those of its tokens in `rows`, or all are."""

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """The step has succeeded."""

    def release(self, seqs: Collection[Sequence]) -> None:
        """Forget sequences."""

    def warm_up(self, num_blocks: int) -> None:
        """The KV cache has so many blocks."""

    @property
    def caches(self) -> list[PagedKVCache]:
        """KV caches beside the engine's own, with as many blocks."""


def load_drafter(
    options: EngineOptions, model: PreTrainedModel, selects: bool, load: Callable[[EngineOptions], DraftEngine]
) -> Drafter:
    """The model that drafts tokens for another one, with `load` as an engine. `selects`: the other one computes only
    the logits that it is asked for. StartError if the two do not go together.
    """
    path, info = options.speculator_path or "", model_info(model)
    if info.encoder_decoder:
        raise StartError(f"{path}: SPECULATOR_NAME is for decoder-only models, which {info.model_class} is not")
    with library_errors(path):
        config = PreTrainedConfig.get_config_dict(path, local_files_only=True)[0]
    if config.get("model_type") == MLPSpeculator.kind:
        if not selects:
            raise StartError(f"{path}: {info.model_class} computes all logits, and takes no MLP speculator")
        head, rows = model.get_output_embeddings(), max(options.max_batch_size or DEFAULT_MAX_BATCH_SIZE["cpu"], 64)
        states = HiddenStates(head, rows, head.in_features, model.dtype)
        with library_errors(path):
            return MLPSpeculator(Path(path), config, states, (info.vocab_size, head.in_features))
    plain = {"quantize": "none", "kv_cache_dtype": "auto", "compile": False}
    own = msgspec.structs.replace(options, model_path=path, speculator_path=None, adapter_store=None, **plain)
    try:
        engine = load(own)
    except Unsupported as error:
        raise StartError(f"{path} cannot draft: {error}") from error
    if engine.info.input_vocab_size != info.input_vocab_size:
        sizes = f"{engine.info.input_vocab_size} tokens, and {info.model_class} one of {info.input_vocab_size}"
        raise StartError(f"{path} has a vocabulary of {sizes}")
    return DraftModel(engine, options.speculation_max_tokens)


class DraftModel:
    """Drafts the best tokens of a model, greedily; of a sequence it keeps what is in the cache."""

    kind = "draft"

    def __init__(self, engine: DraftEngine, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._engine = engine
        self._computed: dict[int, list[int]] = {}  # by request id: the tokens whose keys and values are there

    def draft(self, plan: StepPlan) -> None:
        """Draft greedily, except for sequences of which more than a step may compute is new."""
        wanted = {seq.id: plan.drafts[seq.id] for seq in plan.seqs if seq.id in plan.drafts}
        asked = [seq for seq in plan.seqs if seq.id in wanted and self._has_room(seq, wanted[seq.id])]
        own = [self._start(seq) for seq in asked]
        left = _MAX_PROMPT_TOKENS
        for seq in own:
            left -= self._compute_prompt(seq, left)
        ready = [(seq, wanted[first.id], first) for first, seq in zip(asked, own, strict=True) if _is_short(seq)]
        for done in range(max((most for _, most, _ in ready), default=0)):
            self._extend([seq for seq, most, _ in ready if most > done])
        for seq, _, first in ready:
            plan.proposals[first.id] = seq.tokens[len(first.tokens) :]
        for first, seq in zip(asked, own, strict=True):
            self._computed[first.id] = seq.tokens[: seq.num_computed_tokens]

    def computed(self, rows: Tensor | None) -> None:
        """Do nothing, as in `note`."""

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Do nothing: its drafts depend on tokens only."""

    def release(self, seqs: Collection[Sequence]) -> None:
        for seq in seqs:
            self._computed.pop(seq.id, None)

    def warm_up(self, num_blocks: int) -> None:
        self._engine.warm_up_with(num_blocks)

    @property
    def caches(self) -> list[PagedKVCache]:
        return [self._engine.cache]

    def _has_room(self, seq: Sequence, most: int) -> bool:
        return len(seq.tokens) + most <= self._engine.info.max_positions

    def _start(self, seq: Sequence) -> Sequence:
        """The sequence as the model computes it: without adapters."""
        own = Sequence(Request(next(_row_ids), [], 0), 0.0)
        own.tokens, own.block_table = [*seq.tokens], seq.block_table
        known = self._computed.get(seq.id, [])
        own.num_computed_tokens = _common_prefix(known, seq.tokens[:-1])
        return own

    def _compute_prompt(self, seq: Sequence, most: int) -> int:
        """Compute up to `most` tokens but not the last, if there are many; returns their number."""
        tokens = 0 if _is_short(seq) else min(seq.num_uncomputed_tokens - 1, most)
        if tokens:
            self._engine.compute_logits(StepPlan([seq], [tokens], [], has_prefill=True))
            seq.num_computed_tokens += tokens
        return tokens

    def _extend(self, seqs: list[Sequence]) -> None:
        """Append the best next token to each sequence, in one pass of a row for each token."""
        rows = [row for seq in seqs for row in _rows(seq)]
        logits, _ = self._engine.compute_logits(StepPlan(rows, [1] * len(rows), rows, has_prefill=False))
        ends = torch.tensor([seq.num_uncomputed_tokens for seq in seqs]).cumsum(0) - 1
        best = logits[ends.to(logits.device), : self._engine.info.input_vocab_size].argmax(-1)
        for seq, token in zip(seqs, best.tolist(), strict=True):
            seq.num_computed_tokens = len(seq.tokens)
            seq.tokens.append(token)


def _is_short(seq: Sequence) -> bool:
    return seq.num_uncomputed_tokens <= _MAX_ROWS


def _rows(seq: Sequence) -> Iterator[Sequence]:
    """A row for each token that is not computed."""
    for position in range(seq.num_computed_tokens, len(seq.tokens)):
        row = copy(seq)
        row.request, row.num_computed_tokens = Request(next(_row_ids), [], 0), position
        yield row


def _common_prefix(known: list[int], tokens: list[int]) -> int:
    """The number of tokens that both begin with."""
    length = min(len(known), len(tokens))
    if known[:length] == tokens[:length]:
        return length
    return next(at for at in range(length) if known[at] != tokens[at])
