"""The memory that the largest steps need beside the KV cache, which gets the rest (ESTIMATE_MEMORY).

`auto` runs dummy batches, the largest that requests can ask for, and takes the peak; `manual` trusts the options; `off`
counts the KV cache only.
"""

import logging
import time
from itertools import count
from typing import Protocol

import msgspec
import torch

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import Engine
from tgis.engines.memory.available import PeakMeter, memory_for_batches
from tgis.engines.memory.largest_step import prompt_logits_bytes
from tgis.errors import OutOfMemory, StartError
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import LogprobOptions, Request, SamplingParams
from tgis.utils.logs import format_bytes

log = logging.getLogger(__name__)

_SHORT_LENGTH = 8  # tokens of each sequence of a full batch
_WHOLE_LENGTH = 2048  # tokens of an input computed in one pass that memory is expected to hold without a smaller trial

# The most expensive sampling: a flat distribution, sorted as a whole, of scores that the penalties have copied. One
# sequence samples by another method, because each method copies the scores of its own sequences.
_EXPENSIVE = SamplingParams(
    temperature=100.0,
    top_p=0.999,
    typical_p=0.999,
    repetition_penalty=1.1,
    min_new_tokens=1,
    frequency_penalty=0.1,
    watermark=True,
)
_PLAIN = SamplingParams(temperature=1.0)
_DETAILS = LogprobOptions(generated_tokens=True, logprobs=True, ranks=True)


class ProfiledEngine(Engine, Protocol):
    """An engine whose largest steps can be measured."""

    @property
    def kv_cache_bytes(self) -> int:
        """The present size of the KV cache."""

    def find_peak(self, runner: "DummyRunner") -> int:
        """Find the peak of the largest steps with the runner."""


def profile(engine: ProfiledEngine, options: EngineOptions, device: torch.device) -> int:
    """Bytes that steps need beside the KV cache, found with dummy batches; 0 where nothing can be measured."""
    try:
        meter = PeakMeter(device)
    except OSError as error:
        log.warning("memory cannot be measured here, ESTIMATE_MEMORY is off then: %s", error)
        return 0

    started = time.monotonic()
    log.info("measuring the memory of the largest steps")
    peak = engine.find_peak(DummyRunner(engine, meter, memory_for_batches(options, device), options.max_top_n_tokens))
    meter.reset()
    log.info("measured in %.1f s: %s beside the KV cache", time.monotonic() - started, format_bytes(peak))
    return peak


