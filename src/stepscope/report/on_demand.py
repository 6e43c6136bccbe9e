"""Values by name, each made when it is first asked for: what no surface shows is never made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class OnDemand(Mapping[str, Any]):
    """A mapping of what `makers` return. It is equal to any other of the same values."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = makers
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
