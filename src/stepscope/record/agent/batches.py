"""Which samples the last batches were made of: references to what the sampler gave, by iterator and batch.

torch asks a sampler for the indices of a batch on the main process, ahead of time where there are workers, and hands
batches out in the order in which it asked. The lists themselves are kept, a few of them; they are looked into only
when something is written. What torch's own samplers give passes into them by iterators of the standard library, without
a line of ours; of other samplers every list is looked at, and copied. Nothing of the script is called: the name of a
sample is what a plain list of the data set holds at its place.

As long as there is room, what each step was trained on goes to `batches.jsonl` in the folder of the process: twice a
second, and before it would be forgotten, the new lists are written together as packed numbers, and runs of steps with
the numbers of the batches that they used. A line holds `uses`: [first step, iterator, its first batch, batches of each
step, steps], and `lists`, by iterator: `first` (batch), `sizes` (of each, or of all), `code` (of `array`) and
`indices` (little-endian, base64), or a `reason` for none.
"""

from __future__ import annotations

import json
import os
import re
import sys
import weakref
from array import array
from base64 import b64encode
from bisect import bisect_right
from collections import deque
from itertools import chain, tee
from numbers import Integral
from operator import itemgetter
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Callable

from stepscope.record.agent.journal import LineFile
from stepscope.record.agent.masking import mask_text

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.segments import StepRow


# Of an iterator. Short steps are cut 256 at a time at most and their values read then, 64 together; workers are sent
# some batches ahead.
BATCHES_LIMIT = 512
INTS_LIMIT = 131_072  # of an iterator, batches being alike: 5 MB, where nothing else holds them
LEAST_BATCHES = 8  # kept whatever their size, beside those that workers have been sent
COPIED_LIMIT = 4_096  # indices of a list that is copied if it is not torch's own, as it may be filled anew
ITERATORS_LIMIT = 8  # that are remembered, the living ones before the others
NAMES_LIMIT = 1_000  # in an event
TEXT_LIMIT = 300  # characters of a name
WRAPPERS_LIMIT = 16  # data sets inside each other
LISTS = ("samples", "imgs", "files", "paths", "image_files")  # attributes that name the file of a sample, before others
OTHERS_LIMIT = 64  # attributes that may, too, where what they hold looks like a path
PATH = re.compile(r"\S+\.\w{1,8}|\S+[/\\]\S+")

KEPT = "_stepscope_kept"
_PLAIN = (list, tuple)
_SECOND = itemgetter(1)
_SAMPLERS = "torch.utils.data.sampler"
_LISTS = (list, tuple, range)

NO_INDICES = "an iterable data set has no indices, only the position of the batch"
NOT_IN_ORDER = "workers hand batches out in any order"
REFILLED = "its sampler fills one large list again and again"
FORGOTTEN = "too many batches ago, or never asked of a sampler"


