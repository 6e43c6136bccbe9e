"""Reads runs in the background, one after the other, and keeps the last few.

Reading a large trace takes minutes and most of a machine, so it happens on one thread, tells how far it is, and is done
once: what `PreparedRuns.look` returns is complete, and pages of it are quick. A run that goes on is read again from
time to time, as a new revision, while the old one is shown.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.api import ReadOptions, Run
from stepscope.dashboard.pages import timeline
from stepscope.dashboard.server import live
from stepscope.dashboard.server.catalog import Place, opened
from stepscope.dashboard.server.security import NotReady, StillPreparing, unexpected
from stepscope.errors import StepscopeError

MOST = 60  # documents of one run


class Documents:
    """Documents by what was asked for. Different ones may be made side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, tuple[threading.Lock, list[bytes]]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """The document of `key`, made if it is not there; what `make` raises is raised, and nothing is kept."""
        with self._lock:
            making, made = self._held.setdefault(key, (threading.Lock(), []))
            self._held.move_to_end(key)
            while len(self._held) > MOST:
                self._held.popitem(last=False)
        with making:
            if not made:
                made.append(make())
            return made[0]


KEPT = 3  # runs, and as many again with a selection of steps
# Bytes of tables of all of these: with what is made of them they take 1.6 to 1.9 times as much (seven traces, of 11 to
# 212 MB of tables), so six of a large one would take gigabytes.
MOST_HELD = 256 * 2**20
# A page that needs several runs, four at most, asks for each again every second or so until all are there; until then
# none is dropped, or they would be read in turns for ever. But two such pages, and twice the bytes, are the most: a run
# beyond that is refused, and for a while not read again.
ASKED_S = 5.0
MOST_ASKED = 8
TOO_MANY = "too many or too large runs are asked for at once; look at fewer at a time"
AT_LEAST_S = 5.0  # between two readings of a run that goes on
PAUSE = 20.0  # times what the last reading took: at most a twentieth of one core is spent on following a run
RETRY_S = 10.0  # until a run that could not be read is tried again
READ, ANALYSED, DIAGNOSED = 0.6, 0.85, 0.9  # shares of the work that lie behind each stage
Key = tuple[str, tuple[int, int] | None]


class Prepared(Struct, frozen=True):
    """A run that has been read. `head` is what stands in its RunHead, `made` is told by `time.monotonic`."""

    place: Place
    run: Run
    revision: int
    head: dict[str, Any]
    signature: tuple[Any, ...]
    made: float
    took_s: float
    size: int  # bytes of its tables
    documents: Documents = field(default_factory=Documents)


class Job:
    """One reading that was asked for: how far it is, and what was known of the run when it was."""

    def __init__(self, signature: tuple[Any, ...]) -> None:
        self.signature = signature
        self.text = "Waiting for another run to be read"
        self.share: float | None = None
        self._files: dict[str, tuple[int, int]] = {}

    def tell(self, text: str, share: float | None) -> None:
        self.text, self.share = text, share

    def progress(self, name: str, done: int, size: int) -> None:
        """What readers call with a file's name, the bytes read of it and its size."""
        self._files[name] = min(done, size), size
        files = list(self._files.values())
        total = sum(size for _, size in files)
        share = sum(done for done, _ in files) / total * READ if total else None
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        self.tell(f"Reading {name}{more}", share)


class _Failed(Struct, frozen=True):
    """Why a run cannot be shown, and what was known of it when that was found."""

    error: StepscopeError
    signature: tuple[Any, ...]
    made: float
    took_s: float = 0.0


