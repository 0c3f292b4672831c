"""Engine `hf_transformers`: any decoder-only model that `AutoModelForCausalLM` loads, in padded batches.

The model code is transformers' own; around it a KV cache that rows join and leave at any step, packed linear
layers on the CPU, and sampling over the whole batch. It never downloads and never runs code of a model directory.
"""

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager

import torch

from tgis.batcher.sequence import Plan, Sequence
from tgis.engines.attention import use_packed_attention
from tgis.engines.base import StepResult
from tgis.engines.context import TokenContext
from tgis.engines.kv_cache import PaddedCache
from tgis.engines.loading import load_causal_lm, pick_device
from tgis.engines.memory import device_errors, granted_memory
from tgis.engines.sampling import Sampler
from tgis.engines.token_facts import first_input_fact, input_facts
from tgis.errors import OutOfMemory
from tgis.messages import Details, EngineInfo, EngineOptions, Request, Sampling, TokenFacts

log = logging.getLogger(__name__)

_DEFAULT_BATCH = {"cpu": 64, "cuda": 256}
# Tokens of a pass beyond which a bigger one only takes longer: measured on two cores; an H200 needs thousands.
_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
_KV_OVERHEAD = 2.5  # a cache buffer is up to 1.5 times its rows, and a layer exists twice while it is moved


