"""What the run learns beside what it costs: losses, learning rates, norms, what the script logs; as `metrics` events.

A number in the host's memory is read where it is. On a CUDA device a scalar is copied, without its graph, into a ring
of 64. A full ring, or one with values older than `EVERY_NS` at the end of a step, is copied as a whole to pinned memory
behind an event that is asked, never waited for. Nothing here synchronises a device, in a graph's capture nothing is
copied, and what lies on a device of another kind is left out, which is said once.

The step of a value is not written: it follows from its time once the step has ended (`tables.metrics`).
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import threading
import time
import weakref
from binascii import b2a_base64
from itertools import groupby
from operator import itemgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence, Tuple

from stepscope.record.agent.frames import place_fields, user_frame, user_places

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.segments import StepRow

NAME = "metrics"
BATCH_TOKENS = "perf/batch_tokens"  # of the batches from one on, until the next value
SIZE = 64  # values that a device copies to the host together
EVERY_NS = 500_000_000  # values older than this are read at the end of a step: `kill -9` loses a second at most
LATE = 256  # values of short steps that are read at the next end of one: the batches of 512 are remembered
HELD_LIMIT = 4_096  # values that wait for the end of a step; a step with more of them is read in the middle
SERIES_LIMIT = 20_000  # a script may put the step into the names that it logs under
RINGS_LIMIT = 8  # full rings of a device that is far behind; beyond them values are left out
PATIENCE_S = 5.0  # at the end, for a device that has not finished
OPTIMIZERS_LIMIT, GROUPS_LIMIT = 8, 128  # whose learning rates are kept; an optimizer per parameter has hundreds alike
SITES_LIMIT = 64  # lines that call backward, each with the line that calls their function
DIVISIONS = ("DivBackward", "MulBackward")  # last nodes that may divide by the number of passes of an update
FACTORS_LIMIT = 16  # passes of a line whose divisor is read: does it change with each of them, or with the update?
PIPELINING = "torch/distributed/pipelining/"  # scales gradients by itself, behind the backward passes of an update
SETS_LIMIT = 64  # lists of names that an event may refer to by number

Listener = Callable[["Series", "Sequence[int]", "list[float]"], None]
VectorReader = Callable[["list[float]"], None]


class Series(NamedTuple):
    """One curve: its name, what tells it, and what is known of all its values."""

    name: str
    source: str
    about: dict[str, Any]
    by_update: bool = False  # the number of optimizer steps before each value is written as well


# A value on a device that is kept: series, time in ns, nothing yet, and the number of optimizer steps that ended before
# it; where one is under way, as around a closure, -1 minus that number.
Entry = Tuple[int, int, Any, int]
FIELDS = 4
_SERIES = itemgetter(0)


class Metrics:
    """The values of one process. `keep` is cheap and safe on the training thread; `listeners` hear what was read."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()  # of the rings: a script may log on any thread, and in `__del__`
        self._series: dict[Any, int] = {}
        self._all: list[Series] = []
        # The fields of all numbers one after the other: no object that the garbage collector would look at. It is only
        # ever extended, and cut at its beginning, each of which no other thread comes between.
        self._numbers: list[Any] = []
        self._rings: dict[Any, Ring | None] = {}  # by device and type; None of one that is left out
        self._lost = 0
        # (code, instruction) of a line that calls backward -> series, and whether its losses lie in memory as they are
        self._sites: dict[Any, tuple[int | None, bool]] = {}
        self._dividing: dict[Any, tuple[int | None, list[Any]]] = {}  # those whose first passes' divisors are read
        self._codes: list[Any] = []
        self._tensor: Any = None  # torch's class, and the code of its `backward`, once a loss was met
        self._backward: Any = None
        self._rates: dict[int, tuple[Any, ...]] = {}  # id of an optimizer -> number, its groups' last rates, itself
        self._optimizers = 0  # so many had rates
        self._gone: list[Any] = []  # references to those that are no more
        self._scaled: tuple[Any, Any] | None = None  # (what GradScaler.scale returned last, what it was given)
        self._updates = 0  # optimizer steps that ended
        self._steppers: dict[int, int] = {}  # of several optimizers, which made each update
        self._updating = False  # one is under way
        self.is_scaled = False  # gradients of the last backward passes are, by a GradScaler
        self._vectors: list[tuple[Any, Any, VectorReader]] = []  # (event, pinned memory, who reads it)
        self._sets: dict[tuple[str, ...], int] = {}  # names of values that are written together
        self._together: dict[tuple[str, str], Series] = {}  # their curves, for listeners
        self.listeners: list[Listener] = []
        # Called, guarded, with a loss on the CPU that is not finite before its backward pass, and with the parameters
        # whose gradients have such a norm before they are clipped by it.
        self.loss_lost: Callable[[Any, int], Any] = lambda _lost, _now_ns: None
        self.norm_lost: Callable[[Any, int], Any] = lambda _lost, _now_ns: None
        agent.add_boundary_hook(self._at_boundary, NAME)
        agent.add_end_hook(self.finish, NAME)
        agent.add_finish_hook(self.finish, NAME)

    # ------------------------------------------------------------------------------------------ what probes tell

    def series(self, name: str, source: str, by_update: bool = False, **about: Any) -> int | None:
        """The number of the curve `name`, for `keep`; None where there are too many."""
        key = (name, source, *about.items())
        number = self._series.get(key)
        if number is None and len(self._all) < SERIES_LIMIT:
            number = self._series[key] = len(self._all)
            self._all.append(Series(name, source, about, by_update))
        return number

    def keep(self, series: int | None, time_ns: int, value: Any, update: int = 0) -> float | None:
        """Keep a value: a number, or a tensor of one element, of which a copy is made. On any thread.

        What is neither is passed over. Returns the number, where it is known already.
        """
        if series is None:
            self._lost += 1
            return None
        if value.__class__ is not float and not isinstance(value, (int, float)):
            with sys.modules["torch"]._C.DisableTorchFunction():
                value = _read(value) if value.__class__ is self._tensor else scalar_of(value)
                if value is None:
                    return None
                if value.__class__ is not float:
                    with self._lock:
                        self._take(value, (series, time_ns, None, update))
                    return None
        number: float = value
        self._numbers.extend((series, time_ns, number, update))
        if len(self._numbers) >= HELD_LIMIT * FIELDS:
            self._drain()
        return number

    def keep_norm(self, series: int | None, time_ns: int, norm: Any) -> float | None:
        """As `keep`, of a norm that torch computed: in one piece, as it happens in every step that clips."""
        numbers = self._numbers
        if norm.__class__ is self._tensor and norm.is_cpu and norm.numel() == 1 and len(numbers) < HELD_LIMIT * FIELDS:
            at = _readers.get(norm.dtype)
            if at is not None and series is not None:
                value: float = at(norm.data_ptr()).value
                numbers.extend((series, time_ns, value, 0))
                return value
        return self.keep(series, time_ns, norm)

    def keep_all(self, vector: Any, then: VectorReader) -> None:
        """Have `then` called with the values of `vector`, which nobody writes to any more, once its device has them.

        On the training thread: at once on the CPU, else between two steps after one copy to pinned memory.
        """
        if vector.device.type == "cpu":
            then(vector.tolist())
            return
        torch: Any = sys.modules["torch"]
        with torch.cuda.device(vector.device):
            pinned = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            pinned.copy_(vector, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._vectors.append((event, pinned, then))

    def tell_all(self, source: str, time_ns: int, values: dict[str, float]) -> None:
        """Write values of one moment by name. The names are written once for all moments that have the same."""
        names = tuple(values)
        entry: dict[str, Any] = {"source": source, "time_ns": time_ns}
        number = self._sets.get(names)
        if number is None:
            entry["names"] = names
            if len(self._sets) < SETS_LIMIT:
                number = self._sets[names] = len(self._sets)
        # Nine digits are all that a single-precision number has.
        told = [as_json(float(f"{value:.9g}")) for value in values.values()]
        self._agent.journal.write(NAME, step=None, together={**entry, "set": number, "values": told})
        if self.listeners:
            for name, value in values.items():
                series = self._together.setdefault((source, name), Series(name, source, {}))
                for listener in self.listeners:
                    listener(series, [time_ns], [value])

    def loss(self, root: Any, now_ns: int, depth: int = 3) -> None:
        """`backward` is about to be called on `root`, by who called the wrapper that called our caller.

        All in one function, for what it calls is in nobody's cache by the time of the next step.
        """
        if root.__class__ is not self._tensor and root.__class__ in (list, tuple):
            if len(root) != 1:
                self._losses(root, now_ns, depth + 2)
                return
            root = root[0]
        if self._scaled is None:
            self.is_scaled = False
        else:
            self.is_scaled = self._scaled[0] is root
            root, self._scaled = (self._scaled[1] if self.is_scaled else root), None
        if not getattr(root, "requires_grad", False):
            return
        # The line, without making its name. A code object's own hash goes over all that it holds; `_codes` keeps each
        # alive, and its number its own.
        frame = _frame(depth)
        caller = frame.f_back
        if frame.f_code is self._backward and caller is not None:
            frame, caller = caller, caller.f_back
        if caller is None:
            key: Any = (id(frame.f_code), frame.f_lasti)
        else:
            key = (id(frame.f_code), frame.f_lasti, id(caller.f_code), caller.f_lasti)
        series, is_plain = self._sites.get(key) or (self._site(frame, root), False)
        update = -1 - self._updates if self._updating else self._updates
        value, numbers = None, self._numbers
        if is_plain and series is not None and root.__class__ is self._tensor and root.is_cpu and root.numel() == 1:
            at = _readers.get(root.dtype)  # as `_read` does, with less to ask
            if at is not None and len(numbers) < HELD_LIMIT * FIELDS:
                value = at(root.data_ptr()).value
                numbers.extend((series, now_ns, value, update))
        if value is None:
            value = self.keep(series, now_ns, root, update)
        if value is not None and value - value != 0.0:
            self.loss_lost(root, now_ns)

    def update_begins(self, optimizer: Any, now_ns: int) -> None:
        """An optimizer, torch's or a framework's, is about to step: keep the learning rates that are new."""
        self._updating = True
        groups = getattr(optimizer, "param_groups", None) or getattr(optimizer, "hypers", None)
        if groups is None:  # as Keras has it
            groups = [{"lr": getattr(getattr(optimizer, "_learning_rate", None), "_value", None)}]
        known = self._rates.get(id(optimizer))
        if known is None or known[2]() is not optimizer:
            while self._gone:
                self._rates.pop(self._gone.pop().key, None)
            if len(self._rates) >= OPTIMIZERS_LIMIT:
                return
            # One that goes is told to code of C: what a signal's handler raises in Python that is called then is lost.
            known = (
                self._optimizers,
                [None] * GROUPS_LIMIT,
                weakref.KeyedRef(optimizer, self._gone.append, id(optimizer)),
            )
            self._rates[id(optimizer)] = known
            self._optimizers += 1
        number, last, _ = known
        for group, before in zip(groups, last):  # most often nothing is new
            rate = group.get("lr")
            if rate.__class__ is not float or rate != before:
                break
        else:
            return
        for index, group in enumerate(groups[:GROUPS_LIMIT]):
            rate = group.get("lr")
            if rate.__class__ is float:
                if rate != last[index]:
                    last[index] = rate
                    self._keep_rate(number, index, group, now_ns, rate)
            elif rate is not None:
                version = (id(rate), getattr(rate, "_version", rate))
                if version != last[index]:
                    last[index] = version
                    self._keep_rate(number, index, group, now_ns, rate)

    def update_ended(self, optimizer_id: int) -> None:
        """An optimizer has stepped."""
        self._updating = False
        if self._optimizers > 1 and optimizer_id in self._rates:
            self._steppers[self._updates] = self._rates[optimizer_id][0]
        self._updates += 1

    def scaled(self, loss: Any, result: Any) -> None:
        """`GradScaler.scale` made `result` of `loss`."""
        self._scaled = None if result is loss else (result, loss)  # a scaler that is off returns what it is given

    # ------------------------------------------------------------------------------------------------- reading out

    def finish(self) -> None:
        """Read everything out, and wait for devices a while at most. What comes later is kept as before."""
        self._drain()
        deadline = time.monotonic() + PATIENCE_S
        while self._vectors or any(ring is not None and ring.waiting for ring in self._rings.values()):
            self._hand_over()
            self._collect()
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        if self._lost:
            lost, self._lost = self._lost, 0
            self._agent.journal.write("metrics_lost", step=None, number=lost)

    def _at_boundary(self, _row: StepRow | None, now_ns: int) -> None:
        numbers = self._numbers
        if numbers and now_ns - numbers[1] >= EVERY_NS:
            self._drain()
        elif len(numbers) >= LATE * FIELDS:  # a listener must not hear of a short step hundreds later
            self._collect()
        if self._vectors:
            self._hand_over()
        for ring in self._rings.values():
            if ring is None:
                continue
            if ring.waiting:  # what was taken since goes with the next full ring: copies for each would fill the limit
                if ring.arrived:
                    self._collect()
            elif now_ns - ring.oldest_ns >= EVERY_NS:
                self._drain()

    def _drain(self) -> None:
        """Read all that is kept, as far as no device has to be waited for."""
        with self._lock:
            for ring in self._rings.values():
                if ring is not None:
                    ring.drain()
            self._collect()

    def _hand_over(self) -> None:
        while self._vectors and self._vectors[0][0].query():
            _, pinned, then = self._vectors.pop(0)
            then(pinned.tolist())

    def _collect(self) -> None:
        length = len(self._numbers)
        numbers = self._numbers[:length]
        del self._numbers[:length]
        for ring in self._rings.values():
            if ring is not None:
                numbers += ring.collect()
        if numbers:
            self._write(numbers)

    def _write(self, numbers: list[Any]) -> None:
        rows = sorted(zip(*(numbers[at::FIELDS] for at in range(FIELDS))), key=_SERIES)
        written = []
        for number, entries in groupby(rows, _SERIES):
            series = self._all[number]
            _, times, found, updates = zip(*entries)
            if times != (*sorted(times),):  # of other threads, or of a device
                times, found, updates = zip(*sorted(zip(times, found, updates), key=_SERIES))
            values = [*map(float, found)]
            for listener in self.listeners:
                listener(series, times, values)
            columns = {"times_ns": packed("q", times), "values": packed("d", values)}
            if series.by_update:
                columns["updates"] = packed("q", updates)
                if self._steppers:
                    ended = [update if update >= 0 else -1 - update for update in updates]
                    columns["optimizers"] = packed("q", [self._steppers.get(update, 0) for update in ended])
            written.append({"name": series.name, "source": series.source, **series.about, **columns})
        self._agent.journal.write(NAME, step=None, series=written)
        if len(self._steppers) > HELD_LIMIT:
            self._steppers = {update: self._steppers[update] for update in list(self._steppers)[-SIZE:]}

    # --------------------------------------------------------------------------------------------------- internals

    def _losses(self, roots: Any, now_ns: int, depth: int) -> None:
        """Keep what one call was given: it is added up where the table is made."""
        if self._scaled is None and all(getattr(root, "numel", int)() == 1 for root in roots):
            for root in roots:
                self.loss(root, now_ns, depth)

    def _take(self, tensor: Any, entry: Entry) -> None:
        """Keep what lies on a device."""
        device, dtype = tensor.device, tensor.dtype
        if (device, dtype) not in self._rings:
            is_kept = device.type == "cuda" and not dtype.is_complex
            self._rings[device, dtype] = Ring(device, dtype) if is_kept else None
            if device.type != "cuda":
                self._agent.journal.write("mark", name=f"metrics: values on {device.type} devices are not recorded")
        ring = self._rings[device, dtype]
        if ring is not None and not ring.take(tensor, entry):
            self._lost += 1

    def _keep_rate(self, number: int, index: int, group: dict[str, Any], now_ns: int, rate: Any) -> None:
        name = group.get("name")
        name = name if isinstance(name, str) and name else str(index)
        self.keep(self.series(f"train/lr/{f'{number}.' if number else ''}{name}", "optimizer"), now_ns, rate)

    def _site(self, frame: FrameType | None, root: Any) -> int | None:
        """The series of the script's line that calls backward, from `frame` on; None where there are too many."""
        scaled = frame is not None and PIPELINING in frame.f_code.co_filename
        frame = user_frame(frame)
        caller = None if frame is None else frame.f_back
        key: Any = frame and (id(frame.f_code), frame.f_lasti)
        if caller is not None:
            key = (*key, id(caller.f_code), caller.f_lasti)
        torch: Any = sys.modules["torch"]
        # A line goes on to make losses as its first ones.
        is_plain = root.__class__ is torch.Tensor and root.layout is torch.strided and not root.is_neg()
        if key in self._dividing:
            series, factors = self._dividing[key]
            factors.append(_factor(root))
            if len(factors) >= FACTORS_LIMIT:
                self._sites[key] = self._dividing.pop(key)[0], is_plain
            return series
        if key not in self._sites and len(self._sites) + len(self._dividing) < SITES_LIMIT:
            self._tensor, self._backward = torch.Tensor, getattr(torch.Tensor.backward, "__code__", None)
            self._codes += (frame and frame.f_code, caller and caller.f_code)
            places = user_places(3, 2)
            about = {**place_fields(places[0] if places else None), "caller": places[1] if places[1:] else None}
            about.update({"scaled": True} if scaled else {})
            node = getattr(root, "grad_fn", None)
            name = type(node).__name__ if node is not None else None
            series = self.series("train/loss", "backward", by_update=True, **about, node=name)
            if series is None or name is None or not name.startswith(DIVISIONS):
                self._sites[key] = series, is_plain
            else:
                factors = self._all[series].about["factors"] = [_factor(root)]
                self._dividing[key] = series, factors
            return series
        return self._sites.get(key, (None,))[0]


class Ring:
    """The last scalars of a type on one CUDA device, in its memory: a copy within a type is cheaper than a kernel that
    converts. `waiting` are full ones whose copies it has to make.
    """

    def __init__(self, device: Any, dtype: Any) -> None:
        self._device, self._dtype = device, dtype
        self._torch: Any = sys.modules["torch"]
        self._cuda: Any = self._torch.cuda
        self._raw_stream: Any = getattr(self._torch._C, "_cuda_getCurrentRawStream", None)
        self._spare: list[tuple[Any, list[Any], Any]] = []  # (buffer, its elements, pinned memory)
        self._entries: list[Entry] = []
        self._streams: dict[Any, Any] = {}  # those that values were copied on
        self.waiting: list[tuple[Any, tuple[Any, list[Any], Any], list[Entry]]] = []
        self._buffers = self._new()

    def take(self, tensor: Any, entry: Entry) -> bool:
        """Copy `tensor`, without its graph; False where there is no room, or a graph is being captured."""
        if len(self.waiting) >= RINGS_LIMIT or self._cuda.is_current_stream_capturing():
            return False
        raw = self._raw_stream and self._raw_stream(self._device.index)
        if raw is None or raw not in self._streams:
            stream = self._cuda.current_stream(self._device)
            self._streams[stream.cuda_stream] = stream
        slot = self._buffers[1][len(self._entries)]
        self._entries.append(entry)
        value = tensor.detach()
        slot.copy_(value if value.dim() == 0 else value.reshape(()))
        if len(self._entries) == SIZE:
            self.drain()
        return True

    @property
    def arrived(self) -> bool:
        """Whether the device has made the copies of the ring that waits longest."""
        return bool(self.waiting) and bool(self.waiting[0][0].query())

    def drain(self) -> None:
        """Have what is in the ring copied to the host."""
        entries, self._entries = self._entries, []
        buffer, _, pinned = self._buffers
        if not entries:
            return
        stream = self._cuda.current_stream(self._device)
        for other in self._streams.values():
            if other != stream:
                stream.wait_stream(other)  # the device waits, not we
        self._streams.clear()
        pinned.copy_(buffer, non_blocking=True)
        event = self._cuda.Event()
        event.record(stream)
        self.waiting.append((event, self._buffers, entries))
        self._buffers = self._spare.pop() if self._spare else self._new()

    @property
    def oldest_ns(self) -> int:
        """The time of the first value in the ring, that of no moment where it is empty."""
        return self._entries[0][1] if self._entries else 1 << 63

    def collect(self) -> list[Any]:
        """The fields of what has arrived since the last call, one after the other."""
        read: list[Any] = []
        while self.waiting and self.waiting[0][0].query():
            _, buffers, entries = self.waiting.pop(0)
            self._spare.append(buffers)
            for (series, time_ns, _, update), value in zip(entries, buffers[2].tolist()):
                read += (series, time_ns, value, update)
        return read

    def _new(self) -> tuple[Any, list[Any], Any]:
        torch = self._torch
        with torch.no_grad():
            buffer = torch.zeros(SIZE, dtype=self._dtype, device=self._device)
            pinned = torch.empty(SIZE, dtype=self._dtype, pin_memory=True)
            return buffer, list(buffer.unbind()), pinned


def scalar_of(value: Any) -> Any:
    """The one number of a tensor that lies in the host's memory; else the tensor itself, and None where it has none.

    Of a distributed tensor it is this rank's part: nothing is communicated. No operator runs, so that nobody's profiler
    sees it.
    """
    torch: Any = sys.modules["torch"]
    if value.__class__ is not torch.Tensor:
        value = getattr(value, "_local_tensor", value)
        if not isinstance(value, torch.Tensor) or type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return None  # no tensor, a fake one, or one still on its way from other ranks
        if value.__class__ is not torch.Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                found = _read(value)
                return found if found is not value else value.detach().as_subclass(torch.Tensor)
    return _read(value)


def _read(tensor: Any) -> Any:
    if tensor.numel() != 1:
        return None
    if not tensor.is_cpu:
        return None if tensor.is_complex() else tensor
    at = _readers.get(tensor.dtype, _readers)
    if at is _readers:
        at = _readers[tensor.dtype] = _READERS.get(str(tensor.dtype))
        _readers[None] = sys.modules["torch"].strided
    if at is None or tensor.layout is not _readers[None]:
        return None
    value = float(at(tensor.data_ptr()).value)
    return -value if tensor.is_neg() else value


class _Short:
    """A number of two bytes in memory: a half-precision one, or a `bfloat16`, the upper half of a single."""

    def __init__(self, address: int, brain: bool = False) -> None:
        data = ctypes.string_at(address, 2)
        self.value = float(struct.unpack("<f", b"\0\0" + data)[0] if brain else struct.unpack("<e", data)[0])


_frame = sys._getframe
_readers: dict[Any, Any] = {}  # by torch's type, as far as met; for None the layout of what lies there as it is
# What has the `value` of a number of a type at an address.
_READERS: dict[str, Callable[[int], Any]] = {
    "torch.float32": ctypes.c_float.from_address,
    "torch.float64": ctypes.c_double.from_address,
    "torch.float16": _Short,
    "torch.bfloat16": lambda address: _Short(address, brain=True),
    "torch.int64": ctypes.c_int64.from_address,
    "torch.int32": ctypes.c_int32.from_address,
    "torch.bool": ctypes.c_bool.from_address,
}


def _factor(root: Any) -> float | None:
    """The number that the last node of a backward pass's root divides or multiplies by, where the host knows it."""
    node = getattr(root, "grad_fn", None)
    if getattr(getattr(node, "_raw_saved_other", None), "unpack_hook", None) is not None:
        return None  # the script's own hook would have to unpack it
    factor = getattr(node, "_saved_other", None)
    on_cpu = getattr(getattr(factor, "device", None), "type", None) == "cpu"
    if on_cpu and factor.numel() == 1 and not factor.requires_grad:  # type: ignore[union-attr]
        factor = float(factor.numpy())  # type: ignore[union-attr]
    return factor if isinstance(factor, (int, float)) and math.isfinite(factor) else None


def packed(kind: str, numbers: Sequence[float]) -> str:
    """Numbers of eight bytes each ("q" whole, "d" not) as base64: a twentieth of the time their digits take."""
    return b2a_base64(struct.pack(f"<{len(numbers)}{kind}", *numbers), newline=False).decode()


def as_json(value: float) -> float | str:
    """`value` as JSON has it: what is not finite is a word."""
    return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
