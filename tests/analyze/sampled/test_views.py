"""The views of sampled stacks together, the loop where no step is known, and the wait for the loader taken apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope import tables
from stepscope.analyze import Context, Facts
from stepscope.analyze.host.hotspots import idle_sampled
from stepscope.analyze.host.sampled_time import sampled_loop
from stepscope.analyze.input import loader_waits
from stepscope.engine.call_tree import UserPaths
from stepscope.model.sampled import LoaderWait, SampledViews
from stepscope.read.sampled_files import read_stack_files
from tests.builders import MS, PID, T0, make_tables, step_rows
from tests.records import replace

SAMPLERS = Path(__file__).resolve().parents[4] / "shared" / "traces" / "py_spy"
needs_samples = pytest.mark.skipif(not SAMPLERS.is_dir(), reason=f"the real samples are not at {SAMPLERS}")
TRAIN = "/home/user/project/train.py"
LOADER = "torch/utils/data/dataloader.py"
NEXT = [f"_BaseDataLoaderIter.__next__ ({LOADER}:725)", "select (selectors.py:415)"]
BACKWARD = ["Tensor.backward (torch/_tensor.py:623)", "_engine_run_backward (torch/autograd/graph.py:979)"]


def views_of(context: Context) -> SampledViews | None:
    return Facts(context).sampled


def stack(frames: Sequence[str], samples: int, phase: str = "other", **more: Any) -> dict[str, Any]:
    return {"frames": frames, "samples": samples, "phase": phase, "start_ns": None, "end_ns": None, **more}


def at(function: str, line: int) -> str:
    return f"{function} ({TRAIN}:{line})"


def test_what_cannot_be_said_has_a_reason() -> None:
    views = views_of(Context(make_tables(stacks=[stack([at("main", 3)], 10)])))
    assert views is not None
    assert views.phases == {}
    assert (views.waits, views.slow_steps, views.rank_lines) == ((), None, None)
    no_loop = "no step is known, and no sampled stack of a main thread fetches a batch or calls a model"
    assert views.absent["phases"] == views.absent["waits"] == no_loop
    assert views.absent["slow_steps"] == "the samples of this run carry no time"
    assert views.absent["rank_lines"] == "no stack was sampled in a training loop"


def test_stacks_of_memory_have_no_views() -> None:
    tables_of = make_tables(stacks=[stack([at("main", 3)], 10)])
    in_bytes = tables_of.segments.with_columns(unit=pl.lit("bytes"))
    assert views_of(Context(replace(tables_of, segments=in_bytes))) is None


def test_everything_together_with_times() -> None:
    steps_of = [
        {"start_ns": T0 + number * 20 * MS, "wall_ns": 20 * MS, "first_batch": False, "data_wait_ns": 10 * MS}
        for number in range(50)
    ]
    train = [at("train", 31), *NEXT], [at("train", 34), *BACKWARD]
    rows = []
    for step in steps_of:
        begin = step["start_ns"]
        rows.append({"frames": train[0], "phase": "data_wait", "start_ns": begin, "end_ns": begin + 10 * MS})
        rows.append({"frames": train[1], "phase": "backward", "start_ns": begin + 10 * MS, "end_ns": begin + 20 * MS})
    stacks = [{**row, "samples": 50, "start_ns": T0, "end_ns": T0 + 1000 * MS} for row in rows[:2]]
    views = views_of(Context(make_tables(steps=steps_of, stacks=stacks, stretches=rows)))
    assert views is not None
    (wait,) = views.waits
    assert wait.simultaneous
    assert wait.wait_share == pytest.approx(0.5)
    assert wait.wait_ms_per_step == pytest.approx(10)
    assert [(part.kind, part.share) for part in wait.parts] == [("unknown", 1.0)]
    assert views.absent["slow_steps"].startswith("0 of 49 sampled steady steps are slow")
    torn = views_of(Context(make_tables(steps=steps_of, stacks=stacks, stretches=rows[1::2])))  # no wait has a time
    assert torn is not None
    assert torn.waits == ()


@needs_samples
@pytest.mark.parametrize("path", sorted(SAMPLERS.glob("*.txt")), ids=lambda path: path.name)
def test_every_real_file_has_its_views(path: Path) -> None:
    views = views_of(Context(tables.build(read_stack_files([path]))))
    assert views is not None
    assert views.slow_steps is None
    assert "slow_steps" in views.absent
    if views.phases:
        assert sum(views.phases.values()) == pytest.approx(1)
    for wait in views.waits:
        assert wait.wait_share is not None
        assert 0 < wait.wait_share <= 1
        assert sum(part.share for part in wait.parts) == pytest.approx(1)
        assert sum(part.samples for part in wait.parts) == wait.samples <= wait.loop_samples


DATA = "/home/user/project/data.py"
QUEUES = "multiprocessing/queues.py"
LOOP = [f"<module> ({TRAIN}:70)", f"train ({TRAIN}:37)"]
FETCHES = [*LOOP, f"_BaseDataLoaderIter.__next__ ({LOADER}:725)"]
TAKE = [*FETCHES, f"_MultiProcessingDataLoaderIter._try_get_data ({LOADER}:1291)", f"Queue.get ({QUEUES}:113)"]
POLL = ["_ConnectionBase.poll (multiprocessing/connection.py:257)", "_PollLikeSelector.select (selectors.py:415)"]
WAIT = [*TAKE, *POLL]
UNPACK = [*TAKE, "rebuild_storage_fd (torch/multiprocessing/reductions.py:538)"]
FETCH = ["fetch (torch/utils/data/_utils/fetch.py:54)"]
HERE = [*FETCHES, f"_SingleProcessDataLoaderIter._next_data ({LOADER}:780)", *FETCH, f"__getitem__ ({DATA}:9)"]
COMPUTE = [f"<module> ({TRAIN}:70)", f"train ({TRAIN}:40)", "Tensor.backward (torch/_tensor.py:623)"]
WORK = ["_worker_loop (torch/utils/data/_utils/worker.py:374)"]
BUSY_A = [*WORK, *FETCH, f"__getitem__ ({DATA}:9)", f"augment ({DATA}:20)"]
BUSY_B = [*WORK, *FETCH, f"__getitem__ ({DATA}:10)", "Image.open (PIL/Image.py:3)"]
STARTING = ["spawn_main (multiprocessing/spawn.py:122)", "_find_and_load (<frozen importlib._bootstrap>:1176)"]
PARKED = [*WORK, f"Queue.get ({QUEUES}:113)", *POLL]
FEED = [f"Queue._feed ({QUEUES}:231)"]
FEED_PARKED = [*FEED, "Condition.wait (threading.py:327)"]
FEED_SENDS = [*FEED, "ForkingPickler.dumps (multiprocessing/reduction.py:51)"]
PIN_LOOP = ["_pin_memory_loop (torch/utils/data/_utils/pin_memory.py:52)"]
PIN_PARKED = [*PIN_LOOP, f"Queue.get ({QUEUES}:113)", *POLL]
PINS = [*PIN_LOOP, "pin_memory (torch/utils/data/_utils/pin_memory.py:60)"]

MAIN = {"compute": COMPUTE, "wait": WAIT, "unpack": UNPACK, "here": HERE}
WORKER = {"a": BUSY_A, "b": BUSY_B, "idle": PARKED, "start": STARTING}
FEEDER = {"sends": FEED_SENDS, "parked": FEED_PARKED}
PINNER = {"pins": PINS, "parked": PIN_PARKED}
Tick = tuple[str, str | None, str | None, str | None, str | None]


def facts_of(context: Context, idle: bool | None = True) -> tuple[LoaderWait, ...]:
    users = UserPaths(context.calls, context.code)
    loop = sampled_loop(context, users)
    return () if loop is None else loader_waits.loader_waits(context, loop, users, idle, None)


def row(thread: str, frames: Sequence[str], **more: Any) -> dict[str, Any]:
    """A stack or stretch of "main", "worker-N", "feeder-N" (of worker N) or "pin"."""
    name, _, number = thread.partition("-")
    worker = name in ("worker", "feeder")
    pid = PID + 1 + int(number) if worker else PID
    phase = "data_wait" if FETCHES[-1] in frames else "backward"
    return {
        "frames": frames,
        "pid": pid,
        "role": "loader_worker" if worker else "rank",
        "thread": str(pid) if name in ("main", "worker") else f"{pid}{name}",
        "main_thread": name in ("main", "worker"),
        "phase": phase if name == "main" else None,
        **more,
    }


def shown(wait: LoaderWait) -> dict[tuple[str, int | None], float]:
    return {(part.kind, part.place.line if part.place else None): part.share for part in wait.parts}


def ticks_of(ticks: Sequence[Tick]) -> list[dict[str, Any]]:
    """Stretches of 10 ms each, one per thread and tick; None is a thread that was not sampled."""
    rows = []
    for number, (main, first, second, feeder, pin) in enumerate(ticks):
        when = {"start_ns": T0 + number * 10 * MS, "end_ns": T0 + (number + 1) * 10 * MS}
        rows.append(row("main", MAIN[main], **when))
        for thread, state, frames in (
            ("worker-0", first, WORKER),
            ("worker-1", second, WORKER),
            ("feeder-0", feeder, FEEDER),
            ("pin", pin, PINNER),
        ):
            if state is not None:
                rows.append(row(thread, frames[state], **when))
    return rows


def timed(ticks: Sequence[Tick], **more: Any) -> LoaderWait | None:
    rows = ticks_of(ticks)
    known = [
        {"start_ns": T0, "wall_ns": len(ticks) * 10 * MS, "first_batch": False, "data_wait_ns": 10 * len(ticks) * MS}
    ]
    stacks = [{**stretch, "start_ns": T0, "end_ns": T0 + len(ticks) * 10 * MS} for stretch in rows]
    found = facts_of(Context(make_tables(steps=known, stacks=stacks, stretches=rows, **more)))
    return found[0] if found else None


def by_hand(ticks: Sequence[Tick]) -> dict[tuple[str, int | None], float]:
    """Each tick of the main process in its loader, given to who is responsible; in ticks."""
    found: Counter[tuple[str, int | None]] = Counter()
    for main, first, second, feeder, pin in ticks:
        workers = [state for state in (first, second) if state is not None]
        busy = [state for state in workers if state in ("a", "b")]
        if main == "compute":
            continue
        if main != "wait":
            found[("transfer", None) if main == "unpack" else ("loading_here", 9)] += 1
        elif pin == "pins":
            found[("pinning", None)] += 1
        elif feeder == "sends":
            found[("transfer", None)] += 1
        elif busy:
            for state in busy:
                found[("worker_busy", 20 if state == "a" else 10)] += 1 / len(busy)
        elif "start" in workers:
            found[("worker_start", None)] += 1
        else:
            found[("workers_idle", None) if workers else ("unknown", None)] += 1
    return dict(found)


TICKS = st.lists(
    st.tuples(
        st.sampled_from(sorted(MAIN)),
        st.sampled_from([None, *sorted(WORKER)]),
        st.sampled_from([None, *sorted(WORKER)]),
        st.sampled_from([None, *sorted(FEEDER)]),
        st.sampled_from([None, *sorted(PINNER)]),
    ),
    min_size=1,
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(TICKS)
def test_at_the_same_moments_every_moment_has_one_cause(ticks: list[Tick]) -> None:
    expected, wait = by_hand(ticks), timed(ticks)
    if not expected:
        assert wait is None
        return
    assert wait is not None
    assert wait.simultaneous
    total = sum(expected.values())
    assert shown(wait) == pytest.approx({key: count / total for key, count in expected.items()})
    assert wait.wait_share == pytest.approx(total / len(ticks))
    assert sum(part.share for part in wait.parts) == pytest.approx(1)
    assert sum(part.samples for part in wait.parts) == wait.samples
    assert wait.wait_ms_per_step == pytest.approx(10 * len(ticks))
    assert sum(part.ms_per_step or 0 for part in wait.parts) == pytest.approx(10 * len(ticks))


def counted(main: dict[str, int], worker: dict[str, int], feeder: dict[str, int], **more: Any) -> list[dict[str, Any]]:
    rows = [row("main", MAIN[state], samples=count, **more) for state, count in main.items()]
    rows += [row("worker-0", WORKER[state], samples=count, **more) for state, count in worker.items()]
    return rows + [row("feeder-0", FEEDER[state], samples=count, **more) for state, count in feeder.items()]


COUNTS = st.integers(0, 300)


@settings(max_examples=40, deadline=None)
@given(
    main=st.fixed_dictionaries(dict.fromkeys(MAIN, COUNTS)),
    worker=st.fixed_dictionaries(dict.fromkeys(WORKER, COUNTS)),
    feeder=st.fixed_dictionaries(dict.fromkeys(FEEDER, COUNTS)),
    stepped=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_without_times_parts_sum_to_the_wait_in_any_order(
    main: dict[str, int], worker: dict[str, int], feeder: dict[str, int], stepped: bool, order: Any
) -> None:
    more = {} if stepped else {"start_ns": None, "end_ns": None}
    stacks = [stack for stack in counted(main, worker, feeder, **more) if stack["samples"]]
    known = step_rows(600) if stepped else []
    found = facts_of(Context(make_tables(steps=known, stacks=stacks)))
    order.shuffle(stacks)
    again = facts_of(Context(make_tables(steps=known, stacks=stacks)))
    assert [shown(wait) for wait in found] == [pytest.approx(shown(wait)) for wait in again]
    waited = main["wait"] + main["unpack"] + main["here"]
    assert len(found) == (1 if waited else 0)
    for wait in found:
        assert wait.samples == waited
        assert wait.wait_share == pytest.approx(waited / sum(main.values()))
        assert sum(part.share for part in wait.parts) == pytest.approx(1)
        assert sum(part.samples for part in wait.parts) == waited
        assert all(part.share > 0 for part in wait.parts)


def shared_context(name: str) -> Context:
    return Context(tables.build(read_stack_files([SAMPLERS / name])))


@needs_samples
def test_a_loop_bound_by_its_loader_waits_for_the_workers_line() -> None:
    context = shared_context("databound_idle.txt")
    (wait,) = facts_of(context, idle_sampled(context.tables))
    assert wait.idle_sampled is True
    assert wait.wait_share is not None
    assert 0.60 <= wait.wait_share <= 0.70
    first = wait.parts[0]
    assert first.kind == "worker_busy"
    assert first.place is not None
    assert (first.place.line, first.place.function) == (20, "augment")
    assert first.share > 0.5
    busy = sum(part.share for part in wait.parts if part.kind == "worker_busy")
    assert busy > 0.8
    assert {part.kind for part in wait.parts} <= {"worker_busy", "transfer", "workers_idle", "loading_here"}


@needs_samples
def test_the_same_loop_without_waiting_threads_says_so() -> None:
    context = shared_context("databound_active.txt")
    (wait,) = facts_of(context, idle_sampled(context.tables))
    assert wait.idle_sampled is False
    assert wait.wait_share is not None
    assert 0.03 <= wait.wait_share <= 0.06
