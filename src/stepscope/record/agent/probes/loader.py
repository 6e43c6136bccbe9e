"""DataLoader iterators: when one is made, how long each `__next__` waits, how many rows a batch has.

Wrapped are torch's own methods, so any DataLoader subclass and any framework on top is covered. The batch is looked at
from outside (a tensor's `shape`), never read; nothing of torch is called.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.probes.patch import PatchSet

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent

_SERIAL = "_stepscope_serial"
_NO_LENGTH = (TypeError, NotImplementedError, AttributeError)


def batch_rows(batch: Any, depth: int = 3) -> int | None:
    """Rows of a batch: the first dimension of the first tensor-like found in it, or None."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if isinstance(shape, tuple) and shape and isinstance(shape[0], int) else None
    if depth == 0 or batch is None or isinstance(batch, (str, bytes, int, float)):
        return None
    if isinstance(batch, dict):
        parts: Any = itertools.islice(batch.values(), 3)
    elif isinstance(batch, (list, tuple)):
        parts = batch[:3]
    else:
        parts = itertools.islice(getattr(batch, "__dict__", {}).values(), 8)
    for part in parts:
        rows = batch_rows(part, depth - 1)
        if rows is not None:
            return rows
    return None


class LoaderProbe:
    """Feeds the step cutter with fetches and writes a `loader` event per iterator."""

    name = "loader"

    def __init__(self) -> None:
        self._patches = PatchSet()
        self._serials = itertools.count(1)
        self._loaders: dict[int, tuple[int, Any]] = {}  # id -> (serial, weak reference)
        self._watched: dict[int, Any] = {}  # serial -> weak reference to the iterator
        self._making: int | None = None
        self._lengths: dict[int, int | None] = {}  # serial of an iterator -> batches of its epoch
        self._fetching = 0  # serial of the iterator fetched from last

    def install(self, agent: Agent) -> None:
        """Wrap `_BaseDataLoaderIter.__next__` and the places where an iterator is made or started anew."""
        self._agent = agent
        guard = agent.guard
        before_next = guard.wrap(self.name, self._before_next)
        after_next = guard.wrap(self.name, self._after_next)
        before_make = guard.wrap(self.name, self._before_make)
        after_make = guard.wrap(self.name, self._after_make)
        before_reset = guard.wrap(self.name, self._before_reset)
        before_delete = guard.wrap(self.name, self._before_delete)
        self._dead = guard.wrap(self.name, self._iterator_dead)

        def make() -> None:
            from torch.utils.data import dataloader

            around = self._patches.around
            around(dataloader._BaseDataLoaderIter, "__next__", before_next, after_next)
            around(dataloader.DataLoader, "_get_iterator", before_make, after_make)
            around(dataloader._MultiProcessingDataLoaderIter, "_reset", before_reset, after_make)
            around(dataloader._MultiProcessingDataLoaderIter, "__del__", before_delete, _nothing)

        self._patches.install(make)

    def uninstall(self) -> None:
        """Restore the originals."""
        self._patches.remove()

    def remaining(self) -> int | None:
        """Batches the iterator fetched from last still holds for this epoch; None where that is unknown."""
        reference = self._watched.get(self._fetching)
        iterator = reference() if reference is not None else None
        length = self._lengths.get(self._fetching)
        yielded = getattr(iterator, "_num_yielded", None)
        return None if length is None or not isinstance(yielded, int) else max(0, length - yielded)

    # Called around __next__ ---------------------------------------------------------------------------------

    def _before_next(self, iterator: Any) -> tuple[int, int] | None:
        agent = self._agent
        if not agent.accepts():
            return None
        serial = iterator.__dict__.get(_SERIAL)
        if serial is None:
            serial = self._adopt(iterator)
        self._fetching = serial
        now = agent.clock.now()
        agent.steps.fetch_start(serial, now)
        return serial, now

    def _after_next(self, token: tuple[int, int] | None, batch: Any, error: BaseException | None) -> None:
        if token is None:
            return
        steps, now = self._agent.steps, self._agent.clock.now()
        if error is None:
            steps.fetch_end(token[0], batch_rows(batch), now)
        elif isinstance(error, StopIteration):
            steps.fetch_stop(token[0], token[1], now)
        else:
            steps.fetch_end(token[0], None, now)

    # Called around the making of an iterator -----------------------------------------------------------------

    def _before_make(self, loader: Any) -> tuple[int, int, Any] | None:
        return self._begin(loader)

    def _before_reset(self, iterator: Any, loader: Any, first_iter: bool = False) -> tuple[int, int, Any] | None:
        if first_iter:
            return None
        token = self._begin(loader)
        if token is not None:
            iterator.__dict__[_SERIAL] = token[0]
        return token

    def _begin(self, loader: Any) -> tuple[int, int, Any] | None:
        agent = self._agent
        agent.making_loader = True
        if not agent.accepts():
            return None
        now = agent.clock.now()
        serial = next(self._serials)
        agent.steps.loader_created(self._loader_serial(loader), serial, now)
        return serial, now, loader

    def _after_make(self, token: tuple[int, int, Any] | None, iterator: Any, error: BaseException | None) -> None:
        self._agent.making_loader = False
        if token is None or error is not None:
            return
        serial, start, loader = token
        if iterator is not None:  # None after a reset, where the iterator is known already
            iterator.__dict__[_SERIAL] = serial
            self._watch(iterator, serial)
        self._lengths[serial] = length = _length(loader)
        self._agent.events.write(
            "loader",
            start,
            self._agent.clock.now() - start,
            step=None,
            id=self._loader_serial(loader),
            epoch=self._agent.steps.epoch_of(serial),
            length=length,
            num_workers=getattr(loader, "num_workers", None),
            batch_size=getattr(loader, "batch_size", None),
        )

    def _before_delete(self, iterator: Any) -> None:
        # Before the workers are joined, which may take seconds.
        serial = iterator.__dict__.get(_SERIAL)
        if serial is not None:
            self._iterator_dead(serial)

    def _iterator_dead(self, serial: int) -> None:
        self._watched.pop(serial, None)
        self._lengths.pop(serial, None)
        if self._agent.accepts():
            self._agent.steps.iterator_dead(serial, self._agent.clock.now())

    def _adopt(self, iterator: Any) -> int:
        """An iterator made before we came, or by a loader that makes its iterators itself."""
        serial = next(self._serials)
        iterator.__dict__[_SERIAL] = serial
        self._watch(iterator, serial)
        return serial

    def _watch(self, iterator: Any, serial: int) -> None:
        dead = self._dead
        self._watched[serial] = weakref.ref(iterator, lambda _: dead(serial))

    def _loader_serial(self, loader: Any) -> int:
        known = self._loaders.get(id(loader))
        if known is not None and known[1]() is loader:
            return known[0]
        serial = next(self._serials)
        self._loaders[id(loader)] = (serial, weakref.ref(loader))
        return serial


def _length(loader: Any) -> int | None:
    """Batches of an epoch where the data set has a length; torch's own `__len__`, never the user's, is asked."""
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None:
        sampler = getattr(loader, "sampler", None)
    if not type(sampler).__module__.startswith("torch."):
        return None
    try:
        return len(sampler)  # type: ignore[arg-type]
    except _NO_LENGTH:
        return None


def _nothing(_token: Any, _result: Any, _error: BaseException | None) -> None:
    return
