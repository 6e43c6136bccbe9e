"""DataLoader iterators: when one is made, how long each `__next__` waits, how many rows a batch has.

Wrapped are torch's own methods, so any DataLoader subclass and any framework on top is covered. The batch is looked at
from outside (a tensor's `shape`), never read; nothing of torch is called. Of some batches what a worker process would
have to hand over is counted: tensors, bytes, other objects.
"""

from __future__ import annotations

import dis
import functools
import itertools
import os
import sys
import weakref
from threading import get_ident
from time import monotonic_ns
from types import CodeType, FunctionType, GetSetDescriptorType, MethodType
from typing import Any, Callable, Tuple

from stepscope.record.agent import metrics
from stepscope.record.agent.agent import Agent
from stepscope.record.agent.batches import Batches
from stepscope.record.agent.patches import Probe, has_torch_modes
from stepscope.record.agent.wrapper_importlib_bootstrap import make_told_wrapper

_SERIAL = "_stepscope_serial"
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CRITICAL = frozenset(
    os.path.join(_FOLDER, name + ".py") for name in ("steps", "step_queue", "segments", "step_readings", "agent")
)
_PLAIN = (list, tuple)
_NO_LENGTH = (TypeError, NotImplementedError, AttributeError)

FIRST_LOOKS = 3  # batches of an iterator that are counted, behind its first, which starts workers
LOOKS_AT_ONCE = 60  # of one loader that may be such; a script may iterate short loaders often
LOOK_EVERY = 64  # afterwards
TOKEN_NAMES = ("input_ids", "tokens", "input", "inputs")
TOKEN_LOOKS = 10  # batches one after the other without tokens: more are not looked at
CONTENT_DEPTH, CONTENT_WIDTH = 5, 64  # of a longer sequence the first are counted for all


def _own(value: Any) -> dict[str, Any]:
    """The attributes that lie in an object; a lazy one is not asked, which may make, draw or raise anything."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if found.__class__ is dict else {}


def _told(value: Any, name: str) -> Any:
    """An attribute of a tensor or an array, or one that lies in an object or its class; None where code makes it."""
    found = getattr(type(value), name, None)
    if isinstance(found, GetSetDescriptorType):
        return getattr(value, name)
    return _own(value).get(name) if found is None or hasattr(type(found), "__get__") else found


def _inside(value: Any, width: int) -> tuple[list[Any], int]:
    """(the first `width` parts, how many there are) as they lie in a container or an object of a batch."""
    for kind in _PLAIN:
        if issubclass(type(value), kind):
            return list(kind.__getitem__(value, slice(width))), kind.__len__(value)
    parts = dict.values(value) if issubclass(type(value), dict) else _own(value).values()
    return list(itertools.islice(parts, width)), len(parts)


def batch_rows(batch: Any, batch_size: int | None = None, depth: int = 3) -> int | None:
    """Rows of a batch: the first dimension of a tensor-like directly in it, else of one deeper down, or None.

    A sequence of tensors that were not stacked (images of different sizes) counts as its length, where that is at most
    `batch_size` and their first dimensions are no batch of that size.
    """
    shape = _told(batch, "shape")
    if shape is not None:
        return int(shape[0]) if isinstance(shape, tuple) and shape and isinstance(shape[0], int) else None
    if depth == 0 or batch is None or isinstance(batch, (str, bytes, int, float)):
        return None
    parts, count = _inside(batch, 8)
    for part in parts:
        if _told(part, "shape") is not None:
            rows = batch_rows(part)
            unstacked = depth < 3 and issubclass(type(batch), _PLAIN) and batch_size not in (None, rows)
            return count if unstacked and count <= (batch_size or 0) else rows
    for part in parts:
        rows = batch_rows(part, batch_size, depth - 1)
        if rows is not None:
            return rows
    return None


def batch_tokens(batch: Any) -> int:
    """Rows times columns of a batch's table of whole numbers: its input by name, or a pair of one shape; else 0."""
    named: Any = batch if issubclass(type(batch), dict) else _own(batch).get("data")
    if issubclass(type(batch), _PLAIN):
        parts, count = _inside(batch, 2)
        alike = count == 2 and _told(parts[0], "shape") == _told(parts[1], "shape")
        table = parts[0] if alike else None
    elif issubclass(type(named), dict):
        found = (dict.get(named, name) for name in TOKEN_NAMES)
        table = next((value for value in found if value is not None), None)
    else:
        table = batch
    shape = _told(table, "shape")
    is_whole = str(_told(table, "dtype")).startswith(("torch.int", "torch.long", "torch.uint"))
    return int(shape[0] * shape[1]) if is_whole and len(shape or ()) == 2 else 0


