"""ONNX graphs as models of the padded engine: decoder-only, and encoder-decoder.

Some graphs take no mask of what the decoder has seen, or count places without it, as those of encoder-decoders that
Optimum exports by itself: there only rows that are equally long can share a pass.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from tgis.batcher.sequence import Sequence
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.onnx.decoder import Cross, Decoder, ignores_padding
from tgis.engines.onnx.files import find_graphs
from tgis.engines.onnx.kv_cache import Block, Cohort, Cohorts, alike
from tgis.engines.onnx.session import Graph
from tgis.engines.padded.kv_cache import KvCost
from tgis.engines.padded.model import PREFILL_TOKENS, ModelFacts, asking, in_pieces
from tgis.engines.padded.seq2seq_lm import OutputRules
from tgis.engines.sampling.logprobs import first_input_fact
from tgis.ipc.messages import EngineOptions, TokenFacts

_HIDDEN = "last_hidden_state"
_GENERATIONS = 2  # a pass reads the states of one and writes those of the next


class OnnxCausalModel:
    """A `PaddedModel`: a decoder, and what it keeps of its rows."""

    embedding_size = 0  # graphs take ids only

    def __init__(self, options: EngineOptions, config: PreTrainedConfig, device: torch.device) -> None:
        files = find_graphs(Path(options.model_path), encoder_decoder=False)
        self._decoder = Decoder.load(files, device, options.threads)
        self._device = device
        self.lora = LoraLayers(None)
        self.facts = _facts(config, self._decoder)
        self.positions = options.max_sequence_length
        self._together = ignores_padding(self._decoder, device, lambda _: None)
        self.clear()

    @property
    def kv_cost(self) -> KvCost:
        """Of all layers."""
        return KvCost(_GENERATIONS * self._decoder.bytes_per_token(self._decoder.decoded), 0)

    @property
    def held_bytes(self) -> int:
        """Of all rows."""
        return self._cohorts.held_bytes

    def context(self, row: Sequence) -> list[int]:
        """Prompt and generated tokens."""
        return row.tokens

    def clear(self) -> None:
        """Start again without rows."""
        self._cohorts = Cohorts()

    def leave(self, index: int) -> None:
        """Forget a row."""
        self._cohorts.leave(index)

    def join(self, rows: list[Sequence]) -> None:
        """Count new rows; their states come with the prefill."""
        self._cohorts.rows += len(rows)

    def prefill(self, rows: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenFacts]]]:
        """Compute prompts, in pieces where the graph can: the logits after each's last token, facts of input tokens."""
        first = self._cohorts.rows - len(rows)
        logits = self._decoder.logits(len(rows), self._device)
        inputs: dict[int, list[TokenFacts]] = {}
        for places in alike([row.pending for row in rows], self._together):
            group = [rows[place] for place in places]
            logits[places], facts = self._prefill(group, [first + place for place in places])
            inputs |= facts
        return logits, inputs

    def _prefill(self, rows: list[Sequence], numbers: list[int]) -> tuple[Tensor, dict[int, list[TokenFacts]]]:
        lengths = [row.pending for row in rows]
        width = max(lengths)
        ids = torch.tensor([[0] * (width - row.pending) + row.tokens for row in rows], device=self._device)
        block = self._decoder.block(self._decoder.decoded, lengths, self._device, padded_left=True)
        whole = not self._decoder.reads_past_in_pieces
        piece = width if whole else max(1, PREFILL_TOKENS[self._device.type] // len(rows))
        found = in_pieces(rows, piece, lambda start, stop: self._decoder.run(block, ids[:, start:stop]))
        self._cohorts.add(Cohort(numbers, block))
        return found

    def decode(self, newest: Tensor) -> Tensor:
        """One more token of every row."""
        logits = self._decoder.logits(len(newest), self._device)
        for cohort in self._cohorts.regrouped(self._together):
            logits[cohort.rows] = self._decoder.run(cohort.one_more(), newest[cohort.rows, None])[:, -1]
        return logits


class OnnxSeq2SeqModel:
    """A `PaddedModel`: an encoder, a decoder, and what the decoder keeps of its rows."""

    embedding_size = 0

    def __init__(self, options: EngineOptions, config: PreTrainedConfig, device: torch.device) -> None:
        files = find_graphs(Path(options.model_path), encoder_decoder=True)
        assert files.encoder is not None
        self._encoder = Graph(files.encoder, device, options.threads)
        self._encoder.expect(inputs={"input_ids", "attention_mask"}, outputs={_HIDDEN: 3})
        self._decoder = Decoder.load(files, device, options.threads)
        self._device = device
        self.lora = LoraLayers(None)
        self._rules = OutputRules.of(_generation_config(options, config), device)
        self.facts = _facts(config, self._decoder)
        most = getattr(config, "max_position_embeddings", None)
        self.positions = min(options.max_sequence_length, most or options.max_sequence_length)
        self._together = ignores_padding(self._decoder, device, self._probe)
        self.clear()

    @property
    def kv_cost(self) -> KvCost:
        """Of input and output: the longest ones may belong to different rows."""
        decoder = self._decoder
        each = decoder.bytes_per_token(decoder.decoded) + decoder.bytes_per_token(decoder.encoded)
        return KvCost(_GENERATIONS * each, 0)

    @property
    def held_bytes(self) -> int:
        """Of all rows."""
        return self._cohorts.held_bytes

    def context(self, row: Sequence) -> list[int]:
        """What the decoder has seen: the start token and the output."""
        return [self._rules.start, *row.tokens[row.prompt_length :]]

    def clear(self) -> None:
        """Start again without rows."""
        self._cohorts = Cohorts()

    def leave(self, index: int) -> None:
        """Forget a row."""
        self._cohorts.leave(index)

    def join(self, rows: list[Sequence]) -> None:
        """Count new rows; their states come with the prefill."""
        self._cohorts.rows += len(rows)

    def prefill(self, rows: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenFacts]]]:
        """Encode the inputs, then decode what there is of outputs: the logits of the next tokens; empty facts."""
        first = self._cohorts.rows - len(rows)
        states, mask = self._encode(rows)
        outputs = [self.context(row) for row in rows]
        lengths = [len(output) for output in outputs]
        logits = self._decoder.logits(len(rows), self._device)
        for places in alike(lengths, self._together):
            width = max(lengths[place] for place in places)
            ids = torch.tensor([[0] * (width - lengths[place]) + outputs[place] for place in places])
            decoded = self._block([lengths[place] for place in places], self._decoder.decoded, left=True)
            encoded = self._block([rows[place].prompt_length for place in places], self._decoder.encoded, left=False)
            cross = Cross(mask[places], states[places], encoded)
            logits[places] = self._decoder.run(decoded, ids.to(self._device), cross)[:, -1]
            self._cohorts.add(Cohort([first + place for place in places], decoded, encoded))
        self._rules.apply(logits, [place for place, row in enumerate(rows) if not row.generated])
        return logits, {row.id: [first_input_fact(row.request.details)] * row.prompt_length for row in asking(rows)}

    def decode(self, newest: Tensor) -> Tensor:
        """One more token of every row."""
        logits = self._decoder.logits(len(newest), self._device)
        for cohort in self._cohorts.regrouped(self._together):
            cross = self._cross(cohort.encoded)
            logits[cohort.rows] = self._decoder.run(cohort.one_more(), newest[cohort.rows, None], cross)[:, -1]
        self._rules.apply(logits, [])
        return logits

    def _encode(self, rows: list[Sequence]) -> tuple[Tensor, Tensor]:
        """The encoder's output, [rows, columns, hidden], padding on the right; its mask."""
        lengths = [row.prompt_length for row in rows]
        width = max(lengths)
        ids = [row.tokens[:length] + [0] * (width - length) for row, length in zip(rows, lengths, strict=True)]
        mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        return self._encoded(torch.tensor(ids, device=self._device), mask.to(self._device))

    def _encoded(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self._hidden(*ids.shape)
        self._encoder.run({"input_ids": ids, "attention_mask": mask}, {_HIDDEN: states})
        return states, mask

    def _probe(self, rows: int) -> Cross:
        """Of rows that have the same input."""
        ids = torch.arange(4, 7, device=self._device).repeat(rows, 1)
        states, mask = self._encoded(ids, torch.ones_like(ids))
        return Cross(mask, states, self._block([3] * rows, self._decoder.encoded, left=False))

    def _cross(self, encoded: Block | None) -> Cross:
        """Of rows whose inputs have been read before."""
        assert encoded is not None
        mask = encoded.mask(encoded.columns).long().to(self._device)
        return Cross(mask, self._hidden(len(mask), 1), encoded)

    def _hidden(self, rows: int, columns: int) -> Tensor:
        """Room for so much of the encoder's output."""
        port = self._encoder.outputs[_HIDDEN]
        return torch.zeros((rows, columns, port.size(2)), dtype=port.dtype, device=self._device)

    def _block(self, lengths: list[int], names: tuple[str, ...], *, left: bool) -> Block:
        return self._decoder.block(names, lengths, self._device, padded_left=left)


def _facts(config: PreTrainedConfig, decoder: Decoder) -> ModelFacts:
    name = (config.architectures or [type(config).__name__])[0]
    return ModelFacts(f"{name} (ONNX)", decoder.dtype, decoder.vocabulary, config.is_encoder_decoder)


def _generation_config(options: EngineOptions, config: PreTrainedConfig) -> GenerationConfig:
    if (Path(options.model_path) / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(options.model_path, local_files_only=True)
    return GenerationConfig.from_model_config(config)
