"""`python -m benchmarks.llama_cpp MODEL`: decode steps of llama.cpp, for `benchmarks.cpu_steps` and `quantized_steps`.

Needs llama-cpp-python. MODEL is a GGUF file, or a Llama in the format of transformers, from which one in bfloat16 is
written first, with gguf.
The last line is one JSON object: milliseconds of `llama_decode`, without sampling, by number of sequences.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig

from tgis.utils.cpus import usable_cores

_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

_Row = tuple[int, int, int]  # sequence, position, token


def write_gguf(model: Path, path: Path) -> None:
    """Write a GGUF file: weights in bfloat16, norms in float32, no tokenizer."""
    config = LlamaConfig.from_pretrained(model)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - no dict
            _add_tensor(writer, name, tensors.get_tensor(name), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, config: LlamaConfig) -> None:
    stem = name.removesuffix(".weight")
    if stem in _OTHER_TENSORS:
        own = _OTHER_TENSORS[stem]
    else:
        _, _, layer, part = stem.split(".", 3)
        own = f"blk.{layer}.{_LAYER_TENSORS[part]}"
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(own.rpartition(".")[2])
    if heads:  # rotary embeddings: llama.cpp pairs neighbours, transformers the halves of a head
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    numbers = tensor.float().contiguous().numpy()
    if numbers.ndim == 1:
        writer.add_tensor(f"{own}.weight", numbers)
    else:
        dtype = GGMLQuantizationType.BF16
        writer.add_tensor(f"{own}.weight", quantize(numbers, dtype), raw_dtype=dtype)


@contextmanager
def _context(model: Any, streams: int, tokens: int) -> Iterator[Any]:
    """A llama.cpp context for `streams` sequences of `tokens` tokens each."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = streams * tokens, streams
    params.n_batch = params.n_ubatch = max(tokens, streams)
    params.n_threads = params.n_threads_batch = usable_cores()
    context = llama_cpp.llama_init_from_model(model, params)
    assert context, "llama.cpp made no context"
    try:
        yield context
    finally:
        llama_cpp.llama_free(context)


def _decode(context: Any, rows: list[_Row], vocab_size: int) -> tuple[list[int], float]:
    """The most probable next token of each row, and the seconds that `llama_decode` took."""
    batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (sequence, position, token) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
        batch.seq_id[i][0] = sequence
    started = time.perf_counter()
    status = llama_cpp.llama_decode(context, batch)
    logits = llama_cpp.llama_get_logits(context)  # waits for the computation
    seconds = time.perf_counter() - started
    assert status == 0, status
    found = np.ctypeslib.as_array(logits, (len(rows), vocab_size)).argmax(1).tolist()
    llama_cpp.llama_batch_free(batch)
    return found, seconds


def measure_steps(model: Any, prompt: list[int], streams: int, steps: int) -> tuple[float, list[int]]:
    """Milliseconds of a decode step of several sequences with the same prompt, and the tokens of one of them."""
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    with _context(model, streams, len(prompt) + steps + 1) as context:
        tokens, _ = _decode(context, [(0, i, token) for i, token in enumerate(prompt)], vocab_size)
        memory = llama_cpp.llama_get_memory(context)
        for sequence in range(1, streams):
            llama_cpp.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        times, output, newest = [], [tokens[-1]], [tokens[-1]] * streams
        for position in range(len(prompt), len(prompt) + steps):
            newest, seconds = _decode(context, [(i, position, token) for i, token in enumerate(newest)], vocab_size)
            output.append(newest[0])
            times.append(seconds)
    return 1e3 * statistics.median(times), output


def measure(given: Path, all_streams: Iterable[int], input_tokens: int, steps: int) -> dict[str, Any]:
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as scratch:
        path = given
        if given.is_dir():
            write_gguf(given, path := Path(scratch, "model.gguf"))
        params = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert model, "llama.cpp loaded no model"
        prompt = torch.randint(1000, (input_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        found = {streams: measure_steps(model, prompt, streams, steps) for streams in all_streams}
    steps_ms = {streams: taken for streams, (taken, _) in found.items()}
    return {"version": llama_cpp.__version__, "step_ms": steps_ms, "tokens": next(iter(found.values()))[1]}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_cpp", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file or model directory")
    parser.add_argument("--streams", default="1,8,32", metavar="N,...", help="numbers of sequences per step")
    parser.add_argument("--input-tokens", type=int, default=130, metavar="N")
    parser.add_argument("--steps", type=int, default=40, metavar="N")
    args = parser.parse_args(arguments)
    print(json.dumps(measure(args.model, map(int, args.streams.split(",")), args.input_tokens, args.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