def batch_content(batch: Any, depth: int = CONTENT_DEPTH) -> tuple[float, float, float]:
    """(tensors, bytes of them, other objects) that crossing a process border would move; what lies deeper is left out.

    Arrays count as tensors, texts and bytes as objects with their length as bytes.
    """
    if _told(batch, "shape") is not None:
        size = _told(batch, "nbytes")
        return (1.0, float(size), 0.0) if isinstance(size, int) else (0.0, 0.0, 1.0)
    if isinstance(batch, (str, bytes, bytearray)):
        return 0.0, float(len(batch)), 1.0
    if depth == 0 or batch is None or isinstance(batch, (bool, int, float, complex)):
        return 0.0, 0.0, 1.0
    parts, count = _inside(batch, CONTENT_WIDTH)
    found = [batch_content(part, depth - 1) for part in parts]
    scale = count / len(found) if found else 0.0
    tensors, size, objects = (scale * sum(part[index] for part in found) for index in range(3))
    return tensors, size, objects + 1.0


class _Iterated:
    """An iterator over a loader, as long as it lives."""

    loader: int | None = None  # its serial
    size: int | None = None  # of a batch
    length: int | None = None  # batches of its epoch, None where unknown
    reference: Callable[[], Any] = bool  # to the iterator, weak


_UNKNOWN = _Iterated()  # one that a probe before this one has numbered, as in a forked child
_Made = Tuple[int, int, Any, int]  # iterator, when, loader, how often that had been iterated before
_NOT_OURS: _Made = (0, 0, None, 0)  # an iterator made on a thread whose steps are not cut


