"""Creates a model directory for the engine `fake`: a byte-level tokenizer and simulated step times."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = 256  # after the bytes


def make_fake_model(directory: Path, max_sequence_length: int = 2048, **steps: object) -> Path:
    """Write the model; `steps` are fields of the engine's StepModel."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "model_type": "fake",
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": EOS,
        "max_position_embeddings": max_sequence_length,
        "fake": steps,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
