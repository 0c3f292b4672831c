"""Loaded values by key, within a number of bytes: what was not used for longest leaves first. Safe for threads."""

import threading
from dataclasses import dataclass
from typing import Generic, TypeVar

from tgis.utils.file_watch import Signature

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[V]):
    signature: Signature
    value: V
    size: int


class AdapterCache(Generic[V]):
    """A value is good for one signature of its files. Who has got one keeps it, whatever leaves the cache."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry[V]] = {}  # the most recently used last
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all values."""
        return self._size

    def get(self, key: str, signature: Signature) -> V | None:
        """The value, if there is one of this signature."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.signature != signature:
                return None
            self._entries[key] = self._entries.pop(key)
            return entry.value

    def put(self, key: str, signature: Signature, value: V, size: int) -> V:
        """Keep a value of `size` bytes; the one to use, which is another's if that was faster."""
        assert size <= self.capacity
        evicted = []  # freed only after the lock
        with self._lock:
            old = self._entries.get(key)
            if old is not None and old.signature == signature:
                return old.value
            if old is not None:
                evicted.append(self._remove(key))
            while self._size + size > self.capacity:
                evicted.append(self._remove(next(iter(self._entries))))
            self._entries[key] = _Entry(signature, value, size)
            self._size += size
        return value

    def _remove(self, key: str) -> _Entry[V]:
        entry = self._entries.pop(key)
        self._size -= entry.size
        return entry
