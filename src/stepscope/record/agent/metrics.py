"""What the run learns beside what it costs: losses, learning rates, norms, what the script logs; as `metrics` events.

A tensor is copied on its device, without its graph, into a ring of 64 scalars. A full ring, or one with values older
than `EVERY_NS` at the end of a step, is read as a whole: on the CPU from memory, on a CUDA device by one copy to pinned
memory behind an event that is asked, never waited for. Nothing here synchronises a device, in a graph's capture nothing
is copied, and what lies on a device of another kind is left out, which is said once.

The step of a value is not written: it is the one whose time holds the value's, known when the step has ended.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from itertools import groupby
from operator import itemgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from stepscope.record.agent.frames import is_user_file, place_fields, user_place

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.segments import StepRow

NAME = "metrics"
SIZE = 64  # values that are read together
EVERY_NS = 500_000_000  # values older than this are read at the end of a step: `kill -9` loses a second at most
HELD_LIMIT = 4_096  # values that wait for the end of a step; a step with more of them is read in the middle
RINGS_LIMIT = 8  # full rings of a device that is far behind; beyond them values are left out
PATIENCE_S = 5.0  # at the end, for a device that has not finished
OPTIMIZERS_LIMIT, GROUPS_LIMIT = 8, 32  # whose learning rates are kept; an optimizer per parameter has hundreds alike
SITES_LIMIT = 64  # lines that call backward
FRAMES_LIMIT = 60

SETS_LIMIT = 64  # lists of names that an event may refer to by number

Listener = Callable[["Series", "list[int]", "list[float]"], None]
VectorReader = Callable[["list[float]"], None]


class Series(NamedTuple):
    """One curve: its name, what tells it, and what is known of all its values."""

    name: str
    source: str
    about: dict[str, Any]
    by_update: bool = False  # the number of optimizer steps before each value is written as well


class Entry(NamedTuple):
    """A value that is kept; `update` is the number of optimizer steps that ended before it.

    Where one is under way, as around a closure, it is -1 minus that number.
    """

    series: int
    time_ns: int
    value: Any
    update: int = 0


class Metrics:
    """The values of one process. `keep` is cheap and safe on the training thread; `listeners` hear what was read."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()  # a script may log on any thread, and in `__del__`
        self._series: dict[Any, int] = {}
        self._all: list[Series] = []
        self._numbers: list[Entry] = []  # that were plain numbers
        self._rings: dict[Any, Ring | None] = {}  # by device; None of one that is left out
        self._oldest_ns = 0
        self._lost = 0
        self._sites: dict[Any, int] = {}  # (code, instruction) of a line that calls backward -> series
        self._rates: dict[int, tuple[Any, ...]] = {}  # id of an optimizer -> its groups' last rates
        self._scaled: tuple[Any, Any] | None = None  # (what GradScaler.scale returned last, what it was given)
        self._updates = 0  # optimizer steps that ended
        self._updating = False  # one is under way
        self.is_scaled = False  # gradients of the last backward passes are, by a GradScaler
        self._vectors: list[tuple[Any, Any, VectorReader]] = []  # (event, pinned memory, who reads it)
        self._sets: dict[tuple[str, ...], int] = {}  # names of values that are written together
        self.listeners: list[Listener] = []
        agent.add_boundary_hook(self._at_boundary, NAME)
        agent.add_end_hook(self.finish, NAME)
        agent.add_finish_hook(self.finish, NAME)

    # ------------------------------------------------------------------------------------------ what probes tell

    def series(self, name: str, source: str, by_update: bool = False, **about: Any) -> int:
        """The number of the curve `name`, for `keep`."""
        key = (name, source, *about.items())
        number = self._series.get(key)
        if number is None:
            number = self._series[key] = len(self._all)
            self._all.append(Series(name, source, about, by_update))
        return number

    def keep(self, series: int, time_ns: int, value: Any, update: int = 0) -> None:
        """Keep a value: a number, or a tensor of one element, of which a copy is made. On any thread."""
        with self._lock:
            if not self._oldest_ns:
                self._oldest_ns = time_ns
            if value.__class__ is float or isinstance(value, (int, float)) or type(value).__module__ == "numpy":
                self._numbers.append(Entry(series, time_ns, float(value), update))
                if len(self._numbers) >= HELD_LIMIT:
                    self._drain()
                return
            tensor = plain_scalar(value)
            if tensor is None:
                return
            device = tensor.device
            ring = self._rings.get(device)
            if ring is None and device not in self._rings:
                ring = self._rings[device] = self._made(device)
            if ring is not None and not ring.take(tensor, Entry(series, time_ns, None, update)):
                self._lost += 1

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
        for listener in self.listeners:
            for name, value in values.items():
                listener(Series(name, source, {}), [time_ns], [value])

    def loss(self, tensors: Any, now_ns: int) -> None:
        """`backward` is about to be called on `tensors`."""
        self.is_scaled = False
        root = tensors[0] if tensors.__class__ in (list, tuple) and len(tensors) == 1 else tensors
        scaled, self._scaled = self._scaled, None
        if scaled is not None and scaled[0] is root:
            root, self.is_scaled = scaled[1], True
        numel = getattr(root, "numel", None)
        if numel is not None and numel() == 1:
            self.keep(self._site(root), now_ns, root, -1 - self._updates if self._updating else self._updates)

    def update_begins(self, optimizer: Any, now_ns: int) -> None:
        """An optimizer is about to step: keep the learning rates that are new."""
        self._updating = True
        groups = optimizer.param_groups
        known = self._rates.get(id(optimizer))
        if known is None:
            if len(self._rates) >= OPTIMIZERS_LIMIT:
                return
            self._rates[id(optimizer)] = known = (len(self._rates), [None] * GROUPS_LIMIT)
        number, last = known
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

    def update_ended(self) -> None:
        """An optimizer has stepped."""
        self._updating = False
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
            self._collect()
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        if self._lost:
            lost, self._lost = self._lost, 0
            self._agent.journal.write("metrics_lost", step=None, number=lost)

    def _at_boundary(self, _row: StepRow | None, now_ns: int) -> None:
        if self._oldest_ns and now_ns - self._oldest_ns >= EVERY_NS:
            self._drain()
        if self._vectors:
            self._collect()
        for ring in self._rings.values():
            if ring is not None and ring.waiting:
                self._collect()

    def _drain(self) -> None:
        """Read all that is kept, as far as no device has to be waited for."""
        with self._lock:
            self._oldest_ns = 0
            for ring in self._rings.values():
                if ring is not None:
                    ring.drain()
            self._collect()

    def _collect(self) -> None:
        while self._vectors and self._vectors[0][0].query():
            _, pinned, then = self._vectors.pop(0)
            then(pinned.tolist())
        numbers, self._numbers = self._numbers, []
        for ring in self._rings.values():
            if ring is not None:
                numbers += ring.collect()
        if numbers:
            self._write(numbers)

    def _write(self, entries: list[Entry]) -> None:
        entries.sort(key=itemgetter(0, 1))
        written = []
        for number, group in groupby(entries, key=itemgetter(0)):
            series, own = self._all[number], list(group)
            times, values = [entry.time_ns for entry in own], [float(entry.value) for entry in own]
            for listener in self.listeners:
                listener(series, times, values)
            columns: dict[str, Any] = {"start_ns": times[0], "after_ns": [time - times[0] for time in times]}
            columns["values"] = [as_json(value) for value in values]
            if series.by_update:
                columns["updates"] = [entry.update for entry in own]
            written.append({"name": series.name, "source": series.source, **series.about, **columns})
        self._agent.journal.write(NAME, step=None, series=written)

    # --------------------------------------------------------------------------------------------------- internals

    def _made(self, device: Any) -> Ring | None:
        if device.type in ("cpu", "cuda"):
            return Ring(device)
        self._agent.journal.write("mark", name=f"metrics: values on {device.type} devices are not recorded")
        return None

    def _keep_rate(self, number: int, index: int, group: dict[str, Any], now_ns: int, rate: Any) -> None:
        name = group.get("name")
        name = name if isinstance(name, str) and name else str(index)
        self.keep(self.series(f"train/lr/{f'{number}.' if number else ''}{name}", "optimizer"), now_ns, rate)

    def _site(self, root: Any) -> int:
        """The series of the user's line that calls backward, found without making its name each time."""
        frame: FrameType | None = sys._getframe(4)
        for _ in range(FRAMES_LIMIT):
            if frame is None or is_user_file(frame.f_code.co_filename):
                break
            frame = frame.f_back
        key = None if frame is None else (frame.f_code, frame.f_lasti)
        series = self._sites.get(key)
        if series is None:
            place = place_fields(user_place(4))
            series = self.series("train/loss", "backward", by_update=True, **place, **_division(root))
            if len(self._sites) < SITES_LIMIT:
                self._sites[key] = series
        return series


