"""Makes a converted tokenizer do what sentencepiece does: transformers does not follow all of a sentencepiece model.

Special tokens that the model lacks, and the places where they are added, are those of transformers.
"""

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors

_SPACE = "▁"


def follow_sentencepiece(model: Any, converted: Path, settings: dict[str, Any]) -> None:
    """Rewrite the tokenizer.json `converted` after the model, unless its family has other ids.

    A text begins as for a Llama unless the settings say otherwise; transformers adds the token only for some families.
    """
    tokenizer = Tokenizer.from_file(str(converted))
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    made = {1: _unigram, 2: _bpe}.get(trainer.model_type)  # types in sentencepiece_model.proto
    if made is None or any(tokenizer.id_to_token(index) != one.piece for index, one in enumerate(model.pieces)):
        return
    tokenizer.model = made(model)
    tokenizer.normalizer = normalizers.Sequence(_normalizers(normalizer))
    tokenizer.pre_tokenizer = None
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps if normalizer.add_dummy_prefix else steps[:-1])
    if trainer.bos_id >= 0 and settings.get("add_bos_token") is not False and not tokenizer.encode("").ids:
        bos = model.pieces[trainer.bos_id].piece
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, trainer.bos_id)])
    tokenizer.save(str(converted))


def _normalizers(spec: Any) -> list[Any]:
    trims = normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")
    return [
        *([normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []),
        *(trims if spec.remove_extra_whitespaces else []),
        *([normalizers.Prepend(_SPACE)] if spec.add_dummy_prefix else []),
        normalizers.Replace(" ", _SPACE),
    ]


def _bpe(model: Any) -> Any:
    """Pairs merge in the order of their scores; only pieces that are no special tokens take part."""
    scores = {one.piece: one.score for one in model.pieces if one.type == one.NORMAL}
    splits = ((piece[:size], piece[size:]) for piece in scores for size in range(1, len(piece)))
    merges = [(left, right) for left, right in splits if left in scores and right in scores]
    merges.sort(key=lambda pair: (-scores["".join(pair)], -len(pair[0])))
    vocabulary, spec = {one.piece: index for index, one in enumerate(model.pieces)}, model.trainer_spec
    return models.BPE(vocabulary, merges, unk_token=spec.unk_piece, fuse_unk=True, byte_fallback=spec.byte_fallback)


def _unigram(model: Any) -> Any:
    pieces = [(one.piece, one.score) for one in model.pieces]
    return models.Unigram(pieces, model.trainer_spec.unk_id, model.trainer_spec.byte_fallback)
