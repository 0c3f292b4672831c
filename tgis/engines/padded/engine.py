"""Engine `hf_transformers`: any model that AutoModelForCausalLM or AutoModelForSeq2SeqLM loads, in padded batches.

The model code is transformers' own. Around it are KV caches that sequences join and leave at any step, packed linear
layers on the CPU, and sampling over the whole batch. Nothing is downloaded, and no code of a model directory runs.
"""

from collections.abc import Callable, Collection
from functools import partial

import msgspec
import torch

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import Engine, StepResult
from tgis.engines.loading.loader import load_config, select_device, select_kernels
from tgis.engines.loading.memory_estimate import UnloadedModel, unknown_memory
from tgis.engines.lora.layers import lora_of
from tgis.engines.memory.available import device_errors, memory_for_batches
from tgis.engines.memory.capacity import KVCacheCost, padded_capacity
from tgis.engines.memory.largest_step import step_bytes
from tgis.engines.memory.profiler import DummyRunner, profile
from tgis.engines.padded.causal_lm import CausalLM
from tgis.engines.padded.kv_cache import padded_cost
from tgis.engines.padded.model import MAX_LOGPROB_TOKENS, MAX_PREFILL_TOKENS, PaddedModel, check_states
from tgis.engines.padded.seq2seq_lm import Seq2SeqLM
from tgis.engines.sampling.draws import select_ops
from tgis.engines.sampling.sampler import BatchSampler
from tgis.engines.sharding.collectives import least_of_ranks
from tgis.errors import OutOfMemory, StartError, library_errors
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import Request

LoadModel = Callable[[EngineOptions, torch.device], PaddedModel]


def load_model(options: EngineOptions, device: torch.device) -> PaddedModel:
    return (Seq2SeqLM if load_config(options).is_encoder_decoder else CausalLM)(options, device)


def describe_memory(options: EngineOptions) -> list[str]:
    """The memory that a start will need; StartError if it does not fit."""
    unloaded = UnloadedModel(options)
    check_states(unloaded.model, options)
    if not unloaded.caches:
        return unknown_memory("hf_transformers", options)
    rows, longest = unloaded.max_batch_size, options.max_sequence_length
    chunk = min(longest, MAX_PREFILL_TOKENS[unloaded.device.type])
    if len(unloaded.caches) > 1:  # inputs are encoded as a whole; a requeued sequence computes all of its output again
        step = step_bytes(unloaded.model, unloaded.device.type, rows, longest, logits=chunk)
    else:
        logprobs = min(longest, MAX_LOGPROB_TOKENS)
        step = step_bytes(unloaded.model, unloaded.device.type, rows, chunk, logprobs=logprobs)
    caches = ([size // unloaded.kv_shards for size in layers] for layers in unloaded.caches)
    cost = sum((padded_cost(layers, rows) for layers in caches), KVCacheCost(0, 0))
    available = memory_for_batches(options, unloaded.device, to_load=unloaded.weights)
    room = padded_capacity(options, rows, cost, available, lambda: step)
    kv_cache = min(room, rows * longest), cost.bytes_per_token, cost.fixed_bytes
    return unloaded.table("hf_transformers", room, kv_cache, step)


class PaddedEngine(Engine):
    """An engine with one padded batch, whose sequences have the same rows here and in the model."""

    def __init__(self, options: EngineOptions, load: LoadModel = load_model) -> None:
        torch.set_grad_enabled(False)
        self._options = options
        self._device = select_device(options)
        with library_errors(f"{options.model_path} cannot be run"):
            self._model = load(options, self._device)
        self.info = self._model.info
        ops = select_ops(self._device, select_kernels(options, self._device))
        vocab_size, history_of = self.info.vocab_size, self._model.token_history
        ends, num_forced = options.config_eos_ids, int(self.info.forced_bos_token_id is not None)
        self._sampler = BatchSampler(vocab_size, options.eos_ids, self._device, history_of, ops, ends, num_forced)
        self._seqs: list[Sequence] = []

    @library_errors("a first step failed")
    def warm_up(self) -> None:
        """Generate two tokens for one sequence, then find the number of tokens of context that fit into memory."""
        seq = Sequence(Request(-1, tokens=[0] * 8, max_new_tokens=2), arrival_time=0.0)
        for _ in range(2):
            result = self.step(StepPlan.compute_all([seq]))
            for _, reason in result.failed.values():
                raise StartError(f"{self._options.model_path}: a first step failed: {reason}")
            seq.num_computed_tokens = len(seq.tokens)
            seq.tokens += result.tokens[0]
        cost = self._model.kv_cache_cost
        self.release([seq])
        available = memory_for_batches(self._options, self._device)
        measure = partial(profile, self, self._options, self._device)
        capacity = least_of_ranks(padded_capacity(self._options, self.info.max_batch_size, cost, available, measure))
        self.info = msgspec.structs.replace(self.info, token_capacity=capacity)

    @property
    def kv_cache_bytes(self) -> int:
        return self._model.kv_cache_bytes

    def find_peak(self, runner: DummyRunner) -> int:
        model = self._model
        longest = max(1, self.info.max_positions - 2)  # two tokens are generated
        return runner.padded_peak(longest, model.max_logprob_tokens, chunked=model.chunked_prefill)

    def step(self, plan: StepPlan) -> StepResult:
        """Run one prefill of the plan's sequences, or compute one token for all sequences."""
        with device_errors(f"a step of {len(plan.seqs)} rows"):
            return self._prefill(plan.seqs) if plan.has_prefill else self._decode(plan.seqs)

    def release(self, seqs: Collection[Sequence]) -> None:
        """Remove sequences; the last one moves to the row of a removed one. An empty batch holds no memory."""
        held = [seq for seq in seqs if seq in self._seqs]
        for seq in held:
            row = self._seqs.index(seq)
            self._model.remove(row)
            self._seqs[row] = self._seqs[-1]
            self._seqs.pop()
        self._sampler.release(seq.id for seq in seqs)
        if not self._seqs:
            self._model.clear()

    # No row is held while the cache grows: where that fails its layers may disagree, and `release` clears them.

    def _prefill(self, new_seqs: list[Sequence]) -> StepResult:
        held, self._seqs = self._seqs, []
        self._model.append(new_seqs)
        self._seqs = held + new_seqs
        with self._model.lora.applied([lora_of(seq) for seq in new_seqs]):
            logits, prompt_logprobs = self._model.prefill(new_seqs)
        result = self._sampler.sample_and_wait(new_seqs, logits)
        result.prompt_logprobs = prompt_logprobs
        return result

    def _decode(self, seqs: list[Sequence]) -> StepResult:
        if len(self._seqs) < len(seqs):
            raise OutOfMemory("the rows were lost when the cache could not grow")
        held, self._seqs = self._seqs, []
        last_tokens = torch.tensor([seq.tokens[-1] for seq in held], device=self._device)
        with self._model.lora.applied([lora_of(seq) for seq in held]):
            logits = self._model.decode(last_tokens)
        result = self._sampler.sample_and_wait(held, logits, seqs)
        self._seqs = held
        return result
