"""One run of an experiment: `stepscope run` around the command in a session of its own, then read and measured.

The run is a process of the public command line, so nothing that the training does reaches the experiment. It has no
terminal: stdin is empty, and what it prints goes to a file beside its folder. It ends with us, even when we are killed
(the kernel sends it SIGTERM then).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from stepscope.errors import EnvironmentRefusal, StepscopeError
from stepscope.experiment.folder import Made
from stepscope.experiment.plan import PILOT, RATE_HZ, Slot
from stepscope.model.comparison import Measure
from stepscope.model.machine import NO_PRICES, Prices
from stepscope.record.host.jsonlines import JsonLinesTail
from stepscope.record.host.processes import read_stat
from stepscope.record.host.signals import MAX_STEPS_MARKER, handled, heeded
from stepscope.schema import STEP_COLUMNS

_POLL_S = 0.2
_END_S = 15.0  # for a run to end after SIGTERM before it is killed
_CUT_S = 75.0  # for a run to end after its last step: it may write a checkpoint, and the recorder its report
NO_LIMIT = 10**9  # steps
FIRST_STEP_S = 900.0  # a command without a step by then is not one that steps can be seen of
_PR_SET_PDEATHSIG = 1
_LOG_TAIL = 65_536  # bytes of a log that are looked at
_MOST_LOG_LINE = 200
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that end an experiment
_KIND, _WALL = STEP_COLUMNS.index("kind"), STEP_COLUMNS.index("wall_ns")
_LATEST_STEPS = 50  # whose median is a step's time

# The package as it is imported here, whatever lies in the working directory: `-m` would put that first on the path.
_START = (
    "import sys; sys.path[:1] = [] if sys.path[:1] == [''] else sys.path[:1]; sys.path.append({package!r}); "
    "from stepscope.cli import main; main(sys.argv[1:])"
)


@dataclass(eq=False)
class Stopped(Exception):
    """The experiment was told to end while a run was in progress; `number` is the signal."""

    number: int


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], int | None]]:
    """Call what it yields for the signal that asked us to end, None while none did; the run in progress is then ended,
    and what is known is written. Ignored signals stay ignored (`nohup`)."""
    asked: list[int] = []
    with handled(heeded(ENDINGS), lambda number, _: asked.append(number)):
        yield lambda: asked[0] if asked else None


class StepsSeen:
    """How far a run in progress is, from the step journals it writes; what has been read is not read again.

    Counted are training steps of the rank that is furthest (evaluation steps, where there are no others), as the
    recorder counts towards its own limit.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._tails: dict[Path, JsonLinesTail] = {}
        self._counts: dict[tuple[Path, str], int] = {}
        self._walls: list[int] = []

    @property
    def count(self) -> int:
        train = [count for (_, kind), count in self._counts.items() if kind == "train"]
        return max(train or self._counts.values(), default=0)

    @property
    def step_s(self) -> float | None:
        """Median wall time of the latest steps, in seconds; None before there are any."""
        if not self._walls:
            return None
        return sorted(self._walls)[len(self._walls) // 2] / 1e9

    def look(self) -> bool:
        """Read what was added; whether there was any."""
        added = False
        with contextlib.suppress(OSError):
            for path in self._run.glob("rank-*/steps.jsonl"):
                tail = self._tails.setdefault(path, JsonLinesTail(path, list))
                for row in itertools.chain.from_iterable(iter(tail.read, [])):
                    added = self._add(path, row) or added
        return added

    def _add(self, path: Path, row: list[Any]) -> bool:
        with contextlib.suppress(IndexError):
            key, wall_ns = (path, str(row[_KIND])), row[_WALL]
            self._counts[key] = self._counts.get(key, 0) + 1
            if isinstance(wall_ns, int):
                self._walls = [*self._walls, wall_ns][-_LATEST_STEPS:]
            return True
        return False


class Order(Struct, frozen=True, kw_only=True):
    """What is to be run. `steps` end it, warm-up included, None lets it come to its own end; `seconds` end it in any
    case, None lets it take its time.

    `full` records with the default settings, windows and sampling, so that there are findings. `ends` says whether
    what has been seen of the steps is enough to end it sooner.
    """

    slot: Slot
    command: tuple[str, ...]
    folder: Path
    warmup: int
    steps: int | None
    seed: int
    seconds: float | None = None
    full: bool = False
    ends: Callable[[StepsSeen], bool] | None = None


# Makes runs; its second argument is called with the process's id and start, in ticks. Tests have one that makes none.
Runner = Callable[[Order, Callable[[int, "int | None"], None]], Made]


class Processes:
    """The runner that starts processes. `stop` is asked now and then for a signal that ends the experiment.

    At `prices` of energy and GPUs it says what the steps cost.
    """

    def __init__(self, stop: Callable[[], int | None], prices: Prices = NO_PRICES) -> None:
        self._stop, self._prices = stop, prices

    def __call__(self, order: Order, started: Callable[[int, int | None], None]) -> Made:
        """Run, read and measure. Raises `Stopped`, and `EnvironmentRefusal` where nothing can be started at all."""
        began = time.monotonic()
        status, failure = self.run(order, started)
        measure = None
        if failure is None:
            try:
                measure = measured(order, self._prices)
                failure = None if measure is not None else "no training step was seen in it"
            except StepscopeError as error:
                failure = f"cannot be read: {error}"
        number = self._stop()
        if number is not None and failure is not None:
            raise Stopped(number)  # the signal may have been what made it fail
        seen = StepsSeen(order.folder)
        seen.look()
        return Made(
            slot=order.slot,
            folder=order.folder.name,
            wall_s=time.monotonic() - began,
            measure=measure,
            failure=failure,
            length=seen.count if status == 0 else None,
        )

    def run(self, order: Order, started: Callable[[int, int | None], None]) -> tuple[int | None, str | None]:
        """(its status, None where we ended it, what went wrong with it)."""
        process = _start(order)
        try:
            stat = read_stat(process.pid)
            started(process.pid, stat.start_ticks if stat is not None else None)
            status, why = self._wait(process, order)
        except BaseException:
            end(process.pid, process)
            raise
        if status:
            how = f"signal {signal_name(-status)}" if status < 0 else f"status {status}"
            why = f"it ended with {how}"
        said = last_line(log_of(order.folder)) if why is not None else None
        return status, f"{why}: {said}" if said else why

    def _wait(self, process: subprocess.Popen[bytes], order: Order) -> tuple[int | None, str | None]:
        """(status, how it hung); no status where it was ended by the limit on steps, or by us."""
        began = time.monotonic()
        seen, told_at = StepsSeen(order.folder), None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_POLL_S)
                with contextlib.suppress(OSError):
                    # what it has left behind in its process group would compete with the next run
                    os.killpg(process.pid, signal.SIGTERM)
                return (None if told_at is not None or _reached_limit(order.folder) else status), None
            number = self._stop()
            if number is not None:
                raise Stopped(number)
            added, now = seen.look(), time.monotonic()
            if told_at is None and added and order.ends is not None and order.ends(seen):
                # as if its limit on steps were reached: its recorder then ends it with all due patience
                with contextlib.suppress(OSError):
                    for host in order.folder.glob("host-*"):
                        (host / MAX_STEPS_MARKER).touch()
                told_at = now
            if told_at is None and _reached_limit(order.folder):
                told_at = now
            late, passed_s = None, now - began
            if told_at is None and not seen.count and passed_s > FIRST_STEP_S:
                late = f"no training step was seen in {passed_s:.0f} s, so it was ended"
            elif told_at is None and order.seconds is not None and passed_s > order.seconds:
                late = f"it took far longer than other runs and was ended after {passed_s:.0f} s"
            if late is not None or (told_at is not None and now - told_at > _CUT_S):
                end(process.pid, process)
                return None, late


