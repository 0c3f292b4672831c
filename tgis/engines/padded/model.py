"""The common parts of the models of a padded engine: passes over sequences that join and leave, and their KV caches.

Sequences have rows, 0 to n-1 without gaps, which are the same in the model and in the engine: new sequences are
appended, and the last one moves to the row of a removed one. Decoders get right-aligned rows, with the newest tokens of
all in the same column; encoders get left-aligned rows.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from tgis.batcher.sequence import Sequence
from tgis.engines.loading.arithmetic import with_arithmetic
from tgis.engines.loading.loader import engine_info, has_other_state, load_model, select_kernels
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.lora.soft_prompts import encoder_input
from tgis.engines.memory.capacity import KVCacheCost
from tgis.engines.padded.kv_cache import PaddedKVCache, padding_mask
from tgis.engines.sampling.logprobs import first_prompt_logprobs, prompt_logprobs
from tgis.errors import StartError
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.ipc.request import TokenLogprobs

# Larger passes gain nothing on two cores; an H200 needs thousands of tokens.
MAX_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
MAX_LOGPROB_TOKENS = 128  # per pass with prompt logprobs, whose logits take most of its memory


class PaddedModel(Protocol):
    """A loaded model, and the KV caches of its sequences."""

    info: EngineInfo  # before `warm_up` has found the token capacity
    lora: LoraLayers  # the caller applies the adapters of the sequences
    chunked_prefill: bool  # whether long inputs are computed in several passes
    max_logprob_tokens: int  # per pass with prompt logprobs; 0 if the model has none
    _caches: list[PaddedKVCache]  # caches of self-attention, then of cross-attention if there is an encoder

    @property
    def kv_cache_cost(self) -> KVCacheCost:
        """The most memory that the caches need, known after the first pass: the longest input and the longest output
        of an encoder-decoder may be of different sequences.
        """
        return sum((cache.cost for cache in self._caches), KVCacheCost(0, 0))

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes allocated for the caches now."""
        return sum(cache.allocated_bytes for cache in self._caches)

    def append(self, seqs: list[Sequence]) -> None:
        """Make room for new sequences."""
        self._caches[0].append([len(self.decoder_input(seq)) for seq in seqs])
        for cache in self._caches[1:]:
            cache.append([len(encoder_input(seq)) for seq in seqs])

    def prefill(self, seqs: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """Compute all tokens of the newest sequences. Returns the logits after the last token of each, [rows, V], and
        prompt logprobs by id, for sequences that ask for them and have generated nothing yet.

        If it raises, the other sequences are unharmed.
        """

    def decode(self, last_tokens: Tensor) -> Tensor:
        """Compute one more token of every sequence, ids [rows]; returns the logits after it, [rows, V]."""

    def remove(self, row: int) -> None:
        """Free a row; the last one moves there."""
        for cache in self._caches:
            cache.remove(row)

    def clear(self) -> None:
        """Drop all sequences, also after a pass that raised halfway."""
        self._caches = [PaddedKVCache(self.info.max_batch_size) for _ in range(1 + self.info.encoder_decoder)]

    def decoder_input(self, seq: Sequence) -> list[int]:
        """The tokens of the decoder that a prefill computes."""
        return seq.tokens

    def token_history(self, seq: Sequence) -> list[int]:
        """The tokens that a repetition penalty applies to, without placeholders of a soft prompt."""
        return seq.tokens[seq.request.soft_prompt_length :]


class TransformersModel(PaddedModel):
    """A model that transformers loads."""

    def __init__(self, options: EngineOptions, device: torch.device) -> None:
        self.model = load_model(options, device)
        check_states(self.model, options)
        self.lora = LoraLayers(self.model, select_kernels(options, device))
        self._device = device
        info = engine_info(
            "hf_transformers",
            self.model,
            options,
            device,
            padded=True,
            max_prefill_tokens=MAX_PREFILL_TOKENS[device.type],
            lora_targets=self.lora.targets,
        )
        self.info = with_arithmetic(info, options)


def check_states(model: PreTrainedModel, options: EngineOptions) -> None:
    """StartError for a model with states besides its KV cache, which sequences could not take along."""
    if has_other_state(model):
        kind = model.config.model_type
        raise StartError(f"{options.model_path}: models that keep more than a KV cache ({kind}) are not supported")


def chunked_prefill(
    seqs: list[Sequence], chunk_size: int, forward: Callable[[int, int], Tensor]
) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
    """Compute the tokens of right-aligned sequences; returns the last logits [rows, V], and prompt logprobs by id.

    `forward(start, stop)` computes at most `chunk_size` columns and returns their logits [rows, columns, V], or only
    those of the last column if no sequence asks for prompt logprobs.
    """
    width = max(seq.num_uncomputed_tokens for seq in seqs)
    wanting = [seq for seq in seqs if seq.wants_prompt_logprobs]
    all_logprobs = {seq.id: [first_prompt_logprobs(seq.request.logprob_options)] for seq in wanting}
    for start in range(0, width, chunk_size):
        stop = min(start + chunk_size, width)
        logits = forward(start, stop)
        for seq in wanting:
            padding = width - seq.num_uncomputed_tokens  # columns left of the sequence
            begin, end = max(start, padding), min(stop, width - 1)
            if begin < end:
                targets = seq.tokens[begin - padding + 1 : end - padding + 1]
                scores = logits[seqs.index(seq), begin - start : end - start]
                all_logprobs[seq.id] += prompt_logprobs(scores, targets, seq.request.logprob_options)
    return logits[:, -1], all_logprobs


def right_aligned(rows: list[list[int]]) -> Tensor:
    """Token ids [rows, columns] with 0 for the padding on the left."""
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(tokens)) + tokens for tokens in rows])


def left_aligned(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [rows, columns] with 0 for the padding on the right, and the mask of the tokens."""
    lengths = [len(tokens) for tokens in rows]
    width = max(lengths)
    ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in rows])
    return ids, padding_mask(lengths, width).flip(-1)


def right_aligned_states(rows: list[Tensor]) -> Tensor:
    """Hidden states [rows, columns, H] of rows [columns, H], with 0 for the padding on the left."""
    return pad_sequence(rows, batch_first=True, padding_side="left")


def token_positions(mask: Tensor, inputs: Tensor) -> Tensor:
    """The positions in their rows of `inputs` [rows, columns, ...], which are in the last columns of a mask: int64
    [rows, columns]; 0 for padding.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
