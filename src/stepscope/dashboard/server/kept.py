"""The last documents of a run, as bytes, each made once however many ask for it at the same time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

MOST = 60  # documents of one run


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.data: bytes | None = None


class Documents:
    """Documents by what was asked for. Different ones may be made side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """The document of `key`, made if it is not there; what `make` raises is raised, and nothing is kept."""
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            while len(self._slots) > MOST:
                self._slots.popitem(last=False)
        with slot.lock:
            if slot.data is None:
                slot.data = make()
            return slot.data
