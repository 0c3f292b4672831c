"""Which adapters there are, without reading them; no torch."""

import math
import os
from collections.abc import Iterator

from tgis.errors import AdapterError
from tgis.ipc.lookups import AdapterStoreOptions
from tgis.prompts.files import FILES, find_directory

MAX_LISTED = 1000
_MAX_DEPTH = 4  # nesting of directories


class AdapterCatalog:
    """The ids of a store and of LORA_MODULES; their files may still be unusable."""

    def __init__(self, options: AdapterStoreOptions | None) -> None:
        """`options` are None where there are no adapters."""
        self._path = options.path if options else None
        self._lora_modules = options.lora_modules if options else {}

    def has(self, adapter_id: str) -> bool:
        """Whether there is such an adapter."""
        try:
            directory = find_directory(self._path, self._lora_modules, adapter_id)
        except AdapterError:
            return False
        return adapter_id in self._lora_modules or any(map(directory.has, FILES))

    def ids(self) -> list[str]:
        """The first MAX_LISTED of them, sorted."""
        ids = set(self._lora_modules)
        for adapter_id in stored_ids(self._path, _MAX_DEPTH) if self._path else ():
            if len(ids) >= MAX_LISTED:
                break
            if self.has(adapter_id):
                ids.add(adapter_id)
        return sorted(ids)


def stored_ids(root: str, max_depth: float = math.inf) -> Iterator[str]:
    """Ids of all directories of a store, whatever is in them; hidden ones, as in volumes of Kubernetes, are skipped."""
    for folder, folders, _ in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))  # links among them are not walked
        ids = [os.path.relpath(os.path.join(folder, name), root) for name in folders]
        yield from ids
        if ids and ids[0].count(os.sep) + 1 >= max_depth:
            folders.clear()