def run_line(order: Order) -> list[str]:
    options = ["--quiet", "--out", str(order.folder)]
    if order.steps is not None or order.ends is not None:  # `ends` is told to the recorder as if the limit were reached
        options += ["--max-steps", str(NO_LIMIT if order.steps is None else order.warmup + order.steps)]
    if not order.full:
        options += ["--no-report", "--no-window", "--rate", f"{RATE_HZ:g}"]
    for knob in order.slot.knobs:
        options += ["--knob", f"{knob.knob}={knob.value}"]
    options += ["--seed", str(order.seed)]
    import stepscope

    package = os.path.dirname(os.path.dirname(os.path.abspath(stepscope.__file__)))
    return [sys.executable, "-c", _START.format(package=package), "run", *options, "--", *order.command]


def measured(order: Order, prices: Prices = NO_PRICES) -> Measure | None:
    """The run in the order's folder as a measure; None without training steps. Raises `StepscopeError`."""
    from stepscope.analyze import analyze
    from stepscope.comparison.measure import measure
    from stepscope.read import read_run
    from stepscope.tables import build

    tables = build(read_run(order.folder))
    return measure(
        tables,
        analyze(tables, prices=prices),
        label=order.slot.label,
        path=str(order.folder),
        warmup_limit=order.warmup,
        asked=None if order.slot.phase == PILOT else order.steps,
    )


def log_of(folder: Path) -> Path:
    """What the command of the run in `folder` printed."""
    return folder.with_name(folder.name + ".log")


def last_line(log: Path) -> str | None:
    """The last line of a log that says something, cut to a readable length."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:_MOST_LOG_LINE] if said else None


def end(pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
    """Ask the run that `pid` leads to end, then end all of its process group."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        stat = read_stat(pid) if process is None else None
        if (stat is None or stat.state in "ZX") if process is None else process.poll() is not None:
            break
        time.sleep(0.05)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    if process is not None:
        process.wait()


def end_left(pid: object, start_ticks: object) -> None:
    """End what an earlier session left running, unless another process has its number by now."""
    stat = read_stat(pid) if isinstance(pid, int) and pid > 0 else None
    if isinstance(pid, int) and stat is not None and start_ticks is not None and stat.start_ticks == start_ticks:
        end(pid)


def discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        log_of(folder).unlink()


def _start(order: Order) -> subprocess.Popen[bytes]:
    # what the child does between fork and exec has all that it needs looked up before
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # we were killed in between

    try:
        order.folder.parent.mkdir(parents=True, exist_ok=True)
        with log_of(order.folder).open("wb") as log:
            return subprocess.Popen(
                run_line(order),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,
            )
    except OSError as error:
        raise EnvironmentRefusal(f"a run cannot be started in {order.folder.parent}: {error.strerror}") from None


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    return next((known.name for known in signal.Signals if known == number), str(number))


def _reached_limit(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(folder.glob(f"host-*/{MAX_STEPS_MARKER}"))
    return False