class Ring:
    """The last scalars of one device, in its memory. `waiting` are full ones whose copies the device has to make."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._torch: Any = sys.modules["torch"]
        self._cuda = self._torch.cuda if device.type == "cuda" else None
        self._spare: list[tuple[Any, list[Any], Any]] = []  # (buffer, its elements, pinned memory)
        self._entries: list[Entry] = []
        self._streams: dict[Any, Any] = {}  # those that values were copied on
        self._read: list[Entry] = []
        self.waiting: list[tuple[Any, tuple[Any, list[Any], Any], list[Entry]]] = []
        self._buffers = self._new()

    def take(self, tensor: Any, entry: Entry) -> bool:
        """Copy `tensor`, without its graph; False where there is no room, or a graph is being captured."""
        if self._cuda is not None:
            if len(self.waiting) >= RINGS_LIMIT or self._cuda.is_current_stream_capturing():
                return False
            stream = self._cuda.current_stream(self._device)
            self._streams[stream.cuda_stream] = stream
        slot = self._buffers[1][len(self._entries)]
        self._entries.append(entry)
        slot.copy_(tensor.detach(), non_blocking=True)
        if len(self._entries) == SIZE:
            self.drain()
        return True

    def drain(self) -> None:
        """Have what is in the ring read."""
        entries, self._entries = self._entries, []
        buffer, _, pinned = self._buffers
        if not entries:
            return
        if self._cuda is None:
            values = buffer.tolist()
            self._read += (entry._replace(value=value) for entry, value in zip(entries, values))
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

    def collect(self) -> list[Entry]:
        """What has been read since the last call."""
        while self.waiting and self.waiting[0][0].query():
            _, buffers, entries = self.waiting.pop(0)
            self._spare.append(buffers)
            self._read += (entry._replace(value=value) for entry, value in zip(entries, buffers[2].tolist()))
        read, self._read = self._read, []
        return read

    def _new(self) -> tuple[Any, list[Any], Any]:
        torch = self._torch
        with torch.no_grad():
            buffer = torch.zeros(SIZE, dtype=torch.float64, device=self._device)
            pinned = None
            if self._cuda is not None:
                pinned = torch.empty(SIZE, dtype=torch.float64, pin_memory=True)
            return buffer, list(buffer.unbind()), pinned


def plain_tensor(value: Any) -> Any:
    """`value` as a plain tensor, its own part of a distributed one; None where it is none of these.

    The part of a tensor that is a sum or a mean over ranks is this rank's: nothing is communicated.
    """
    torch: Any = sys.modules["torch"]
    if value.__class__ is not torch.Tensor:
        value = getattr(value, "_local_tensor", value)
        if not isinstance(value, torch.Tensor):
            return None
        if value.__class__ is not torch.Tensor:
            if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                return None  # fake, or still on its way from other ranks
            with torch._C.DisableTorchFunctionSubclass():
                value = value.detach().as_subclass(torch.Tensor)
    return None if value.is_complex() or str(value.layout) != "torch.strided" else value


def plain_scalar(value: Any) -> Any:
    """The same of a tensor with one element, without dimensions."""
    value = plain_tensor(value)
    if value is not None and value.dim():
        value = value.detach().reshape(()) if value.numel() == 1 else None
    return value


def _division(root: Any) -> dict[str, Any]:
    """What made the root of a backward pass: the last node's name, and the number it divides or multiplies by."""
    node = getattr(root, "grad_fn", None)
    name = type(node).__name__ if node is not None else None
    factor = None
    if name is not None and name.startswith(("DivBackward", "MulBackward")):
        factor = getattr(node, "_saved_other", None)
        on_cpu = getattr(getattr(factor, "device", None), "type", None) == "cpu"
        if on_cpu and factor.numel() == 1 and not factor.requires_grad:  # type: ignore[union-attr]
            factor = float(factor.numpy())  # type: ignore[union-attr]
    return {"node": name, "factor": factor if isinstance(factor, (int, float)) else None}


def as_json(value: float) -> float | str:
    """`value` as JSON has it: what is not finite is a word."""
    return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
