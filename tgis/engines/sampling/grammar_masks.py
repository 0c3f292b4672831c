"""Which tokens the grammars of a batch allow next.

Masks are made on the host. Where a forced token may follow, the mask of the next token is made at the end of a step,
otherwise while a GPU still computes the logits.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.batcher.sequence import Sequence
from tgis.engines.base import StepResult
from tgis.engines.host_memory import to_device
from tgis.errors import GrammarError
from tgis.ipc.messages import FailureKind


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """What the grammars of a batch forbid; a row without a grammar may get any token."""

    forbidden: Tensor  # bool [B, V]
    only_eos: NDArray[np.bool_]  # [B]: nothing but the end is allowed
    problems: dict[int, str] = field(default_factory=dict)  # by request id: why there is no mask

    @classmethod
    def of(cls, seqs: list[Sequence], vocab_size: int, device: torch.device) -> Self | None:
        """The masks of a step; None if no row has a grammar."""
        table = next((seq.grammar.table for seq in seqs if seq.grammar is not None), None)
        if table is None:
            return None
        everything, problems = ~table.new_mask(), {}
        masks = [everything] * len(seqs)
        for row, seq in enumerate(seqs):
            if seq.grammar is not None:
                try:
                    masks[row] = seq.grammar.mask(seq.tokens[seq.prompt_length :]).copy()
                except GrammarError as error:
                    problems[seq.id] = str(error)
        only_eos = np.array([table.only_eos(mask) for mask in masks])
        return cls(_unpack(~np.stack(masks), device)[:, :vocab_size], only_eos, problems)


def append_forced_tokens(seqs: list[Sequence], result: StepResult) -> None:
    """Append the tokens that a grammar forces after those of a step, which then need no pass of the model each."""
    for seq, tokens in zip(seqs, result.tokens, strict=True):
        request, params = seq.request, seq.request.sampling_params
        excluded = request.output_details.wants_details or params.excluding_field
        if tokens and seq.grammar is not None and not excluded:
            generated = seq.tokens[seq.prompt_length :] + tokens
            try:
                tokens += seq.grammar.forced_tokens(generated, seq.num_remaining_tokens - len(tokens))
            except GrammarError as error:
                result.failed[seq.id] = FailureKind.GRAMMAR, str(error)


def _unpack(packed: NDArray[np.uint8], device: torch.device) -> Tensor:
    """Unpack the bits of each row to bool."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little").view(np.bool_))
    on_device = to_device(packed, torch.uint8, device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return ((on_device[:, :, None] >> shifts) & 1).bool().flatten(1)
