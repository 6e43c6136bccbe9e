"""Knobs of the DataLoader: its arguments, changed where the script makes one.

All four share one wrapper of `DataLoader.__init__`, which subclasses and frameworks reach too, so that they can be set
together. What came of it is read from the loader and its iterator when the first batch is about to be fetched.
"""

from __future__ import annotations

import inspect
import multiprocessing
import sys
import weakref
from typing import Any, Mapping, NamedTuple

from stepscope.record.agent.frames import user_place
from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.patches import Patches, bound
from stepscope.record.agent.wrapper_importlib_bootstrap import Call

NUM_WORKERS = "num_workers"
PREFETCH = "prefetch_factor"
PIN = "pin_memory"
PERSISTENT = "persistent_workers"


class _Loaders:
    """The wrappers, and every loader they changed. One per process, made by the first loader knob that comes."""

    def __init__(self, knob: KnobBase) -> None:
        from torch.utils.data import DataLoader

        self.knobs: dict[str, LoaderArgument] = {}  # by argument
        self._signature = inspect.signature(DataLoader.__init__)
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> (weak reference, (arguments changed, place))
        self.made_any = False
        self._calls = Patches(knob.agent.guard, knob.probe)
        self._calls.change(DataLoader, "__init__", self._change, self._after_init, self._refused)
        self._calls.look(DataLoader, "_get_iterator", lambda loader: loader, self._after_iterator)

    def remove(self) -> None:
        self._calls.remove()
        self._made.clear()

    def _change(self, *args: Any, **kwargs: Any) -> Call | None:
        call = bound(self._signature, args, kwargs)
        workers = None if call is None else call.arguments.get(NUM_WORKERS, 0)
        if workers.__class__ is not int or workers < 0:
            return None  # torch will say so
        wishes = {name: knob.wish for name, knob in self.knobs.items()}
        torch: Any = sys.modules["torch"]
        accelerator = getattr(torch, "accelerator", torch.cuda)
        # The default is asked for without fixing it, which would forbid the script to choose.
        start_method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        # Asked only where memory would be pinned, which makes torch ask the same.
        pins = bool(wishes.get(PIN)) and bool(accelerator.is_available())
        iterable = isinstance(call.arguments.get("dataset"), torch.utils.data.IterableDataset)
        given = Given(workers, iterable, start_method, bool(multiprocessing.current_process().daemon), pins)
        changes, refused = plan(wishes, given)
        place = user_place()
        for name, reason in refused.items():
            self.knobs[name].report(False, reason=reason, place=place)
        for name, value in changes.items():
            if name in wishes or call.arguments.get(name) is not None:
                call.arguments[name] = value
        token = ([name for name in wishes if name not in refused], place)
        return Call(call.args, call.kwargs, token) if changes else None

    def _after_init(self, call: Call, _result: Any) -> None:
        loader = call.args[0]
        key = id(loader)
        self._made[key] = (weakref.ref(loader, lambda _: self._made.pop(key, None)), call.token)
        self.made_any = True

    def _refused(self, call: Call, error: BaseException) -> None:
        names, place = call.token
        for name in names:
            self.knobs[name].report(False, reason=f"torch refused it: {error}", place=place)

    def _after_iterator(self, loader: Any, iterator: Any, error: BaseException | None) -> None:
        reference, token = self._made.get(id(loader), (None, None))
        if error is None and reference is not None and reference() is loader:
            names, place = token
            for name in names:
                self.knobs[name].look(loader, iterator, place)


class LoaderArgument(KnobBase):
    """One argument of the loader, that after the dot of the knob's name.

    `num_workers` and `prefetch_factor` are numbers; the latter and `persistent_workers` are of loaders with workers,
    `pin_memory` is for an accelerator.
    """

    family = "loader"
    missed = "the script made no DataLoader"

    def install(self) -> None:
        self._argument = self.name.partition(".")[2]
        self.wish: Any = int(self.value) if self._argument in (NUM_WORKERS, PREFETCH) else self.value == "true"
        self.shared(_Loaders).knobs[self._argument] = self

    def uninstall(self) -> None:
        loaders = self.existing(_Loaders)
        if loaders is not None:
            loaders.remove()

    def at_end(self) -> None:
        loaders = self.existing(_Loaders)
        if not self.reported and loaders is not None and loaders.made_any:
            self.report(False, reason="no batch was fetched from the loader")

    def look(self, loader: Any, iterator: Any, place: Any) -> None:
        """Report what holds for the batches of `iterator`, which `loader` has just made."""
        value = getattr(loader, self._argument, None)
        if self._argument == PIN:
            value = getattr(iterator, "_pin_memory", value)
        words = str(value).lower()
        if self._argument == NUM_WORKERS:
            words += f", processes alive: {sum(worker.is_alive() for worker in getattr(iterator, '_workers', ()))}"
        elif self._argument == PREFETCH and getattr(iterator, "_tasks_outstanding", None) is not None:
            words += f", batches asked for ahead: {iterator._tasks_outstanding}"
        applied = value == self.wish
        self.report(applied, words, None if applied else "the loader or torch has made something else of it", place)


# What has a meaning with workers only, and what it is without.
_WORKERS_ONLY: dict[str, Any] = {PREFETCH: None, PERSISTENT: False, "timeout": 0, "multiprocessing_context": None}


class Given(NamedTuple):
    """What the script gives a loader, and what the process allows."""

    num_workers: int
    iterable: bool  # of an IterableDataset
    start_method: str  # of worker processes
    daemon: bool  # this process may have no children
    pins: bool  # there is an accelerator that memory can be pinned for


def plan(wishes: Mapping[str, Any], given: Given) -> tuple[dict[str, Any], dict[str, str]]:
    """(arguments to change, reason for every wish that is left out). `wishes` are converted values by argument."""
    changes: dict[str, Any] = {}
    refused: dict[str, str] = {}
    workers = given.num_workers
    if NUM_WORKERS in wishes:
        why_none = _why_no_workers(given) if wishes[NUM_WORKERS] > 0 else None
        if why_none is None:
            workers = changes[NUM_WORKERS] = wishes[NUM_WORKERS]
        else:
            refused[NUM_WORKERS] = why_none
    if workers == 0 and given.num_workers > 0:
        changes.update(_WORKERS_ONLY)
    no_workers = (workers > 0, "this loader has no workers")
    pinning = (given.pins, "there is no accelerator to pin memory for")
    for name, (allowed, reason) in ((PREFETCH, no_workers), (PERSISTENT, no_workers), (PIN, pinning)):
        if name in wishes and (allowed or wishes[name] is False):
            changes[name] = wishes[name]
        elif name in wishes:
            refused[name] = reason
    return changes, refused


def _why_no_workers(given: Given) -> str | None:
    """Why a loader that has no workers cannot be given some; None where it can or has some already."""
    if given.num_workers > 0:
        return None
    if given.iterable:
        return "its IterableDataset would be read in full by every worker, unless it asks get_worker_info"
    if given.daemon:
        return "it is made in a process that may not start others"
    if given.start_method != "fork":
        return f"this process starts others by {given.start_method}, for which script and data set must be prepared"
    return None