class LoaderProbe(Probe):
    """Feeds the step cutter with fetches, writes a `loader` event per iterator and a `batch` event now and then."""

    name = "loader"

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._steps, self._faults = agent.steps, agent.page_faults
        torch = sys.modules["torch"]
        # by modes and tensors of the script, which hear what a tensor is asked; entering it takes a microsecond
        self._unheard, self._tensor, self._has_modes = torch._C.DisableTorchFunction, torch.Tensor, has_torch_modes()
        self._offset_ns = agent.clock.epoch_offset_ns
        self._dead = agent.guard.wrap(self.name, self._iterator_dead)
        self._count = agent.guard.wrap("batch", self._count_content)  # a strange batch costs the looks alone
        guarded = functools.partial(agent.guard.wrap, "batches")
        self._adopt = guarded(agent.batches.adopt)
        self._tell_loader = guarded(agent.batches.known)
        self._serials = itertools.count(1)
        self._known: dict[int, tuple[int, Any]] = {}  # id of a loader or a data set -> (serial, weak reference)
        # References to those that are gone, put here by code of C: what a signal's handler raises in Python code that
        # is called when an object goes is lost, and with it the script's time limit.
        self._gone: list[Any] = []
        self._iterated: dict[int, _Iterated] = {}  # by the serial of an iterator
        self._looks: dict[int | None, int] = {}  # serial of a loader -> its batches that were counted
        self._look = False  # at the batch that is being fetched
        self._began = 0  # when that fetch did
        self._keep_tokens = agent.guard.wrap(metrics.NAME, self._count_tokens)
        self._token_looks = TOKEN_LOOKS
        self._tokens = 0  # of the last batch
        self._deaths: list[int] = []  # told while one of our own functions was running
        self._fetching = 0  # serial of the iterator fetched from last

    def _wrap_all(self) -> None:
        """`_BaseDataLoaderIter.__next__` and the places where an iterator is made or started anew."""
        from torch.utils.data import dataloader

        def before_delete(iterator: Any) -> None:  # before the workers are joined, which may take seconds
            serial = iterator.__dict__.get(_SERIAL)
            if serial is not None:
                self._iterator_dead(serial)

        several = dataloader._MultiProcessingDataLoaderIter
        self._around(dataloader._BaseDataLoaderIter, "__next__", self._before_next, self._after_next)
        self._around(dataloader.DataLoader, "_get_iterator", self._before_make, self._after_make)
        self._around(several, "_reset", self._before_reset, self._after_make)
        self._around(several, "__del__", before_delete)
        batches: Batches = self._agent.batches
        iterators: Any = dataloader._BaseDataLoaderIter
        begins = self._agent.guard.pair("batches", lambda iterator, _result: batches.begins(iterator))
        self._patches.replace(iterators, "_reset", lambda own: make_told_wrapper(self._patches, own, begins))
        asked = self._agent.guard.pair("batches", batches.asked)

        def look_at_each() -> None:  # there is a sampler that is not torch's
            batches.look_at_each = lambda: None
            if self._patches.enabled:
                self._patches.replace(
                    iterators, "_next_index", lambda own: make_told_wrapper(self._patches, own, asked)
                )

        batches.look_at_each = look_at_each

    def remaining(self) -> int | None:
        """Batches the iterator fetched from last still holds for this epoch; None where that is unknown."""
        known = self._iterated.get(self._fetching, _UNKNOWN)
        yielded = getattr(known.reference(), "_num_yielded", None)
        return None if known.length is None or not isinstance(yielded, int) else max(0, known.length - yielded)

    def _before_next(self, iterator: Any) -> int | None:
        agent = self._agent
        if get_ident() != agent.training_thread and not agent.accepts():
            return None
        serial: int | None = iterator.__dict__.get(_SERIAL)
        if serial is None:
            # an iterator made before we came, or by a loader that makes its iterators itself
            serial = next(self._serials)
            self._watch(iterator, serial)
            self._tell_unmade(iterator, serial)
        self._fetching = serial
        number = iterator.__dict__.get("_num_yielded", 0)
        loader = self._iterated.get(serial, _UNKNOWN).loader
        early = number <= FIRST_LOOKS and self._looks.get(loader, 0) < LOOKS_AT_ONCE
        self._look = number > 0 and (number % LOOK_EVERY == 0 or early)
        now = monotonic_ns() + self._offset_ns
        if self._deaths:
            self._tell_deaths(now)
        if agent.framework_steps is not None:
            agent.framework_steps.sample(now)
        self._faults.fed = True
        self._faults.note(now)
        self._steps.fetch_start(serial, now)
        if self._look:  # from here on it is of the step that it feeds
            self._began = monotonic_ns() + self._offset_ns
        return serial

    def _after_next(self, token: int, batch: Any, error: BaseException | None) -> None:
        steps, now = self._steps, monotonic_ns() + self._offset_ns
        if error is None:
            rows, size = None, self._iterated.get(token, _UNKNOWN).size
            if batch.__class__ in _PLAIN and batch and batch[0].__class__ is self._tensor and not self._has_modes():
                shape = batch[0].shape  # what nearly every loader yields, without a call
                if shape:
                    rows = shape[0]
            if rows is None:
                with self._unheard():
                    rows = batch_rows(batch, size)
            if rows is not None and size is not None and rows > size > 1:  # nodes of graphs, tokens of texts
                rows = size
            steps.fetch_end(token, rows, now)
            if self._token_looks or self._look:
                with self._unheard():
                    if self._token_looks:
                        self._keep_tokens(batch, now)
                    if self._look:
                        self._count(token, batch, now - self._began)
        elif isinstance(error, StopIteration):
            steps.fetch_stop(token, now)
        else:
            steps.fetch_end(token, None, now)

    def _count_tokens(self, batch: Any, now: int) -> None:
        """Keep the tokens of a batch, padding included, where they are not as many as of the one before."""
        tokens = batch_tokens(batch)
        self._token_looks = TOKEN_LOOKS if tokens else self._token_looks - 1
        if tokens and tokens != self._tokens:
            self._tokens = tokens
            kept = self._agent.metrics
            kept.keep(kept.series(metrics.BATCH_TOKENS, "loader"), now, tokens)

    def _count_content(self, serial: int, batch: Any, waited_ns: int) -> None:
        loader = self._iterated.get(serial, _UNKNOWN).loader
        if loader is None:
            return
        self._looks[loader] = self._looks.get(loader, 0) + 1
        tensors, size, objects = (round(count) for count in batch_content(batch))
        self._agent.journal.write(
            "batch", self._began, waited_ns, step=None, id=loader, tensors=tensors, bytes=size, objects=objects
        )

    def _before_reset(self, iterator: Any, loader: Any, first_iter: bool = False) -> _Made | None:
        if first_iter:
            return None
        token = self._before_make(loader)
        if token is not _NOT_OURS:
            iterator.__dict__[_SERIAL] = token[0]
            self._adopt(token[0], iterator, anew=True)
        return token

    def _before_make(self, loader: Any) -> _Made:
        agent = self._agent
        agent.making_loader = True
        if not agent.accepts():
            return _NOT_OURS
        now = agent.clock.now()
        self._tell_deaths(now)
        serial = next(self._serials)
        epoch = agent.steps.loader_created(self.serial_of(loader) or 0, serial, now, _is_accelerates())
        return serial, now, loader, epoch

    def _after_make(self, token: _Made, iterator: Any, error: BaseException | None) -> None:
        self._agent.making_loader = False
        if token is _NOT_OURS or error is not None:
            return
        serial, start, loader, epoch = token
        size = getattr(loader, "batch_size", None)
        if size is None:  # a framework's loader is given the sampler of batches of the user's
            size = getattr(getattr(loader, "batch_sampler", None), "__dict__", {}).get("batch_size")
        known = self._iterated.setdefault(serial, _Iterated())
        known.size = size if isinstance(size, int) else None
        known.loader = self.serial_of(loader) or 0
        # None after a reset, where the iterator is known already; a loader of the script's may make any other
        if isinstance(iterator, sys.modules["torch"].utils.data.dataloader._BaseDataLoaderIter):
            self._watch(iterator, serial)
        self._tell_loader(serial, known.loader, epoch)
        with self._unheard():
            known.length = length = _length(loader)
        if length is not None:
            self._agent.steps.loader_length(serial, length)
        self._agent.journal.write(
            "loader",
            start,
            self._agent.clock.now() - start,
            step=None,
            id=known.loader,
            dataset=self.serial_of(getattr(loader, "dataset", None)),
            epoch=epoch,
            length=length,
            num_workers=getattr(loader, "num_workers", None),
            batch_size=size,
            iterable=getattr(loader, "_dataset_kind", None) == 1,  # torch's _DatasetKind.Iterable
        )

    def _tell_unmade(self, iterator: Any, serial: int) -> None:
        """Of an iterator that nobody saw made, as fastai's are: its data set stands for the loader."""
        known, data = self._iterated[serial], getattr(iterator, "_dataset", None)
        known.loader = self.serial_of(data) or 0
        workers = getattr(iterator, "_num_workers", None)
        now = self._agent.clock.now()
        self._agent.journal.write(
            "loader", now, 0, step=None, id=known.loader, dataset=known.loader, num_workers=workers
        )

    def _iterator_dead(self, serial: int) -> None:
        self._iterated.pop(serial, None)
        if _struck_own_code():
            self._deaths.append(serial)
        elif self._agent.accepts():
            self._agent.steps.iterator_dead(serial, self._agent.clock.now())

    def _tell_deaths(self, now: int) -> None:
        while self._deaths:
            self._agent.steps.iterator_dead(self._deaths.pop(), now)

    def _watch(self, iterator: Any, serial: int) -> None:
        dead = self._dead
        iterator.__dict__[_SERIAL] = serial
        self._adopt(serial, iterator)
        self._iterated.setdefault(serial, _Iterated()).reference = weakref.ref(iterator, lambda _: dead(serial))

    def serial_of(self, thing: Any) -> int | None:
        """A number for a loader or a data set, the same for the same object; None where it cannot be told from others.

        A framework that builds a loader of its own from the user's hands on the data set.
        """
        key = id(thing)
        while self._gone:
            gone = self._gone.pop()
            if self._known.get(gone.key, (0, None))[1] is gone:
                del self._known[gone.key]
        known = self._known.get(key)
        if known is not None and known[1]() is thing:
            return known[0]
        try:
            reference = weakref.KeyedRef(thing, self._gone.append, key)
        except TypeError:  # a list or a dict
            return None
        serial = next(self._serials)
        self._known[key] = (serial, reference)
        return serial


