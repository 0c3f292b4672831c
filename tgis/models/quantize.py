"""Quantizes a model with auto-round into a new directory that can be served, here and by vLLM."""

import contextlib
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgis.errors import StartError, library_errors
from tgis.models.files import ModelFiles, find_weights, is_encoder_decoder, max_sequence_length
from tgis.models.staging import new_model, replace_config_files, timed

FORMATS = {"gptq": "auto_gptq", "awq": "auto_awq", "compressed-tensors": "llm_compressor"}  # auto-round's names
_ALIGNMENT = 32  # layers of other sizes stay as they are
_SAMPLES, _SAMPLE_TOKENS, _LEAST_TOKENS = 64, 256, 32
# Losses of batches differ by factors of 1000, so that the least is luck: the weights tuned last are better.
_TUNING = {"batch_size": 4, "not_use_best_mse": True}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is quantized."""

    bits: int
    group_size: int | None  # inputs that share a scale; None: all of a layer
    layout: str  # a name of FORMATS
    texts: list[str] | None  # calibration texts; None: weights are rounded
    iterations: int  # calibration steps per block of layers


def quantize_model(model: ModelFiles, out: Path, recipe: Recipe) -> None:
    """Write the quantized weights and all else that serving needs to directory `out`, which appears when it is
    complete.
    """
    with new_model(out, "quantize", "quantize", ("auto_round", "compressed_tensors")) as staging:
        if is_encoder_decoder(model.config) or "quantization_config" in model.config:
            kind = "an encoder-decoder" if is_encoder_decoder(model.config) else "quantized already"
            raise StartError(f"{model.path} is {kind}: only plain decoder-only models are quantized")
        find_weights(model.path)
        with timed("quantize with auto-round"):
            made = _run(model, staging, recipe)
        replace_config_files(model.path, made, ("config.json", "*.safetensors*"))
        os.sync()
        made.rename(out)


def _run(model: ModelFiles, staging: Path, recipe: Recipe) -> Path:
    """The directory that auto-round writes."""
    from auto_round import AutoRound  # noqa: PLC0415 - only here, and slow
    from auto_round.schemes import QuantizationScheme  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    with library_errors(f"auto-round cannot quantize {model.path}"), contextlib.redirect_stdout(sys.stderr):
        local = {"local_files_only": True, "trust_remote_code": False}
        loaded = AutoModelForCausalLM.from_pretrained(model.path, dtype="auto", use_safetensors=True, **local)
        tokenizer = AutoTokenizer.from_pretrained(model.path, **local)
        skipped, group_size = _fit(loaded, recipe.group_size)
        calibration: dict[str, Any] = {"iters": 0, "nsamples": 0, "disable_opt_rtn": True}
        if recipe.texts is not None:
            samples = _samples(tokenizer, recipe.texts, max_sequence_length(model.config))
            calibration = _TUNING | {"iters": recipe.iterations, "nsamples": len(samples), "dataset": samples}
            calibration["seqlen"] = samples[0].shape[1]
        quantizer = AutoRound(
            loaded,
            tokenizer,
            scheme=QuantizationScheme(recipe.bits, group_size, recipe.layout != "awq", "int", act_bits=16),
            layer_config={name: {"bits": 16} for name in skipped},
            enable_torch_compile=False,
            **calibration,
        )
        _, path = quantizer.quantize_and_save(str(staging), format=FORMATS[recipe.layout])
    return Path(path)


def _fit(model: Any, group_size: int | None) -> tuple[list[str], int]:
    """The linear layers that stay as they are, and the largest size of groups that divides all others: the one asked
    for, or halved.
    """
    import torch  # noqa: PLC0415 - as above

    head = model.get_output_embeddings()
    linears = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    shapes = {name: (each.in_features, each.out_features) for name, each in linears.items() if each is not head}
    skipped = [name for name, shape in shapes.items() if any(size % _ALIGNMENT for size in shape)]
    if skipped:
        print(f"{len(skipped)} layers whose sizes are no multiples of {_ALIGNMENT} stay plain", file=sys.stderr)
    if group_size is None:
        return skipped, -1
    fitting = math.gcd(group_size, *(inputs for name, (inputs, _) in shapes.items() if name not in skipped))
    if fitting != group_size:
        print(f"groups of {fitting} inputs: {group_size} does not divide every layer", file=sys.stderr)
    return skipped, fitting


def _samples(tokenizer: Any, texts: list[str], longest: int) -> list[Any]:
    """Token ids [1, tokens] of the texts, one after the other, cut to pieces of one length."""
    import torch  # noqa: PLC0415 - as above

    ids = torch.tensor([token for each in tokenizer(texts)["input_ids"] for token in each], dtype=torch.int64)
    if len(ids) < _LEAST_TOKENS:
        raise StartError(f"the texts for calibration have {len(ids)} tokens, at least {_LEAST_TOKENS} are needed")
    size = min(_SAMPLE_TOKENS, longest, len(ids))
    return [piece[None] for piece in ids.split(size) if len(piece) == size][:_SAMPLES]