class Kept:
    """What a sampler gave for the last batches of one pass over a loader. The number of a batch counts from 0."""

    def __init__(self, iterator: Any) -> None:
        state: dict[str, Any] = iterator.__dict__
        self.least = LEAST_BATCHES + (state.get("_prefetch_factor") or 0) * (state.get("_num_workers") or 0)
        # of batches that were asked for; of workers it is made only after this
        self.counter = "_send_idx" if state.get("_num_workers") else "_num_yielded"
        sampler = state.get("_index_sampler")
        # One whose batches are alike; a subclass of the script's may do anything.
        self.is_torchs = type(sampler).__module__ == _SAMPLERS
        size = getattr(sampler, "batch_size", 1)
        room = INTS_LIMIT // (size if isinstance(size, int) and size > 0 else 1) if self.is_torchs else BATCHES_LIMIT
        self.lists: deque[Any] = deque(maxlen=min(max(room, self.least), BATCHES_LIMIT))
        self.first: int | None = None  # the number of the batch from which on we hear of them
        self.reason: str | None = None  # why no batch's indices are known
        if state.get("_dataset_kind") == 1:
            self.reason = NO_INDICES
        elif state.get("_num_workers") and not state.get("_in_order", True):
            self.reason = NOT_IN_ORDER
        self.seen_from = 0  # batches handed out before we came
        self.loader: int | None = None
        self.epoch: int | None = None
        self.iterator = weakref.ref(iterator)
        try:
            self.dataset: Any = weakref.ref(state.get("_dataset"))
        except TypeError:  # a list
            self.dataset = None

    @property
    def next(self) -> int:
        """The number of the batch that is asked for next, as far as we have heard of them."""
        return self.lists[-1][0] + 1 if self.lists else self.first or 0

    def listen(self, state: dict[str, Any], first: int) -> bool:
        """Have what a sampler gives from batch `first` on pass into `lists`; False where somebody looks at each."""
        if self.first is not None:
            return self.is_torchs
        source: Any = state.get("_sampler_iter")
        self.first = first
        self.is_torchs = self.is_torchs and source.__class__ is GeneratorType
        if self.is_torchs:
            heard, given = tee(source)
            state["_sampler_iter"] = map(_SECOND, zip(map(self.lists.append, enumerate(heard, self.first)), given))
        return self.is_torchs

    def keep_foreign(self, number: int, indices: Any) -> None:
        """Keep what a sampler that is not torch's gave: it may fill one list anew, and batches may be of any size."""
        if number != self.next:
            self.lists.clear()
        if indices.__class__ is list:
            if len(indices) <= COPIED_LIMIT:
                indices = tuple(indices)
            elif self.lists and self.lists[-1][1] is indices:
                self.reason = REFILLED
        self.lists.append((number, indices))
        size = len(indices) if indices.__class__ in _PLAIN else 1
        while len(self.lists) > self.least and size * len(self.lists) > INTS_LIMIT:
            self.lists.popleft()

    def told(self, number: int) -> tuple[list[int] | None, int, str | None]:
        """(indices, how many samples the sampler named, why there are none) of batch `number`."""
        at = number - self.next + len(self.lists)
        if self.reason is not None or not 0 <= at < len(self.lists):
            return None, 0, self.reason or FORGOTTEN
        indices = self.lists[at][1]
        given = indices if isinstance(indices, _PLAIN) else (indices,)
        found = [int(index) for index in given if isinstance(index, Integral)]
        names = sorted({type(index).__name__ for index in given})
        return (found or None), len(given), f"its sampler gives {', '.join(names) or 'nothing'}"[:TEXT_LIMIT]


