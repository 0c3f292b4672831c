"""`tgis prompts`: loads the soft prompts and LoRA adapters of a store as the server would, and shows problems."""

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tgis.errors import AdapterError, OptionError, file_errors
from tgis.ipc.lookups import AdapterProblem
from tgis.models.files import embedding_size, find_model, is_encoder_decoder, max_sequence_length
from tgis.prompts.catalog import stored_ids
from tgis.prompts.files import FILES
from tgis.utils.logs import escape
from tgis.utils.options import Parser, choice, integer

if TYPE_CHECKING:
    from tgis.prompts.store import AdapterStore  # needs torch


class StoreEntry(NamedTuple):
    """One directory of the store: `size` in bytes of memory, `length` in virtual tokens."""

    id: str
    kind: str = ""
    rank: int = 0
    length: int = 0
    size: int = 0
    problem: str = ""


def main(argv: list[str], prog: str) -> int:
    """Run the action; `check` returns 1 if any adapter has a problem."""
    options = _parser(prog).parse_args(argv)
    if not options.path.is_dir():
        raise OptionError(f"{options.path} is not a directory")
    with file_errors(f"cannot read {options.path}", OptionError):
        entries = list(_check_store(options))
    _print(entries)
    return int(any(entry.problem for entry in entries))


def _parser(prog: str) -> Parser:
    description = "List the adapters of a store with their problems. The exit code is 1 if there is a problem."
    parser = Parser(prog=prog, description=description)
    parser.add_argument("action", choices=["check"], metavar="check", help="the only action")
    parser.add_argument("path", type=Path, metavar="PATH", help="the store: PREFIX_STORE_PATH of a server")
    parser.add_argument("--model", metavar="NAME", help="directory of the model that the adapters are for")
    help_text = "most virtual tokens (default: half of the model's length)"
    parser.add_argument("--max-length", type=integer(1), metavar="N", help=help_text)
    dtype, help_text = choice("float32", "float16", "bfloat16"), "dtype of the model (default: float32)"
    parser.add_argument("--dtype", type=dtype, metavar="NAME", default="float32", help=help_text)
    help_text = "size of the adapter cache: PROMPT_CACHE_SIZE_MB of a server (default: 512)"
    parser.add_argument("--cache-mb", type=integer(1), metavar="N", default=512, help=help_text)
    return parser


def _check_store(options: Namespace) -> Iterator[StoreEntry]:
    """Check every directory that may be meant as an adapter, sorted by id."""
    import torch  # noqa: PLC0415 - slow; not needed for --help

    from tgis.prompts.store import AdapterStore  # noqa: PLC0415 - slow
    from tgis.prompts.tensor_file import TargetModel  # noqa: PLC0415

    config = find_model(options.model, None, None).config if options.model else {}
    target = TargetModel(
        embedding_size=embedding_size(config),
        max_length=options.max_length or (max_sequence_length(config) + 1) // 2,
        dtype=getattr(torch, options.dtype),
        device=torch.device("cpu"),
        encoder_decoder=is_encoder_decoder(config) if options.model else None,
    )
    root = os.path.realpath(options.path)
    store = AdapterStore(root, options.cache_mb << 20, target)
    if any(os.path.lexists(os.path.join(root, name)) for name in FILES):
        yield StoreEntry(".", problem="files directly in the store cannot be named")
    for adapter_id in sorted(stored_ids(root)):
        if not _is_parent(os.path.join(root, adapter_id)):
            yield _check(store, adapter_id)


def _is_parent(path: str) -> bool:
    """True for a directory of directories, which may be adapters."""
    names = [name for name in os.listdir(path) if not name.startswith(".")]
    return bool(names) and all(os.path.isdir(os.path.join(path, name)) for name in names)


def _check(store: "AdapterStore", adapter_id: str) -> StoreEntry:
    try:
        adapter = store.find(adapter_id).adapter
    except AdapterError as error:
        unsupported = error.problem == AdapterProblem.UNSUPPORTED
        return StoreEntry(adapter_id, problem=f"adapter type {error} is not supported" if unsupported else str(error))
    kind = "LoRA" if adapter.rank else "soft prompt"
    return StoreEntry(adapter_id, kind, adapter.rank, adapter.length, adapter.size)


def _print(entries: list[StoreEntry]) -> None:
    width = 2 + max((len(escape(entry.id)) for entry in entries), default=0)
    for entry in entries:
        shape = f"rank {entry.rank}" if entry.rank else f"{entry.length} tokens"
        print(f"{escape(entry.id):<{width}}{entry.problem or f'ok: {entry.kind}, {shape}'}")
    wrong, size = sum(bool(entry.problem) for entry in entries), sum(entry.size for entry in entries)
    print(f"\n{len(entries) - wrong} good, {size / 1024:,.0f} KiB in memory; {wrong} with a problem")