def _is_accelerates() -> bool:
    """Whether one of Accelerate's loaders asks its own for an iterator: it hands a batch out once the next is there."""
    frame: Any = sys._getframe(1)
    for _ in range(8):
        if frame is None or frame.f_globals.get("__name__") == "accelerate.data_loader":
            return frame is not None
        frame = frame.f_back
    return False


def _struck_own_code() -> bool:
    """Whether the garbage collector interrupted the step cutter or the agent, which must not be re-entered."""
    frame: Any = sys._getframe(1)
    for _ in range(8):
        if frame is None or frame.f_code.co_filename in _CRITICAL:
            return frame is not None
        frame = frame.f_back
    return False


def _length(loader: Any) -> int | None:
    """Batches of an epoch where torch's own sampler knows them, without a call that the script could notice."""
    own = _own(loader)
    sampler: Any = own.get("batch_sampler")
    if sampler is None:
        sampler = own.get("sampler")
    if not type(sampler).__module__.startswith("torch."):
        sampler = _own(sampler).get("sampler")  # one that repeats torch's for ever
    try:
        is_known = type(sampler).__module__.startswith("torch.") and _only_looks(sampler)
        return len(sampler) if is_known else None
    except _NO_LENGTH:
        return None


def _only_looks(value: Any, depth: int = 6) -> bool:
    """Whether `len(value)` runs no code of the script, or such as only reads attributes and lengths."""
    return depth > 0 and _reads(value, getattr(type(value), "__len__", None), depth)


