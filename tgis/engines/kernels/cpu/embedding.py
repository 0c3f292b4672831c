"""Embeddings of token ids that share the packed weight of the logits, or keep 16 bits beside activations in float32."""

import ctypes

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tgis.engines.kernels.cpu.gemm import TILE_N, CpuGemm, function_by, smallest
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels


class PackedEmbedding(nn.Embedding):  # type: ignore[misc]
    """An `nn.Embedding` whose rows are read by gemm.c; the class of a model's embedding comes before it."""

    def share(self, packed: Tensor, tile_n: int, kernels: CpuKernels, dtype: torch.dtype) -> None:
        """Read from a packed weight, or with `tile_n` of 1 from a plain one [ids, size]."""
        self._packed, self._tile_n, self._dtype = packed, tile_n, dtype
        self._read = kernels.function(
            function_by("packed_rows", packed.dtype, dtype),
            dtype,
            [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4,
            ctypes.c_int,
        )
        delattr(self, "weight")
        self.weight: Tensor = torch.empty(0, dtype=dtype, device="meta")  # some models ask for its dtype

    def forward(self, ids: Tensor) -> Tensor:  # [...] -> [..., size]
        assert ids.dtype == torch.int64, ids.dtype
        ids, size = ids.contiguous(), self.embedding_dim
        y = torch.empty(*ids.shape, size, dtype=self._dtype)
        pointers = self._packed.data_ptr(), ids.data_ptr(), y.data_ptr()
        if self._read(*pointers, ids.numel(), size, self.num_embeddings, self._tile_n):
            raise IndexError("a token id without an embedding")
        return y


class TokenEmbeddings:
    """The embeddings of a model, or of its encoder and decoder, and which share the weight of the logits: known only
    before this is packed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parts = (model.get_encoder(), model.get_decoder()) if model.config.is_encoder_decoder else (model,)
        self._embeddings = {part.get_input_embeddings() for part in parts}
        head = model.get_output_embeddings()
        self._tied = {embedding for embedding in self._embeddings if getattr(embedding, "weight", None) is head.weight}

    def pack(self, model: PreTrainedModel, kernels: CpuKernels, dtype: torch.dtype) -> None:
        """Replace in place those whose forward is not wrapped, by some that give values of this dtype."""
        gemm = getattr(model.get_output_embeddings(), "gemm", None)
        head = gemm if isinstance(gemm, CpuGemm) else None
        halves: dict[Tensor, Tensor] = {}
        for embedding in self._embeddings:
            is_wrapped = not isinstance(embedding, nn.Embedding) or "forward" in vars(embedding)
            is_shared = hasattr(embedding, "sharding")  # among ranks, each of which has some of the rows
            if is_wrapped or is_shared or dtype not in DTYPES:
                continue
            if head and embedding in self._tied:
                packed, tile_n = head.packed, TILE_N
            else:
                packed, tile_n = halves.setdefault(embedding.weight, smallest(embedding.weight.detach(), dtype)), 1
            if tile_n > 1 or packed.dtype != dtype:
                kind = type(embedding)
                bases = (PackedEmbedding,) if kind is nn.Embedding else (kind, PackedEmbedding)
                embedding.__class__ = type(kind.__name__, bases, {})
                embedding.share(packed, tile_n, kernels, dtype)