class Batches:
    """The last batches of all loaders of a process, by the serial of the iterator (`LoaderProbe`)."""

    def __init__(self) -> None:
        self.kept: dict[int, Kept] = {}
        self.look_at_each: Callable[[], None] = lambda: None  # have `asked` called from now on

    @staticmethod
    def asked(iterator: Any, indices: Any) -> None:
        """`_next_index` of an iterator returned `indices`."""
        state = iterator.__dict__
        kept: Kept | None = state.get(KEPT)
        if kept is not None and not kept.is_torchs:
            kept.keep_foreign(state.get(kept.counter) or 0, indices)

    def begins(self, iterator: Any) -> None:
        """An iterator is about to ask its sampler from the beginning: it is new, or begins a further pass."""
        kept = iterator.__dict__.get(KEPT)
        if kept is None or kept.first is not None:
            kept = iterator.__dict__[KEPT] = Kept(iterator)
        self._listen(kept, iterator, 0)  # persistent workers' counter still has the pass before

    def _listen(self, kept: Kept, iterator: Any, first: int) -> None:
        if kept.reason is None and not kept.listen(iterator.__dict__, first):
            self.look_at_each()

    def adopt(self, serial: int, iterator: Any, anew: bool = False) -> None:
        """From now on `serial` is the number of the iterator; `anew`: it is about to begin a further pass."""
        state = iterator.__dict__
        kept: Kept | None = None if anew else state.get(KEPT)
        if kept is None:
            kept = state[KEPT] = Kept(iterator)
        if not anew:
            self._listen(kept, iterator, state.get(kept.counter) or 0)
            kept.seen_from = state.get("_num_yielded") or 0
        self.kept[serial] = kept
        if len(self.kept) > ITERATORS_LIMIT:
            gone = [number for number, other in self.kept.items() if other.iterator() is None]
            del self.kept[min(gone or self.kept)]

    def known(self, serial: int, loader: int | None, epoch: int | None) -> None:
        """Which loader the iterator is of, and how often that was iterated before."""
        kept = self.kept.get(serial)
        if kept is not None:
            kept.loader, kept.epoch = loader, epoch

    def described(self, serial: int, number: int, room: int, names: int) -> dict[str, Any]:
        """What is known of the batch that was the `number`-th fetched, at most `room` indices and `names` names."""
        kept = self.kept.get(serial)
        if kept is None:
            return {"batch": None, "indices": None, "reason": FORGOTTEN}
        position = number + kept.seen_from
        indices, count, reason = kept.told(position)
        described = {"loader": kept.loader, "epoch": kept.epoch, "batch": position, "indices": indices}
        if indices is None:
            return {**described, "reason": reason}
        indices = described["indices"] = indices[: max(room, 0)]
        described["samples"] = count
        dataset = kept.dataset() if kept.dataset is not None else None
        found = [sample_name(dataset, index) for index in indices[: max(names, 0)]]
        for name, column in zip(("files", "targets"), zip(*found)):
            if any(value is not None for value in column):
                described[name] = list(column)
        return described


def sample_name(dataset: Any, index: int) -> tuple[str | None, int | str | None]:
    """(file, target) of a sample as plain lists of the data set hold them, each None where there is no such list."""
    data: Any = sys.modules["torch"].utils.data
    for _ in range(WRAPPERS_LIMIT):
        state = getattr(dataset, "__dict__", {})
        if index < 0:
            break
        if isinstance(dataset, data.Subset):
            inner = _entry(state.get("indices"), index)
            dataset, index = state.get("dataset"), int(inner) if isinstance(inner, Integral) else -1
        elif isinstance(dataset, data.ConcatDataset):
            sizes, parts = state.get("cumulative_sizes"), state.get("datasets")
            if sizes.__class__ is not list or parts.__class__ not in _PLAIN:
                break
            part = bisect_right(sizes, index)
            index -= sizes[part - 1] if part else 0
            dataset = _entry(parts, part)
        else:
            return _named(state, index)
    return None, None


def _named(state: dict[str, Any], index: int) -> tuple[str | None, int | str | None]:
    entry = next((found for found in (_entry(state.get(name), index) for name in LISTS) if found is not None), None)
    if entry is None:
        others = (_entry(value, index) for value in list(state.values())[:OTHERS_LIMIT])
        for found in others:  # one that may name a file: no text of a data set of texts
            first = found[0] if found.__class__ is tuple and len(found) else found
            is_text = first.__class__ is str
            if PATH.fullmatch(first[: TEXT_LIMIT + 1]) if is_text else isinstance(first, os.PathLike):
                entry = found
                break
    parts = entry if entry.__class__ is tuple else (entry,)
    file = next((_text(part) for part in parts if isinstance(part, (str, os.PathLike))), None)
    target = parts[1] if len(parts) > 1 else _entry(state.get("targets"), index)
    if isinstance(target, str):
        return file, _text(target)
    return file, int(target) if isinstance(target, Integral) else None


def _entry(entries: Any, index: int) -> Any:
    """What a plain list (or a range, or an array of texts) holds; None for anything else."""
    if type(entries).__module__ == "numpy" and getattr(entries, "ndim", 0) == 1 and entries.dtype.kind == "U":
        return str(entries[index]) if index < len(entries) else None
    return entries[index] if entries.__class__ in _LISTS and index < len(entries) else None


