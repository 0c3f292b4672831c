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
        weight = self.weight.detach()
        del self.weight
        self.weight = weight.to("meta", dtype)  # some models ask for its dtype

    def forward(self, ids: Tensor) -> Tensor:  # [...] -> [..., size]
        assert ids.dtype == torch.int64, ids.dtype
        ids, size = ids.contiguous(), self.embedding_dim
        y = torch.empty(*ids.shape, size, dtype=self._dtype)
        pointers = self._packed.data_ptr(), ids.data_ptr(), y.data_ptr()
        if self._read(*pointers, ids.numel(), size, self.num_embeddings, self._tile_n):
            raise IndexError("a token id without an embedding")
        return y


def token_embeddings(model: PreTrainedModel) -> list[nn.Embedding]:
    """Those of the model, or of its encoder and decoder, whose forward is not wrapped."""
    parts = (model.get_encoder(), model.get_decoder()) if model.config.is_encoder_decoder else (model,)
    embeddings = {part.get_input_embeddings() for part in parts}
    return [x for x in embeddings if isinstance(x, nn.Embedding) and "forward" not in vars(x) and x.max_norm is None]


def pack_embeddings(
    embeddings: list[nn.Embedding], head: Tensor, gemm: object, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    """Replace embeddings in place. `gemm` multiplies by the packed weight of the logits, `head` before it was packed."""
    halves: dict[Tensor, Tensor] = {}
    for embedding in embeddings:
        weight = embedding.weight
        if weight is head and isinstance(gemm, CpuGemm):
            packed, tile_n = gemm.packed, TILE_N
        elif dtype in DTYPES and weight.is_floating_point():
            packed, tile_n = halves.setdefault(weight, smallest(weight.detach(), dtype)), 1
        else:
            continue
        if tile_n == 1 and packed.dtype == dtype:
            continue
        kind = type(embedding)
        embedding.__class__ = PackedEmbedding if kind is nn.Embedding else type(kind.__name__, (kind, PackedEmbedding), {})
        embedding.share(packed, tile_n, kernels, dtype)
