"""A thread-safe LRU cache of loaded values, limited in bytes."""

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
    """A value is valid for one signature of its files. Evicting it does not affect those who already hold it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry[V]] = {}  # least recently used first
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all values."""
        return self._size

    def get(self, key: str, signature: Signature) -> V | None:
        """The value if it is cached with this signature."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.signature != signature:
                return None
            self._entries[key] = self._entries.pop(key)
            return entry.value

    def put(self, key: str, signature: Signature, value: V, size: int) -> V:
        """Cache a value of `size` bytes; returns the one to use, which is another thread's if that came first."""
        assert size <= self.capacity
        evicted = []  # freed after the lock is released
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