def _reads(value: Any, function: Any, depth: int, around: tuple[Any, ...] = ()) -> bool:
    if function in around:  # a property that reads another object's of its name
        return True
    if function.__class__ is not FunctionType:  # None, or code of C
        return type(function).__module__ == "builtins" and function.__class__ is not MethodType
    if not function.__module__.startswith("torch.") and not _is_plain(function.__code__):
        return False
    for name in function.__code__.co_names:
        made, own = getattr(type(value), name, None), _own(value)
        if isinstance(made, property):
            looks = _reads(value, made.fget, depth, (*around, function))
        elif name in own:
            looks = _only_looks(own[name], depth - 1)
        else:
            looks = not isinstance(made, functools.cached_property)
        if not looks:
            return False
    return True


@functools.lru_cache(maxsize=64)
def _is_plain(code: CodeType) -> bool:
    """Whether it calls nothing but `len` and the like, makes no function and writes nothing."""
    calls = 0
    for one in dis.get_instructions(code):
        name = one.opname
        if name.startswith(_WRITES) and not name.startswith("STORE_FAST"):
            return False
        calls += name.startswith("CALL") - (name == "LOAD_GLOBAL" and one.argval in _LOOKS)
    return not calls


_LOOKS = ("len", "int", "min", "max")
_WRITES = ("STORE", "DELETE", "IMPORT", "MAKE", "YIELD", "RAISE")
