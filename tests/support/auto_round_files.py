"""Makes tests/engines/loading/auto_round_files with auto-round 0.16, which the tests do not need: a tiny Llama in some
of its layouts, with its logits in float32.

What is stored is unpacked by auto-round's layers, AWQ's by autoawq 0.2.7. The argument is a directory with the
packing_utils.py of autoawq, the interpreter one with auto-round.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OUT = Path(__file__).parents[1] / "engines" / "loading" / "auto_round_files"
IDS = torch.tensor([[5, 9, 13, 7, 40]])
KINDS = {  # format, bits, group size, symmetric, iterations
    "gptq": ("auto_gptq", 4, 32, True, 20),
    "gptq_8_bits": ("auto_gptq", 8, -1, True, 0),
    "auto_round": ("auto_round", 4, 32, False, 0),  # packed like AWQ's
}


def make(name: str) -> None:
    layout, bits, group_size, symmetric, iterations = KINDS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(torch.float16)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    rounding = {"dataset": [torch.randint(48, (1, 64)) for _ in range(8)], "seqlen": 64, "nsamples": 8}
    quantizer = AutoRound(
        model,
        tokenizer,
        bits=bits,
        group_size=group_size,
        sym=symmetric,
        iters=iterations,
        device_map="cpu",
        **(rounding if iterations else {"disable_opt_rtn": True}),
    )
    with tempfile.TemporaryDirectory() as directory:
        quantized, path = quantizer.quantize_and_save(directory, format=layout)
        tensors = load_file(Path(path) / "model.safetensors")
        tensors["expected"] = logits(config, quantized, tensors)
        (OUT / name).mkdir(parents=True, exist_ok=True)
        save_file(tensors, OUT / name / "model.safetensors", {"format": "pt"})
        shutil.copy(Path(path) / "config.json", OUT / name)
    print(name, json.loads((OUT / name / "config.json").read_text())["quantization_config"])


@torch.no_grad()  # type: ignore[untyped-decorator]
def logits(config: LlamaConfig, quantized: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    weights = dict(tensors)
    for name, module in quantized.named_modules():
        if f"{name}.qweight" not in tensors:
            continue
        found = tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"], tensors[f"{name}.scales"].float()
        if hasattr(module, "w_bit"):
            weight = dequantize_gemm(*found, module.w_bit, module.group_size).T
        else:
            module.qweight, module.qzeros, module.scales = found
            module._buffers.pop("g_idx", None)  # with it, auto-round 0.16 computes some of the outputs only
            weight = module(torch.eye(module.infeatures)).T
        weights[f"{name}.weight"] = weight
    plain = LlamaForCausalLM(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    plain.load_state_dict({name: weights[name].float() for name in plain.state_dict()})
    logits: torch.Tensor = plain(IDS).logits
    return logits


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    from packing_utils import dequantize_gemm

    for each in KINDS:
        make(each)
