"""The sampler of an engine, which keeps tensors on the device while consecutive batches have the same sequences."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.batcher.sequence import Sequence
from tgis.engines.base import StepResult
from tgis.engines.host_memory import to_device
from tgis.engines.sampling.draws import noise_keys
from tgis.engines.sampling.grammar_masks import GrammarMasks
from tgis.engines.sampling.logprobs import PendingCopy
from tgis.engines.sampling.ops import SamplingOps
from tgis.engines.sampling.penalties import Histories, Penalties, TokenHistory
from tgis.engines.sampling.sampler import SampledTokens, StepInputs, sampling_groups

_Lengths = list[tuple[int, int]]  # request id and number of tokens of each sequence


class BatchSampler:
    """Samples one batch after another. A step is `prepare`, then `sample`. Consecutive steps of the same sequences
    reuse what is on the device: the parameters, and the token histories, to which the newest tokens are appended.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Iterable[int],
        device: torch.device,
        history_of: Callable[[Sequence], list[int]],
        ops: SamplingOps,
    ) -> None:
        """`vocab_size` is the width of the logits. Penalties on the end of a sequence apply to all of `eos_ids`; a
        repetition penalty and a watermark apply to the tokens that `history_of` returns, the newest last.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._history_of = history_of
        self._ops = ops
        self._eos = to_device(sorted({token for token in eos_ids if 0 <= token < vocab_size}), torch.int64, device)
        self._sampled_lengths: _Lengths | None = None  # in the last step; None if the next one must not reuse it
        self._next_lengths: _Lengths = []  # in the step that is prepared
        self._append_newest = False
        self._set_batch([])

    def prepare(self, seqs: list[Sequence], lookahead: int = 0) -> NDArray[np.int64]:
        """The step metadata [2, B] that `sample` takes on the device: the number of generated tokens and the noise key
        of each sequence. The newest `lookahead` tokens, at most one, are on the device only.
        """
        self._next_lengths = [(seq.id, len(seq.tokens) + lookahead) for seq in seqs]
        advanced = self._is_next(self._next_lengths)
        self._sampled_lengths = None  # this step may fail before it is sampled
        if not advanced:
            self._set_batch(seqs)
        self._append_newest = advanced or lookahead > 0
        num_generated = np.array([seq.num_generated_tokens + lookahead for seq in seqs], dtype=np.int64)
        keys = noise_keys(self._seeds, num_generated) if self._any_drawn else np.zeros_like(num_generated)
        return np.stack([num_generated, keys])

    def sample(self, logits: Tensor, newest: Tensor, step_metadata: Tensor) -> SampledTokens:
        """Sample a token for each sequence from `logits` [B, V], which may be overwritten. `newest` [B] are the last
        tokens.

        Nothing here waits for the device. The tokens of sequences with a grammar must all be on the host.
        """
        assert logits.shape == (len(self._seqs), self._vocab_size)
        for history in (self._tokens, self._outputs) if self._append_newest else ():
            if history is not None:
                history.append(newest)
        self._sampled_lengths = self._next_lengths
        num_generated, keys = step_metadata.unsqueeze(-1).unbind()
        masks = GrammarMasks.of(self._seqs, self._vocab_size, self._device)
        histories = Histories(self._tokens, self._outputs, num_generated, masks and masks.only_eos)
        step = StepInputs(logits, histories, keys, self._ops, masks)
        tables = [group.method(group, step) for group in self._groups]
        return SampledTokens(self._seqs, self._groups, tables, self._vocab_size, masks.problems if masks else {})

    def sample_and_wait(self, seqs: list[Sequence], logits: Tensor) -> StepResult:
        """Run a whole step for sequences whose tokens are all on the host."""
        with torch.inference_mode():
            step_metadata = to_device(self.prepare(seqs), torch.int64, self._device)
            newest = to_device([seq.tokens[-1] for seq in seqs], torch.int64, self._device)
            sampled = self.sample(logits, newest, step_metadata)
            PendingCopy(sampled.tables).wait()
            return sampled.result()

    def invalidate(self) -> None:
        """Reuse nothing in the next step: a token that was on the device only was replaced on the host."""
        self._sampled_lengths = None

    def _is_next(self, lengths: _Lengths) -> bool:
        last = self._sampled_lengths
        return last is not None and lengths == [(seq_id, length + 1) for seq_id, length in last]

    def _set_batch(self, seqs: list[Sequence]) -> None:
        self._seqs = list(seqs)
        self._seeds = np.array([seq.request.sampling_params.seed for seq in seqs], dtype=np.uint64)
        self._groups = sampling_groups(self._seqs, self._vocab_size, self._eos)
        params = [seq.request.sampling_params for seq in seqs]
        self._any_drawn = any(not each.greedy for each in params)
        needs_tokens, needs_outputs = any(map(Penalties.need_tokens, params)), any(map(Penalties.need_outputs, params))
        outputs = (seq.tokens[seq.prompt_length :] for seq in seqs)
        self._tokens = TokenHistory(map(self._history_of, seqs), self._device) if needs_tokens else None
        self._outputs = TokenHistory(outputs, self._device) if needs_outputs else None