def _text(value: Any) -> str | None:
    if value.__class__ is str:
        return mask_text(value[:TEXT_LIMIT])
    return mask_text(str(value)[:TEXT_LIMIT]) if type(value).__module__.startswith("pathlib") else None


NAME = "batches"
FILE = "batches.jsonl"
BYTE_LIMIT = 8 << 20  # of a process: 24,000 to 48,000 steps of 64 samples; alarms have their own indices
EVERY_NS = 500_000_000
STEPS_AT_ONCE = 128  # of short steps 256 may end at once, and the batches of 512 are remembered
CODES = "HIq"  # two, four and eight bytes


class BatchLog:
    """Writes what `agent.batches` and `agent.steps` remember."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._file: LineFile | None = None
        self._due_ns = 0
        self._step = 0  # the batches of steps before it are written
        self._next: dict[int, int] = {}  # by iterator: lists before this batch are written
        self._code = CODES[0]
        agent.add_boundary_hook(self._at_boundary, NAME)
        self.finish = agent.guard.wrap(NAME, self._write, inject=False)

    def _at_boundary(self, row: StepRow | None, now_ns: int) -> None:
        if now_ns >= self._due_ns or (row is not None and row.step - self._step >= STEPS_AT_ONCE):
            self._due_ns = now_ns + EVERY_NS
            self._write()
            if row is not None:
                self._step = row.step + 1

    def _write(self) -> None:
        folder = self._agent.journal.folder
        if folder is None or (self._file is not None and self._file.full):
            return
        if self._file is None:
            self._file = LineFile(os.path.join(folder, FILE), BYTE_LIMIT)
        runs: list[list[int]] = []
        kept = self._agent.batches.kept
        for step, iterator, number, batches, steps in self._agent.steps.runs_since(self._step):
            self._step = step + steps
            if iterator is None or iterator not in kept:
                continue
            first = number + kept[iterator].seen_from
            if runs and runs[-1][1] == iterator and runs[-1][3] == batches:
                start, _, start_first, _, before = runs[-1]
                if step == start + before and first == start_first + before * batches:
                    runs[-1][4] += steps
                    continue
            runs.append([step, iterator, first, batches, steps])
        if not runs:
            return
        lists = [found for number in {run[1] for run in runs} for found in self._new(number, kept[number])]
        self._next = {number: at for number, at in self._next.items() if number in kept}
        self._file.write(json.dumps({"uses": runs, "lists": lists}, separators=(",", ":")))
        if self._file.full:
            self._agent.journal.write("budget", step=None, file=FILE, bytes=BYTE_LIMIT)

    def _new(self, number: int, kept: Kept) -> list[dict[str, Any]]:
        """What the sampler gave since the last time."""
        count = min(kept.next - self._next.get(number, 0), len(kept.lists))
        if count <= 0 and (kept.reason is None or number in self._next):
            return []
        self._next[number] = kept.next
        about = {"iterator": number, "loader": kept.loader, "epoch": kept.epoch, "first": kept.next - count}
        lists = [given for _, given in list(kept.lists)[-count:]]
        if kept.reason is None and lists[0].__class__ not in (list, tuple):
            lists = [(given,) for given in lists]
        if kept.reason is None and lists[0] and isinstance(lists[0][0], Integral):  # a sampler's are alike
            packed = self._packed(lists)
            if packed is not None:
                sizes = [*map(len, lists)]
                same = sizes[0] if min(sizes) == max(sizes) else sizes
                return [{**about, "sizes": same, "code": packed.typecode, "indices": b64encode(packed).decode()}]
        return [{**about, "reason": kept.reason or kept.told(kept.next - 1)[2]}]

    def _packed(self, lists: list[Any]) -> array[int] | None:
        for code in CODES[CODES.index(self._code) :]:
            try:
                packed = array(code, chain.from_iterable(lists))
            except OverflowError:
                continue
            except TypeError:
                break
            self._code = code
            if sys.byteorder == "big":
                packed.byteswap()
            return packed
        return None
