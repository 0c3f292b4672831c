"""Makes the tokenizer that the header of a GGUF file describes: with the ids of the model's original tokenizer, and
the ends of llama.cpp.
"""

import json
import re
from pathlib import Path
from typing import Any

from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping

from tgis.errors import StartError, library_errors
from tgis.models.convert.sentencepiece_model import follow_sentencepiece
from tgis.models.files import read_if_any
from tgis.models.gguf import WEIGHTS

TOKENIZER = "tokenizer.json"
_SENTENCEPIECE = {"t5": 1, "llama": 2}  # unigram and BPE, as in sentencepiece_model.proto
_REQUIRED = {"gpt2": ("tokens", "merges")} | dict.fromkeys(_SENTENCEPIECE, ("tokens", "scores", "token_type"))
_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # types of tokens
# Pre-tokenizers that split as GPT-2 does, and those that also split at every digit
_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo"})
_GPT2_AND_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
# Words that are tokens are not merged, and texts begin with BOS unless the header says no
_WHOLE_WORDS = frozenset({
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
})  # fmt: skip
# The original tokenizers compose characters first, which llama.cpp leaves out
_COMPOSED = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen", "f2llmv2", "mpt", "olmo", "command-r"})
_KEEP_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_NAMED_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>", "<turn|>",
    "<end_of_utterance>", "<|tool_response>", "<｜end▁of▁sentence｜>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>",
    "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip


def tokenizer_fields(metadata: dict[str, Any]) -> dict[str, Any]:
    """What a header says of the tokenizer."""
    return {name.removeprefix(_PREFIX): value for name, value in metadata.items() if name.startswith(_PREFIX)}


def make_tokenizer(metadata: dict[str, Any], out: Path) -> None:
    """Write the tokenizer and its configuration, where that of a file that is there comes first, to directory `out`."""
    fields = tokenizer_fields(metadata)
    kind = fields.get("model")
    if kind not in _REQUIRED:
        raise StartError(f"its tokenizer {kind!r:.40} is unknown: put {TOKENIZER} next to the file")
    if missing := [name for name in _REQUIRED[kind] if name not in fields]:
        raise StartError(f"its header has no {_PREFIX}{missing[0]}: put {TOKENIZER} next to the file")
    with library_errors(f"its tokenizer cannot be read, put {TOKENIZER} next to the file"):
        if kind == "gpt2":
            _byte_level(fields).save(str(out / TOKENIZER))
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(out, gguf_file=WEIGHTS, local_files_only=True)
            if metadata["general.architecture"] == "phi3":  # its control tokens take the space after them
                texts = {token.content for token in tokenizer.added_tokens_decoder.values()} - _KEEP_SPACE
                tokenizer.add_tokens([AddedToken(text, rstrip=True, special=True) for text in texts])
            tokenizer.backend_tokenizer.save(str(out / TOKENIZER))
            settings = {"add_bos_token": fields.get("add_bos_token", kind == "llama")}
            follow_sentencepiece(_sentencepiece(kind, fields), out / TOKENIZER, settings)
        config = out / "tokenizer_config.json"
        content = _config(metadata, fields) | read_if_any(config)
        config.unlink(missing_ok=True)  # it may be a link
        config.write_text(json.dumps(content))


def end_ids(fields: dict[str, Any]) -> list[int]:
    """The tokens that end a text: those that the header names, then those that llama.cpp knows by their text."""
    tokens, types = fields.get("tokens", ()), fields.get("token_type", ())
    named = (fields.get(f"{name}_token_id", -1) for name in _NAMED_ENDS)
    ids = {index: tokens[index] for index in named if 0 <= index < len(tokens)}
    for index, (text, kind) in enumerate(zip(tokens, types, strict=False)):
        # llama.cpp takes any token for an end, but "</s>" may also be a tag of HTML
        if text in _ENDS and (kind == _CONTROL or (kind == _USER_DEFINED and text != "</s>")):
            ids[index] = text
    texts = set(ids.values())
    has_messages = texts & {"<|call|>", "<|calls|>"} and texts & {"<|return|>", "<|flush|>"}
    not_last = {"<|end|>" if has_messages else "", "</s>" if "<|tool_response>" in texts else ""}
    return [index for index, text in ids.items() if text not in not_last]


def _config(metadata: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The names of special tokens, and the chat templates."""
    ids = {f"{name}_token": fields.get(f"{key}_token_id") for name, key in _NAMES.items()}
    config: dict[str, Any] = {name: fields["tokens"][index] for name, index in ids.items() if index is not None}
    matches = (re.fullmatch(r"tokenizer\.chat_template(?:\.(\w+))?", name) for name in metadata)
    templates = {match[1] or "default": metadata[match[0]] for match in matches if match}
    if "default" in templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config | {"tokenizer_class": "PreTrainedTokenizerFast"}


def _byte_level(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE. Control tokens may have any characters: they stay whole."""
    tokens, splitter = fields["tokens"], fields.get("pre")
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitter in _WHOLE_WORDS))
    if splitter in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = _pre_tokenizer(splitter), decoders.ByteLevel()
    types = dict(enumerate(fields.get("token_type", ()))) | dict.fromkeys(end_ids(fields), _CONTROL)
    added = {tokens[i]: kind == _CONTROL for i, kind in sorted(types.items()) if kind in (_CONTROL, _USER_DEFINED)}
    tokenizer.add_tokens([AddedToken(text, special=flag, normalized=False) for text, flag in added.items()])
    adds = {"bos": splitter in _WHOLE_WORDS, "eos": False}
    ids = {name: fields.get(f"{name}_token_id") for name in adds if fields.get(f"add_{name}_token", adds[name])}
    bos, eos = ([tokens[ids[name]]] if ids.get(name) is not None else [] for name in adds)
    special = [(text, vocabulary[text]) for text in {*bos, *eos}]
    tokenizer.post_processor = processors.TemplateProcessing([*bos, "$A", *eos], special_tokens=special)
    return tokenizer


def _pre_tokenizer(name: str | None) -> Any:
    """What splits texts before byte-level BPE; StartError unless it is known how llama.cpp splits them."""
    splits = getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", {})  # not in 5.17
    steps: list[Any] = []
    if name in splits:
        steps = [pre_tokenizers.Split(Regex(splits[name]), behavior="isolated")]
    elif name in _GPT2_AND_DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    elif name not in _GPT2:
        raise StartError(f"its pre-tokenizer {name!r:.40} is unknown: put {TOKENIZER} next to the file")
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=name not in splits)])


def _sentencepiece(kind: str, fields: dict[str, Any]) -> Any:
    """The sentencepiece model that a file was made of."""
    model = ModelProto()
    for piece, score, type_ in zip(fields["tokens"], fields["scores"], fields["token_type"], strict=True):
        model.pieces.add(piece=piece, score=score, type=type_)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = _SENTENCEPIECE[kind], _BYTE in fields["token_type"]
    trainer.bos_id, trainer.unk_id = fields.get("bos_token_id", -1), fields.get("unknown_token_id", 0)
    trainer.unk_piece = fields["tokens"][trainer.unk_id]
    normalizer.add_dummy_prefix = fields.get("add_space_prefix", True)
    normalizer.remove_extra_whitespaces = fields.get("remove_extra_whitespaces", False)
    normalizer.precompiled_charsmap = bytes(fields.get("precompiled_charsmap", b""))
    return model
