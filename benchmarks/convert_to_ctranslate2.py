"""`convert_to_ctranslate2.py MODEL OUT QUANTIZATION`: a converted model without tokenizer, whose tokens are numbers.

Run by a Python with ctranslate2, transformers 4 and torch, for `benchmarks.encoder_decoders`.
"""

import sys
from typing import Any

from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found]
from transformers import AutoConfig


class Numbers:
    """In place of a tokenizer: the text of a token is its number."""

    def __init__(self, config: Any) -> None:
        self._texts = [str(token) for token in range(config.vocab_size)]
        self.eos_token = self.bos_token = self.unk_token = self._texts[config.eos_token_id]
        if config.pad_token_id == config.vocab_size - 1:  # Marian's, which is taken out by this name
            self._texts[-1] = "<pad>"
        self.pad_token = self._texts[config.pad_token_id]

    def get_vocab(self) -> dict[str, int]:
        return {text: token for token, text in enumerate(self._texts)}

    def convert_ids_to_tokens(self, token: int) -> str:
        return self._texts[token]


class Converter(TransformersConverter):  # type: ignore[misc]
    """Reads no tokenizer."""

    def load_tokenizer(self, _: type, path: str, **__: Any) -> Numbers:
        return Numbers(AutoConfig.from_pretrained(path, local_files_only=True))


if __name__ == "__main__":
    source, out, quantization = sys.argv[1:]
    Converter(source).convert(out, quantization=quantization, force=True)
