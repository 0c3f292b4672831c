"""Engine `hf_transformers`: any model that AutoModelForCausalLM or AutoModelForSeq2SeqLM loads, in padded batches.

The model code is transformers' own; around it KV caches that rows join and leave at any step, packed linear layers
on the CPU, and sampling over the whole batch. It never downloads and never runs code of a model directory.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager

import torch

from tgis.batcher.memory_model import MemoryModel
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.loading.loader import load_config, select_device
from tgis.engines.lora.layers import lora_of
from tgis.engines.memory.available import device_errors
from tgis.engines.memory.profiler import profile_padded
from tgis.engines.padded.causal_lm import CausalLM
from tgis.engines.padded.model import MAX_PREFILL_TOKENS, PaddedModel
from tgis.engines.padded.seq2seq_lm import Seq2SeqLM
from tgis.engines.sampling.sampler import Sampler, SamplerOutput
from tgis.engines.sampling.token_history import TokenHistory
from tgis.errors import OutOfMemory
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.ipc.request import LogprobOptions, Request, SamplingParams, TokenLogprobs

_DEFAULT_MAX_BATCH_SIZE = {"cpu": 64, "cuda": 256}

LoadModel = Callable[[EngineOptions, torch.device, int], PaddedModel]  # the device, most rows


def load_model(options: EngineOptions, device: torch.device, max_batch_size: int) -> PaddedModel:
    """The model of the options' directory."""
    model_class = Seq2SeqLM if load_config(options).is_encoder_decoder else CausalLM
    return model_class(options, device, max_batch_size)


class PaddedEngine:
    """A padded batch: rows are in the same order here, in the model, in the sampler and in the context."""

    def __init__(self, options: EngineOptions, load: LoadModel = load_model) -> None:
        torch.set_grad_enabled(False)
        self._options = options
        self._device = select_device(options)
        self._max_batch_size = options.max_batch_size or _DEFAULT_MAX_BATCH_SIZE[self._device.type]
        self._model = load(options, self._device, self._max_batch_size)
        self._vocab_size = self._model.info.vocab_size
        self._eos_ids = options.eos_ids
        self._sampler = Sampler(self._vocab_size, options.eos_ids, self._device)
        self._token_history = TokenHistory(self._model.token_history, self._device)
        self._seqs: list[Sequence] = []
        self._batch_changed = True  # whether rows have joined or left since the last decode
        self._memory_model = MemoryModel.from_tokens(0)  # until it is warm

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded model."""
        facts = self._model.info
        return EngineInfo(
            model_class=facts.model_class,
            device=str(self._device),
            dtype=str(facts.dtype).removeprefix("torch."),
            vocab_size=self._vocab_size,
            encoder_decoder=facts.encoder_decoder,
            padded=True,
            max_batch_size=self._max_batch_size,
            token_capacity=self._memory_model.weight_limit,
            prefill_linear=self._memory_model.prefill_linear,
            prefill_quadratic=self._memory_model.prefill_quadratic_1,
            max_prefill_tokens=MAX_PREFILL_TOKENS[self._device.type],
            max_positions=self._model.max_positions,
            embedding_size=self._model.embedding_size,
            lora_targets=self._model.lora.targets,
        )

    def warm_up(self) -> None:
        """Generate two tokens for one row; learn what steps take of memory."""
        request = Request(
            -1, [0] * 8, 2, limited_by_context=False, sampling_params=SamplingParams(), logprob_options=LogprobOptions()
        )
        row = Sequence(request, arrival_time=0.0)
        for _ in range(2):
            tokens = self.step(StepPlan.compute_all([row])).tokens
            row.num_computed_tokens = len(row.tokens)
            row.tokens += tokens[0]
        cost = self._model.kv_cache_cost
        self.release([row])
        self._memory_model = profile_padded(self, self._options, self._device, cost, lambda: self._model.kv_cache_bytes)

    def step(self, plan: StepPlan) -> StepResult:
        """One prefill of the plan's rows, or one token for all rows."""
        with device_errors(f"a step of {len(plan.seqs)} rows"):
            return self._prefill(plan.seqs) if plan.has_prefill else self._decode(plan.seqs)

    def release(self, rows: Rows[Sequence]) -> None:
        """The last row takes the place of each that leaves; when none is left, nothing is held."""
        held = [row for row in rows if row in self._seqs]
        for row in held:
            index = self._seqs.index(row)
            self._model.remove(index)
            self._seqs[index] = self._seqs[-1]
            self._seqs.pop()
        if held:
            self._batch_changed = True
        if not self._seqs:
            self._model.clear()

    def close(self) -> None:
        """Everything goes with the process."""

    def _prefill(self, new_seqs: list[Sequence]) -> StepResult:
        with self._all_or_nothing():
            self._model.append(new_seqs)
        self._seqs += new_seqs
        self._batch_changed = True
        with self._model.lora.applied([lora_of(row) for row in new_seqs]):
            newest, inputs = self._model.prefill(new_seqs)
        sampler = Sampler(self._vocab_size, self._eos_ids, self._device)
        context = TokenHistory(self._model.token_history, self._device)
        sampler.set_seqs(new_seqs)
        context.set_seqs(new_seqs)
        choice = sampler.sample_and_wait(newest, context.ids)
        tokens, logprobs = _per_sequence(choice, range(len(new_seqs)))
        return StepResult(tokens, logprobs, inputs, _failed_sequences(new_seqs, choice.invalid))

    def _decode(self, rows: list[Sequence]) -> StepResult:
        if len(self._seqs) < len(rows):
            raise OutOfMemory("the rows were lost when the cache could not grow")
        with self._all_or_nothing():
            return self._decode_batch(rows)

    def _decode_batch(self, rows: list[Sequence]) -> StepResult:
        newest = torch.tensor([row.tokens[-1] for row in self._seqs], device=self._device)
        if self._batch_changed:
            self._sampler.set_seqs(self._seqs)
            self._token_history.set_seqs(self._seqs)
            self._batch_changed = False
        else:
            self._token_history.append(newest)
        with self._model.lora.applied([lora_of(row) for row in self._seqs]):
            logits = self._model.decode(newest)
        choice = self._sampler.sample_and_wait(logits, self._token_history.ids)
        place = {row.id: index for index, row in enumerate(self._seqs)}
        tokens, logprobs = _per_sequence(choice, [place[row.id] for row in rows])  # the plan's order, not the slots'
        return StepResult(tokens, logprobs, failed=_failed_sequences(self._seqs, choice.invalid))

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A step that stops half way through may leave a cache whose layers disagree: then forget every row."""
        try:
            yield
        except BaseException:
            self._model.clear()
            self._seqs = []
            self._batch_changed = True
            raise


def _per_sequence(output: SamplerOutput, order: Iterable[int]) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
    """Tokens and logprobs of one token per sequence, as a StepResult has them."""
    rows = list(order)
    if not output.logprobs:
        return [[output.tokens[row]] for row in rows], []
    logprobs = [output.logprobs[row] for row in rows]
    return [[output.tokens[row]] for row in rows], [[each] if each else [] for each in logprobs]


def _failed_sequences(rows: list[Sequence], bad: list[int]) -> dict[int, str]:
    return {rows[index].id: "the model's scores are not finite" for index in bad}
