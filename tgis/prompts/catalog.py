"""Which adapters there are, without reading them; no torch."""

import os
from collections.abc import Iterator

from tgis.errors import AdapterError
from tgis.ipc.lookups import AdapterStoreOptions
from tgis.prompts.files import FILES, find_directory

MAX_LISTED = 1000
_MAX_DEPTH = 4  # of directories


class AdapterCatalog:
    """The ids of a store and of LORA_MODULES; their files may still be unusable."""

    def __init__(self, options: AdapterStoreOptions | None) -> None:
        """None: there are no adapters."""
        path = options.path if options else None
        self._path = None if path is None else os.path.realpath(path)
        self._lora_modules = options.lora_modules if options else {}

    def has(self, adapter_id: str) -> bool:
        """Whether there is such an adapter."""
        try:
            directory = find_directory(self._path, self._lora_modules, adapter_id)
        except AdapterError:
            return False
        return any(map(directory.has, FILES))

    def ids(self) -> list[str]:
        """The first MAX_LISTED of them, sorted."""
        found = set(self._lora_modules)
        for adapter_id in self._stored_ids() if self._path else ():
            if len(found) >= MAX_LISTED:
                break
            if self.has(adapter_id):
                found.add(adapter_id)
        return sorted(found)

    def _stored_ids(self) -> Iterator[str]:
        assert self._path is not None
        for folder, folders, files in os.walk(self._path):
            adapter_id = os.path.relpath(folder, self._path)
            if adapter_id.count(os.sep) + 1 >= _MAX_DEPTH:
                folders.clear()
            folders.sort()
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]  # not walked
            yield from (os.path.normpath(os.path.join(adapter_id, name)) for name in links)
            if not {*files}.isdisjoint(FILES):
                yield adapter_id
