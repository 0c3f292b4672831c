"""Embeddings read the packed weight of the logits, or a copy in 16 bits, and give what PyTorch's give."""

import pytest
import torch
from cpu_kernels import of_best_isa, seeded
from tiny_models import make_config
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tgis.engines.kernels.cpu.embedding import PackedEmbedding, TokenEmbeddings
from tgis.engines.kernels.cpu.gemm import TILE_N, CpuGemm
from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.linear import GemmSelector, pack_linears

deterministic, kernels = seeded, of_best_isa
IDS = torch.tensor([[3, 0, 40], [40, 63, 1]])


def packed(name: str, saved: torch.dtype, dtype: torch.dtype, kernels: CpuKernels, *, tied: bool) -> PreTrainedModel:
    config = make_config(name, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config).to(saved).to(dtype).eval()
    embeddings = TokenEmbeddings(model)
    pack_linears(model, GemmSelector(kernels))
    embeddings.pack(model, kernels, dtype)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["Llama", "Gemma"])  # Gemma's are scaled
@pytest.mark.parametrize(
    ("saved", "dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_packed_embedding_gives_the_rows_of_its_weight(
    kernels: CpuKernels, name: str, saved: torch.dtype, dtype: torch.dtype, tied: bool
) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(make_config(name, tie_word_embeddings=tied)).to(saved).to(dtype)
    torch.manual_seed(0)
    model = packed(name, saved, dtype, kernels, tied=tied)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, PackedEmbedding) == (tied or saved != dtype)
    assert torch.equal(embedding(IDS), plain.get_input_embeddings()(IDS))
    assert embedding(IDS).dtype == dtype


def test_rows_of_an_odd_size(kernels: CpuKernels) -> None:
    weight, embedding = torch.randn(70, 33).bfloat16(), PackedEmbedding(70, 33)
    embedding.share(CpuGemm(weight, kernels, torch.bfloat16).packed, TILE_N, kernels, torch.bfloat16)
    assert torch.equal(embedding(IDS), weight[IDS])


def test_a_tied_weight_is_in_memory_once(kernels: CpuKernels) -> None:
    model = packed("Llama", torch.float32, torch.float32, kernels, tied=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding._packed is head.gemm.packed
    assert not list(embedding.parameters())


def test_a_token_id_without_an_embedding_is_an_error(kernels: CpuKernels) -> None:
    embedding: nn.Module = packed("Llama", torch.float32, torch.float32, kernels, tied=True).get_input_embeddings()
    for id_ in (-1, embedding.num_embeddings):
        with pytest.raises(IndexError, match=r"^a token id without an embedding$"):
            embedding(torch.tensor([id_]))