class PreparedRuns:
    """The runs that are being looked at. All methods may be called from any thread, and none of them waits."""

    def __init__(
        self,
        options: ReadOptions,
        describe: Callable[[Place, Run], dict[str, Any]],
        warm: Callable[[Place], Iterable[Callable[[], object]]],
    ) -> None:
        """`describe` makes what `Prepared.head` holds, and `warm` the pages of a run, one for each function it returns,
        while nothing else is to do."""
        self._options = options
        self._describe = describe
        self._warm = warm
        self._lock = threading.Lock()
        self._ready: OrderedDict[Key, Prepared] = OrderedDict()  # what was asked for last at its end
        self._asked: dict[Key, float] = {}  # when
        self._jobs: dict[Key, Job] = {}
        self._failed: dict[Key, _Failed] = {}
        self._revisions: Counter[str] = Counter()
        self._closed = False
        self._worker = ThreadPoolExecutor(1, "stepscope-reader")

    def look(self, place: Place, steps: tuple[int, int] | None = None) -> Prepared:
        """The run, all of it or these steps alone. What is not there yet is begun: raises `StillPreparing`, or why it
        cannot be shown."""
        key = (place.key, steps)
        with self._lock:
            self._asked[key] = time.monotonic()
            if key in self._ready:
                self._ready.move_to_end(key)
                return self._ready[key]
            failed = self._failed.get(key)
            if failed is not None and time.monotonic() - failed.made < RETRY_S:
                raise failed.error
            job = self._jobs.get(key) or self._begin(place, steps)
            raise StillPreparing(job.text, job.share)

    def refresh(self, place: Place, *, running: bool) -> bool:
        """Read a run again that has changed, if it is time to; whether a newer revision is under way.

        Only a run that was looked at is; one that goes on not more often than its last reading allows.
        """
        key: Key = (place.key, None)
        with self._lock:
            if key in self._jobs:
                return True
            last = self._ready.get(key) or self._failed.get(key)
            if last is None or not place.path.is_dir() or live.signature(place.path) == last.signature:
                return False
            if running and time.monotonic() - last.made < max(AT_LEAST_S, PAUSE * last.took_s):
                return False
            self._begin(place, None)
            return True

    def revision(self, place: Place) -> int:
        """How often the run has been read."""
        with self._lock:
            return self._revisions[place.key]

    def close(self) -> None:
        """Begin nothing more."""
        self._closed = True
        self._worker.shutdown(wait=False, cancel_futures=True)

    # `_begin`, `_take` and `_drop` run inside the lock
    def _begin(self, place: Place, steps: tuple[int, int] | None) -> Job:
        job = self._jobs[place.key, steps] = Job(live.signature(place.path) if place.recorded else ())
        self._worker.submit(self._work, place, steps, job)
        return job

    def _take(self, key: Key, made: Prepared) -> None:
        if key[1] is None:
            self._revisions[key[0]] += 1
            for other in [other for other in self._ready if other[0] == key[0]]:
                del self._ready[other]  # selections of steps of the older revision
            if not self._closed:
                self._worker.submit(self._make_pages, made.place)
        self._failed.pop(key, None)
        self._ready[key] = replace(made, revision=self._revisions[key[0]])
        self._drop()

    def _drop(self) -> None:
        """Let go of the runs beyond what is kept, the longest unasked first."""
        now, held, count = time.monotonic(), 0, Counter[bool]()
        self._asked = {key: asked for key, asked in self._asked.items() if now - asked < ASKED_S}
        for number, (key, each) in enumerate(reversed(list(self._ready.items()))):
            count[key[1] is None] += 1
            held += each.size
            waited_for = key[1] is None and key in self._asked
            most, most_bytes = (MOST_ASKED, 2 * MOST_HELD) if waited_for else (KEPT, MOST_HELD)
            if number and (held > most_bytes or count[key[1] is None] > most):
                del self._ready[key]
                if waited_for:
                    self._failed[key] = _Failed(NotReady(TOO_MANY), each.signature, now)

    def _work(self, place: Place, steps: tuple[int, int] | None, job: Job) -> None:
        from stepscope.tables.arrays import trim_memory

        key = (place.key, steps)
        made, failed = None, None
        try:
            made = self._make(place, steps, job)
        except StepscopeError as error:
            failed = error
        except Exception as error:  # noqa: BLE001 - a mistake of ours is told on the pages
            failed = StepscopeError(unexpected(error))
        with self._lock:
            del self._jobs[key]
            if made is not None:
                self._take(key, made)
            elif key in self._ready:
                # the older revision stays; it is not tried again before something changes
                self._ready[key] = replace(self._ready[key], signature=job.signature, made=time.monotonic())
            elif failed is not None:
                self._failed[key] = _Failed(failed, job.signature, time.monotonic())
        del made
        gc.collect()  # functions that call themselves hold tables in cycles, too few for Python to look soon
        trim_memory()

    def _make(self, place: Place, steps: tuple[int, int] | None, job: Job) -> Prepared:
        from stepscope.tables.schema import SCHEMAS

        begun = time.monotonic()
        job.tell("Reading the run" if steps is None else f"Reading steps {steps[0]} to {steps[1]}", None)
        run = opened(
            place, replace(self._options, keep=False, steps=steps or self._options.steps, progress=job.progress)
        )
        run.load()
        job.tell("Working out what happened", READ)
        run.analysis  # noqa: B018
        job.tell("Judging what it loses time to", ANALYSED)
        run.diagnosis  # noqa: B018
        head: dict[str, Any] = {}
        if steps is None:
            job.tell("Laying out the timeline", DIAGNOSED)
            timeline.prepare(run)
            head = self._describe(place, run)
        made = time.monotonic()
        # before the first step there is little to read: what it took is no measure of what it will take
        took_s = made - begun if head.get("steps") else 0.0
        size = sum(int(getattr(run.tables, name).estimated_size()) for name in SCHEMAS)
        return Prepared(place, run, 0, head, job.signature, made, took_s, size)

    def _make_pages(self, place: Place) -> None:
        """What will be asked for next. A reading goes first; of a run that goes on, pages are soon out of date."""
        if place.recorded and live.standing(place.path).state == live.RUNNING:
            return
        for make in self._warm(place):
            if self._jobs or self._closed or (place.key, None) not in self._ready:
                return
            make()
