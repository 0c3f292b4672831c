"""Makes tokenizer.json for models with a slow tokenizer: transformers converts it in a child process.

The child runs this file: `python -m tgis.models.convert.fast_tokenizer MODEL OUT`, both directories.
"""

import functools
import importlib.metadata
import os
import sys
from pathlib import Path

from tgis.errors import StartError, file_errors
from tgis.models import staging
from tgis.models.files import ModelFiles, read_json

TOKENIZER = "tokenizer.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
CONVERT_SECONDS = 600


def ensure_tokenizer(model: ModelFiles, cache_dir: Path) -> Path:
    """The model's directory if it has a tokenizer.json, else one below `cache_dir`/tokenizers, converted once."""
    if (model.path / TOKENIZER).is_file():
        return model.path
    with file_errors(f"cannot keep a tokenizer for {model.path}"):
        files = [file for file in model.path.iterdir() if file.is_file()]
        key = staging.files_key(files, importlib.metadata.version("transformers"))
        return staging.made_once(cache_dir / "tokenizers" / key, functools.partial(_convert, model))


def add_tokenizer(model: ModelFiles, out: Path | None) -> str:
    """Add tokenizer.json to the model's directory, or write the whole tokenizer to directory `out`.

    Returns one line that says what was done. The model's other files are left alone: in the hub cache they are links to
    content-addressed blobs.
    """
    if (model.path / TOKENIZER).is_file():
        return f"{model.path} has a {TOKENIZER} already: nothing to do"
    target = out or model.path
    with file_errors(f"cannot write a tokenizer to {target}"), staging.staging_directory(target) as made:
        _convert(model, made)
        files = [path for path in sorted(made.iterdir()) if out is not None and path.name != TOKENIZER]
        for path in [*files, made / TOKENIZER]:  # last: it marks the tokenizer as complete
            path.replace(target / path.name)
    return f"{target / TOKENIZER} was made"


def _convert(model: ModelFiles, out: Path) -> None:
    """Write the tokenizer to directory `out`, as transformers saves it."""
    command = [sys.executable, "-m", "tgis.models.convert.fast_tokenizer", str(model.path), str(out)]
    reason = staging.run_child(command, CONVERT_SECONDS) or _conversion_problem(model, out)
    if reason is not None:
        raise StartError(f"{model.path} has no {TOKENIZER}, put one there; none can be made: {reason}")


def _conversion_problem(model: ModelFiles, made: Path) -> str | None:
    """What is wrong with a converted tokenizer: without vocabulary files transformers writes an empty one."""
    if not (made / TOKENIZER).is_file():
        return "it has a tokenizer that only Python code can run"
    inner, size = read_json(made / TOKENIZER).get("model"), model.config.get("vocab_size")
    pieces = len(inner.get("vocab", [])) if isinstance(inner, dict) else 0
    vocabulary = size if isinstance(size, int) and size else 1
    if pieces < vocabulary / 2:
        return f"vocabulary files are missing ({pieces} of {vocabulary} tokens found)"
    return None


def convert_here(model: str, out: str) -> None:
    """Convert local files only, without running the model's code; the parent reports exceptions."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by the following import
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415 - see above

    from tgis.models.convert.sentencepiece_model import follow_sentencepiece  # noqa: PLC0415

    paths = (Path(model, name) for name in SENTENCEPIECE)
    models = [ModelProto.FromString(path.read_bytes()) for path in paths if path.is_file()]
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    tokenizer.save_pretrained(out)
    for sentencepiece in models:
        follow_sentencepiece(sentencepiece, Path(out, TOKENIZER), tokenizer.init_kwargs)


if __name__ == "__main__":
    convert_here(*sys.argv[1:])
