"""Engine `hf_transformers`: any model that AutoModelForCausalLM or AutoModelForSeq2SeqLM loads, in padded batches.

The model code is transformers' own; around it KV caches that rows join and leave at any step, packed linear layers
on the CPU, and sampling over the whole batch. It never downloads and never runs code of a model directory.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager

import torch

from tgis.batcher.memory_model import MemoryModel
from tgis.batcher.sequence import Plan, Sequence
from tgis.engines.base import StepResult
from tgis.engines.loading.loader import load_config, pick_device
from tgis.engines.lora.layers import lora_of
from tgis.engines.memory.available import device_errors
from tgis.engines.memory.profiler import padded_memory
from tgis.engines.padded.causal_lm import CausalModel
from tgis.engines.padded.model import PREFILL_TOKENS, PaddedModel
from tgis.engines.padded.seq2seq_lm import Seq2SeqModel
from tgis.engines.sampling.sampler import Sampler
from tgis.engines.sampling.token_history import TokenContext
from tgis.errors import OutOfMemory
from tgis.ipc.messages import Details, EngineInfo, EngineOptions, Request, Sampling

_DEFAULT_BATCH = {"cpu": 64, "cuda": 256}

LoadModel = Callable[[EngineOptions, torch.device, int], PaddedModel]  # the device, most rows


def load_model(options: EngineOptions, device: torch.device, max_rows: int) -> PaddedModel:
    """The model of the options' directory."""
    family = Seq2SeqModel if load_config(options).is_encoder_decoder else CausalModel
    return family(options, device, max_rows)


class PaddedEngine:
    """A padded batch: rows are in the same order here, in the model, in the sampler and in the context."""

    def __init__(self, options: EngineOptions, load: LoadModel = load_model) -> None:
        torch.set_grad_enabled(False)
        self._options = options
        self._device = pick_device(options)
        self._max_batch_size = options.max_batch_size or _DEFAULT_BATCH[self._device.type]
        self._model = load(options, self._device, self._max_batch_size)
        self._vocab_size = self._model.facts.vocab_size
        self._eos_ids = options.eos_ids
        self._sampler = Sampler(self._vocab_size, options.eos_ids, self._device)
        self._context = TokenContext(self._model.context, self._device)
        self._rows: list[Sequence] = []
        self._changed = True  # whether rows have joined or left since the last decode
        self._memory = MemoryModel.of_tokens(0)  # until it is warm

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded model."""
        facts = self._model.facts
        return EngineInfo(
            model_class=facts.name,
            device=str(self._device),
            dtype=str(facts.dtype).removeprefix("torch."),
            vocab_size=self._vocab_size,
            encoder_decoder=facts.encoder_decoder,
            padded=True,
            max_batch_size=self._max_batch_size,
            weight_limit=self._memory.weight_limit,
            prefill_linear=self._memory.prefill_linear,
            prefill_quadratic=self._memory.prefill_quadratic_1,
            prefill_tokens=PREFILL_TOKENS[self._device.type],
            positions=self._model.positions,
            embedding_size=self._model.embedding_size,
            linears=self._model.lora.linears,
        )

    def warm_up(self) -> None:
        """Generate two tokens for one row; learn what steps take of memory."""
        request = Request(-1, [0] * 8, 2, capped=False, sampling=Sampling(), details=Details())
        row = Sequence(request, queued_at=0.0)
        for _ in range(2):
            tokens = self.step(Plan.whole([row])).tokens
            row.computed = len(row.tokens)
            row.tokens += tokens
        cost = self._model.kv_cost
        self.release([row])
        self._memory = padded_memory(self, self._options, self._device, cost, lambda: self._model.held_bytes)

    def step(self, plan: Plan) -> StepResult:
        """One prefill of the plan's rows, or one token for all rows."""
        with device_errors(f"a step of {len(plan.rows)} rows"):
            return self._prefill(plan.rows) if plan.prefill else self._decode(plan.rows)

    def release(self, rows: Rows[Sequence]) -> None:
        """The last row takes the place of each that leaves; when none is left, nothing is held."""
        held = [row for row in rows if row in self._rows]
        for row in held:
            index = self._rows.index(row)
            self._model.leave(index)
            self._rows[index] = self._rows[-1]
            self._rows.pop()
        if held:
            self._changed = True
        if not self._rows:
            self._model.clear()

    def close(self) -> None:
        """Everything goes with the process."""

    def _prefill(self, joining: list[Sequence]) -> StepResult:
        with self._all_or_nothing():
            self._model.join(joining)
        self._rows += joining
        self._changed = True
        with self._model.lora.applied([lora_of(row) for row in joining]):
            newest, inputs = self._model.prefill(joining)
        sampler = Sampler(self._vocab_size, self._eos_ids, self._device)
        context = TokenContext(self._model.context, self._device)
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
        newest = torch.tensor([row.tokens[-1] for row in self._rows], device=self._device)
        if self._changed:
            self._sampler.set_rows(self._rows)
            self._context.set_rows(self._rows)
            self._changed = False
        else:
            self._context.append(newest)
        with self._model.lora.applied([lora_of(row) for row in self._rows]):
            logits = self._model.decode(newest)
        choice = self._sampler.choose(logits, self._context.ids)
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
            self._model.clear()
            self._rows = []
            self._changed = True
            raise


def _failures(rows: list[Sequence], bad: list[int]) -> dict[int, str]:
    return {rows[index].id: "the model's scores are not finite" for index in bad}