class DummyRunner:
    """Runs dummy batches on an engine that holds no sequences; peaks are bytes beyond the model and the KV cache."""

    def __init__(self, engine: ProfiledEngine, meter: PeakMeter, available_bytes: int, max_top_n_tokens: int) -> None:
        self._engine = engine
        self._meter = meter
        self._available_bytes = available_bytes
        self._max_top_n_tokens = max_top_n_tokens
        self._ids = count(-2, -1)
        self._initial_bytes = meter.reset() - engine.kv_cache_bytes

    def padded_peak(self, max_length: int, max_logprob_tokens: int, *, chunked: bool) -> int:
        """Peak of a padded engine, one pass of which computes prompt logprobs of at most `max_logprob_tokens`.

        Where prefill is `chunked`, two chunks are enough; otherwise the longest input is one pass.
        """
        info = self._engine.info
        peak = self._full_batch_peak(max_logprob_tokens)
        if info.encoder_decoder:  # a requeued sequence computes all of its output again
            peak = max(peak, self._batch_peak(1, 1, max_logprob_tokens, min(max_length, info.max_prefill_tokens) - 1))
        else:
            peak = max(peak, self._batch_peak(1, min(max_length, info.max_prefill_tokens), max_logprob_tokens))
        if chunked:
            return max(peak, self._batch_peak(1, min(max_length, 2 * info.max_prefill_tokens)))
        return max(peak, self._whole_input_peak(max_length, max_logprob_tokens))

    def paged_peak(self, max_length: int, num_blocks: int) -> int:
        """Peak of the fullest step of a paged engine: prompts up to the longest, with logprobs, and decodes.

        The sequences share the few blocks that there are: what these hold does not matter.
        """
        info = self._engine.info
        seqs = [self._sequence(max_length, index=index, logprobs=True) for index in range(info.max_batch_size)]
        left = info.max_prefill_tokens - info.max_batch_size
        counts = []
        for seq in seqs:
            length = -(-max_length // info.block_size) + 1  # one more for an engine that looks ahead
            seq.block_table = [index % num_blocks for index in range(length)]
            counts.append(max(1, min(left, len(seq.tokens) - 1)))
            left -= counts[-1]
        self._engine.step(StepPlan(seqs, [1] * len(seqs), [], has_prefill=True))  # logprobs begin with the prompt
        for seq, scheduled in zip(seqs, counts, strict=True):
            seq.num_computed_tokens = len(seq.tokens) - scheduled
        peak = self._peak(StepPlan(seqs, counts, seqs, has_prefill=True), info.max_prefill_tokens)
        self._engine.release(seqs)
        return peak

    def _full_batch_peak(self, max_logprob_tokens: int) -> int:
        """Peak of the largest batch, after smaller ones that show whether it will fit."""
        info = self._engine.info
        length = max(1, min(_SHORT_LENGTH, info.max_prefill_tokens // info.max_batch_size))
        one = self._batch_peak(1, length, max_logprob_tokens)
        quarter = self._batch_peak(-(-info.max_batch_size // 4), length, max_logprob_tokens)
        if quarter + 4 * (quarter - one) > self._available_bytes:
            raise self._refusal()
        return self._batch_peak(info.max_batch_size, length, max_logprob_tokens)

    def _whole_input_peak(self, max_length: int, max_logprob_tokens: int) -> int:
        """Peak of the longest input in one pass, after shorter ones, since attention may need memory for the square."""
        length = min(max_length, _WHOLE_LENGTH)
        peak = self._batch_peak(1, length, max_logprob_tokens)
        while length < max_length:
            if 4 * peak > self._available_bytes:
                raise self._refusal()
            length = min(2 * length, max_length)
            peak = self._batch_peak(1, length, max_logprob_tokens)
        return peak

    def _batch_peak(self, num_seqs: int, prompt_length: int, logprob_tokens: int = 0, output_length: int = 0) -> int:
        """Peak of the prefills of `num_seqs` sequences on a padded engine, and of a decode of all of them.

        They ask for prompt logprobs if `logprob_tokens` is above 0.
        """
        seqs = [
            self._sequence(prompt_length, output_length, index=index, logprobs=logprob_tokens > 0)
            for index in range(num_seqs)
        ]
        together = max(1, self._engine.info.max_prefill_tokens // (prompt_length + output_length))
        peaks = []
        for start in range(0, num_seqs, together):
            joining = seqs[start : start + together]
            peaks.append(self._peak(StepPlan.compute_all(joining), logprob_tokens))
            for seq in joining:
                seq.num_computed_tokens = len(seq.tokens)
                seq.tokens.append(0)
        peaks.append(self._peak(StepPlan.compute_all(seqs)))
        self._engine.release(seqs)
        return max(peaks)

    def _peak(self, plan: StepPlan, max_logprob_tokens: int = 0) -> int:
        self._meter.reset()
        try:
            self._engine.step(plan)
        except OutOfMemory:
            raise self._refusal() from None
        measured = self._meter.peak() - self._initial_bytes - self._engine.kv_cache_bytes
        info, with_logprobs = self._engine.info, min(sum(plan.num_scheduled_tokens), max_logprob_tokens)
        peak = max(measured, prompt_logits_bytes(with_logprobs, info.vocab_size, info.device))
        length = max(len(seq.tokens) for seq in plan.seqs)
        log.info("  %d sequences of %d tokens: %s beside the KV cache", len(plan.seqs), length, format_bytes(peak))
        return peak

    def _sequence(self, prompt_length: int, output_length: int = 0, *, index: int, logprobs: bool) -> Sequence:
        """A dummy sequence; every other one is a token shorter, so that there is padding."""
        prompt_length = max(1, prompt_length - index % 2) if index else prompt_length
        info = self._engine.info
        vocab_size = min(info.vocab_size, info.input_vocab_size)
        tokens = [(index + 7 * position) % vocab_size for position in range(prompt_length + output_length)]
        sampling_params = _PLAIN if index == 1 else _EXPENSIVE
        options = msgspec.structs.replace(_DETAILS, input_tokens=logprobs, top_n_tokens=self._max_top_n_tokens)
        request = Request(
            next(self._ids),
            tokens[:prompt_length],
            output_length + 2,
            sampling_params=sampling_params,
            logprob_options=options,
        )
        seq = Sequence(request, arrival_time=0.0)
        seq.tokens = tokens
        return seq

    def _refusal(self) -> StartError:
        return StartError(
            f"{format_bytes(self._available_bytes)} of memory may not do for a step of"
            f" MAX_BATCH_SIZE={self._engine.info.max_batch_size} rows: lower it, choose a smaller DTYPE or grant more"
            " memory"
        )
