"""Engine `hf_transformers`: any model that AutoModelForCausalLM or AutoModelForSeq2SeqLM loads, in padded batches.

The model code is transformers' own; around it KV caches that rows join and leave at any step, packed linear layers
on the CPU, and sampling over the whole batch. It never downloads and never runs code of a model directory.
"""

from collections.abc import Callable, Iterator
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
from tgis.engines.sampling.batch_sampler import BatchSampler
from tgis.errors import OutOfMemory
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

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
        self._sampler = BatchSampler(self._vocab_size, options.eos_ids, self._device, self._model.token_history)
        self._seqs: list[Sequence] = []
        self._memory_model = MemoryModel(0)  # until it is warm

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
            token_capacity=self._memory_model.token_capacity,
            prefill_linear=self._memory_model.prefill_linear,
            prefill_quadratic=self._memory_model.prefill_quadratic,
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
        if not self._seqs:
            self._model.clear()

    def close(self) -> None:
        """Everything goes with the process."""

    def _prefill(self, new_seqs: list[Sequence]) -> StepResult:
        with self._all_or_nothing():
            self._model.append(new_seqs)
        self._seqs += new_seqs
        with self._model.lora.applied([lora_of(seq) for seq in new_seqs]):
            logits, prompt_logprobs = self._model.prefill(new_seqs)
        result = self._sampler.sample_and_wait(new_seqs, logits)
        result.prompt_logprobs = prompt_logprobs
        return result

    def _decode(self, seqs: list[Sequence]) -> StepResult:
        if len(self._seqs) < len(seqs):
            raise OutOfMemory("the rows were lost when the cache could not grow")
        with self._all_or_nothing():
            last_tokens = torch.tensor([seq.tokens[-1] for seq in self._seqs], device=self._device)
            with self._model.lora.applied([lora_of(seq) for seq in self._seqs]):
                logits = self._model.decode(last_tokens)
            result = self._sampler.sample_and_wait(self._seqs, logits)
            return StepResult.gather(seqs, [(self._seqs, result)])

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A step that stops half way through may leave a cache whose layers disagree: then forget every row."""
        try:
            yield
        except BaseException:
            self._model.clear()
            self._seqs = []
            raise
