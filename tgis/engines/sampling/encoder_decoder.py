"""What all engines do alike for encoder-decoders: how outputs start, and which tokens the model's generation config
rules out.
"""

import torch
from torch import Tensor
from transformers import GenerationConfig

from tgis.batcher.sequence import Sequence
from tgis.engines.host_memory import to_device
from tgis.engines.sampling.logprobs import first_prompt_logprobs
from tgis.errors import StartError
from tgis.ipc.request import TokenLogprobs


class EncoderDecoder:
    """Outputs start with a token of the model's and follow the constraints of its generation config, whose defaults for
    sampling are ignored; inputs have no logprobs.
    """

    chunked_prefill = False  # the encoder needs whole inputs
    max_logprob_tokens = 0

    def __init__(self, config: GenerationConfig, vocab_size: int, device: torch.device) -> None:
        """StartError unless the config has one start token of the decoder, and this and the forced token are in the
        vocabulary.
        """
        start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        if not isinstance(start, int):
            raise StartError(f"decoder_start_token_id of an encoder-decoder must be one token, not {start!r:.40}")
        for name, token in {"decoder_start_token_id": start, "forced_bos_token_id": config.forced_bos_token_id}.items():
            if token is not None and not 0 <= token < vocab_size:
                raise StartError(f"{name} {token} is not in the model's vocabulary of {vocab_size}")
        words = [word[0] for word in config.bad_words_ids or [] if len(word) == 1]
        suppressed = [*words, *(config.suppress_tokens or [])]  # such as Marian's padding
        self.decoder_start_token_id = start
        self.forced_bos_token_id = config.forced_bos_token_id  # starts every output: a target language
        known = [token for token in suppressed if 0 <= token < vocab_size]
        self._suppressed_token_ids = torch.tensor(known, dtype=torch.int64, device=device)

    def token_history(self, seq: Sequence) -> list[int]:
        """The start token and the output."""
        return [self.decoder_start_token_id, *seq.tokens[seq.prompt_length :]]

    def decoder_input(self, seq: Sequence) -> list[int]:
        """The decoder's soft prompt as zeros, the start token and the output."""
        return [0] * seq.request.decoder_length + self.token_history(seq)

    def constrain(self, logits: Tensor, first_step_rows: list[int]) -> None:
        """Change logits [rows, V] in place; `first_step_rows` have no token yet."""
        logits.index_fill_(-1, self._suppressed_token_ids, -torch.inf)
        if self.forced_bos_token_id is not None and first_step_rows:
            rows = to_device(first_step_rows, torch.int64, logits.device)
            logits.index_fill_(0, rows, -torch.inf)
            logits[:, self.forced_bos_token_id].index_fill_(0, rows, 0)

    def prefilled(self, seqs: list[Sequence], logits: Tensor) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """The result of a prefill from the decoder's last logits [rows, V]."""
        self.constrain(logits, [row for row, seq in enumerate(seqs) if not seq.num_generated_tokens])
        return logits, self.prompt_logprobs(seqs)

    def prompt_logprobs(self, seqs: list[Sequence]) -> dict[int, list[TokenLogprobs]]:
        """What is told about inputs by request id, where it is asked for: nothing predicts them."""
        return {
            seq.id: [first_prompt_logprobs(seq.request.logprob_options)] * seq.request.input_positions
            for seq in seqs
            if seq.wants_prompt_logprobs
        }
