"""Which tokens the grammars of a batch allow next.

Masks are made on the host. Where a forced token may follow, the mask of the next token is made at the end of a step,
otherwise while a GPU still computes the logits.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.batcher.sequence import Sequence
from tgis.engines.base import StepResult
from tgis.engines.host_memory import to_device
from tgis.errors import GrammarError
from tgis.ipc.messages import FailureKind


def apply_grammars(
    logits: Tensor, seqs: list[Sequence], rows: list[int]
) -> tuple[NDArray[np.bool_] | None, dict[int, str]]:
    """Exclude from `logits` [B, V] what the grammars of the sequences at `rows` forbid; only these rows cost time.

    Returns which rows [B] may only end, None without grammars, and why there is no mask, by request id.
    """
    if not rows:
        return None, {}
    table = seqs[rows[0]].grammar.table
    masks = np.stack([~table.new_mask()] * len(rows))
    only_eos, problems = np.zeros(len(seqs), np.bool_), dict[int, str]()
    for mask, row in zip(masks, rows, strict=True):
        seq = seqs[row]
        try:
            mask[:] = seq.grammar.mask(seq.tokens[seq.prompt_length :])
        except GrammarError as error:
            problems[seq.id] = str(error)
        only_eos[row] = table.only_eos(mask)
    indices = to_device(rows, torch.int64, logits.device)
    forbidden = _unpack(~masks, logits.device)[:, : logits.shape[1]]
    logits[indices] = logits[indices].masked_fill_(forbidden, -torch.inf)
    return only_eos, problems


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