class TransformersEngine:
    """A padded batch: rows are in the same order here, in the cache, in the sampler and in the context."""

    def __init__(self, options: EngineOptions) -> None:
        torch.set_grad_enabled(False)
        self._device = pick_device(options)
        self._model, self._accepts = load_causal_lm(options, self._device)
        if self._device.type == "cpu":
            use_packed_attention(self._model)
        self._max_batch_size = options.max_batch_size or _DEFAULT_BATCH[self._device.type]
        self._eos_ids = options.eos_ids
        self._margin = options.batch_safety_margin
        self._vocab_size = int(self._model.get_output_embeddings().out_features)
        self._cache = PaddedCache(self._max_batch_size)
        self._sampler = Sampler(self._vocab_size, options.eos_ids, self._device)
        self._context = TokenContext(self._device)
        self._rows: list[Sequence] = []
        self._changed = True  # whether rows have joined or left since the last decode
        self._weight_limit = 0

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded model."""
        return EngineInfo(
            model_class=type(self._model).__name__,
            device=str(self._device),
            dtype=str(self._model.dtype).removeprefix("torch."),
            vocab_size=self._vocab_size,
            encoder_decoder=False,
            padded=True,
            max_batch_size=self._max_batch_size,
            weight_limit=self._weight_limit,
            prefill_tokens=_PREFILL_TOKENS[self._device.type],
        )

    def warm_up(self) -> None:
        """Generate two tokens for one row; learn what a token of context costs."""
        request = Request(-1, [0] * 8, 2, capped=False, sampling=Sampling(), details=Details())
        row = Sequence(request, queued_at=0.0)
        for _ in range(2):
            tokens = self.step(Plan.whole([row])).tokens
            row.computed = len(row.tokens)
            row.tokens += tokens
        self.release([row])
        free = granted_memory(self._device) * (100 - self._margin) // 100
        self._weight_limit = int(free / _KV_OVERHEAD) // self._cache.bytes_per_token
        log.info("room for %d tokens of context", self._weight_limit)

    def step(self, plan: Plan) -> StepResult:
        """One prefill of the plan's rows, or one token for all rows."""
        with device_errors(f"a step of {len(plan.rows)} rows"):
            return self._prefill(plan.rows) if plan.prefill else self._decode(plan.rows)

    def release(self, rows: Rows[Sequence]) -> None:
        """The last row takes the place of each that leaves."""
        held = [row for row in rows if row in self._rows]
        for row in held:
            index = self._rows.index(row)
            self._cache.leave(index)
            self._rows[index] = self._rows[-1]
            self._rows.pop()
        if held:
            self._changed = True

    def close(self) -> None:
        """Everything goes with the process."""

    def _prefill(self, joining: list[Sequence]) -> StepResult:
        first = len(self._rows)
        with self._all_or_nothing():
            self._cache.join([row.pending for row in joining])
        self._rows += joining
        self._changed = True
        newest, inputs = self._forward_prompts(first, joining)
        sampler, context = Sampler(self._vocab_size, self._eos_ids, self._device), TokenContext(self._device)
        sampler.set_rows(joining)
        context.set_rows(joining)
        choice = sampler.choose(newest, context.ids)
        return StepResult(choice.tokens, choice.facts, inputs, _failures(joining, choice.bad))

    def _decode(self, rows: list[Sequence]) -> StepResult:
        if len(self._rows) < len(rows):
            raise OutOfMemory("the rows were lost when the cache could not grow")
        with self._all_or_nothing():
            return self._decode_held(rows)

    def _decode_held(self, rows: list[Sequence]) -> StepResult:
        if self._changed:
            self._sampler.set_rows(self._rows)
            self._context.set_rows(self._rows)
            self._changed = False
        newest = torch.tensor([row.tokens[-1] for row in self._rows], device=self._device)
        self._context.append(newest)
        self._cache.decode()
        logits = self._forward(newest[:, None], first=0, width=self._cache.width, keep=1)
        choice = self._sampler.choose(logits[:, -1], self._context.ids)
        place = {row.id: index for index, row in enumerate(self._rows)}
        order = [place[row.id] for row in rows]  # the plan's order, not that of the slots
        return StepResult(
            [choice.tokens[index] for index in order],
            [choice.facts[index] for index in order] if choice.facts else [],
            failed=_failures(self._rows, choice.bad),
        )

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A step that stops half way through may leave a cache whose layers disagree: then forget every row."""
        try:
            yield
        except BaseException:
            self._cache = PaddedCache(self._max_batch_size)
            self._rows = []
            self._changed = True
            raise

    def _forward_prompts(self, first: int, rows: list[Sequence]) -> tuple[torch.Tensor, dict[int, list[TokenFacts]]]:
        """Compute prompts in pieces of bounded size: the logits after each row's last token, facts of input tokens."""
        width = max(row.pending for row in rows)
        ids = torch.tensor([[0] * (width - row.pending) + row.tokens[row.computed :] for row in rows])
        details = [row for row in rows if row.request.details.inputs and not row.generated]  # else told before
        inputs = {row.id: [first_input_fact(row.request.details)] for row in details}
        piece = max(1, _PREFILL_TOKENS["cpu" if details else self._device.type] // len(rows))
        for start in range(0, width, piece):
            stop = min(start + piece, width)
            self._cache.prefill(first, start, stop)
            logits = self._forward(ids[:, start:stop], first, stop, keep=0 if details else 1)
            for row in details:
                shift = width - row.pending  # columns of padding left of the row
                begin, end = max(start, shift), min(stop, width - 1)
                if begin < end:
                    predicted = row.tokens[begin - shift + 1 : end - shift + 1]
                    scores = logits[rows.index(row), begin - start : end - start]
                    inputs[row.id] += input_facts(scores, predicted, row.request.details)
        return logits[:, -1], inputs

    def _forward(self, ids: torch.Tensor, first: int, width: int, keep: int) -> torch.Tensor:
        """One pass for the rows from `first` on: ids [rows, columns], the newest of `width` columns; logits."""
        mask = self._cache.mask(first, width)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        arguments = {"position_ids": positions.to(self._device)} if self._accepts.position_ids else {}
        if self._accepts.logits_to_keep:
            arguments["logits_to_keep"] = keep
        output = self._model(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            past_key_values=self._cache.states,
            use_cache=True,
            **arguments,
        )
        return output.logits


def _failures(rows: list[Sequence], bad: list[int]) -> dict[int, str]:
    return {rows[index].id: "the model's scores are not finite" for index in bad}
