"""From the id of an adapter to its directory and the bytes of its files, never outside the store."""

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tgis.errors import AdapterError
from tgis.ipc.lookups import AdapterProblem
from tgis.utils.file_watch import Signature, file_signature

CONFIG = "adapter_config.json"
SAFETENSORS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
DECODER, ENCODER = "decoder.pt", "encoder.pt"
FILES = (CONFIG, SAFETENSORS, PICKLE, DECODER, ENCODER)

_ID = re.compile(r"[/\w-]{1,512}")  # no dots, so no way up


@dataclass(frozen=True, slots=True)
class AdapterDirectory:
    """The directory of an adapter in a store, both with symlinks resolved."""

    store: str
    path: str
    _digest: Any = field(default_factory=hashlib.sha256, compare=False)  # all that has been read

    @property
    def version(self) -> int:
        """The beginning of the digest of all that has been read."""
        return int.from_bytes(self._digest.digest()[:8])

    def has(self, name: str) -> bool:
        """Whether the file exists."""
        return os.path.exists(self._join(name))

    def signature(self) -> Signature:
        """Differs once any of the files has changed."""
        return file_signature(map(self._join, FILES))

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of a file; AdapterError unless it is regular, inside the store and of at most `limit` bytes."""
        path = os.path.realpath(self._join(name))
        if not _is_inside(path, self.store):
            raise AdapterError(f"{name} leads out of the store")
        try:
            with open(path, "rb", opener=_open_nonblocking) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise AdapterError(f"{name} is not a regular file")
                if status.st_size > limit:
                    raise AdapterError(f"{name} has {status.st_size} bytes, at most {limit} are allowed")
                data = file.read(status.st_size)
                self._digest.update(data)
                return data
        except OSError as error:
            raise AdapterError(f"{name} cannot be read: {error.strerror}") from error

    def _join(self, name: str) -> str:
        return os.path.join(self.path, name)


def find_directory(store: str | None, lora_modules: Mapping[str, str], adapter_id: str) -> AdapterDirectory:
    """The directory of a LoRA module or, in the store, of another id.

    AdapterError if the id is invalid, leads out of the store or does not exist. The operator has named the directories
    of modules: their files may be links to anywhere, as in a hub cache.
    """
    if adapter_id in lora_modules:
        return AdapterDirectory("/", os.path.realpath(lora_modules[adapter_id]))
    if store is None:
        raise AdapterError("it is no LoRA module, and no adapter store was configured", AdapterProblem.NOT_FOUND)
    if not _ID.fullmatch(adapter_id):
        text = "the id must contain only letters, digits, _ and - and /, 512 characters at most"
        raise AdapterError(text, AdapterProblem.BAD_ID)
    store = os.path.realpath(store)  # it may have been mounted since the start
    path = os.path.realpath(os.path.join(store, adapter_id))
    if not _is_inside(path, store):
        raise AdapterError("the id leads out of the store", AdapterProblem.BAD_ID)
    if not os.path.isdir(path):
        raise AdapterError("directory does not exist", AdapterProblem.NOT_FOUND)
    return AdapterDirectory(store, path)


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe would block


def _is_inside(path: str, store: str) -> bool:
    return path.startswith(store.rstrip("/") + "/")
