"""Replays against a simulated machine: what a program really takes without a loss, and what the replay foretells.

The machine is written down apart from the replay: a host that runs its program line by line, and streams that work off
what it launched. The program is recorded as it is, and once more without the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.model.device_losses import LOADER, SYNC, Replay
from tests.analyze.device_scenes import ADD, V100, Scene

STEPS = 8
LAUNCH, LATENCY, RETURN = 6, 8, 3  # us: of the call, from its start to the kernel's, and of a wait that is over
FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
# A line of a program: (what, us, stream). "launch" is a kernel of that length.
Line = tuple[str, int, int]
Program = Sequence[Line]


@dataclass
class Machine:
    """Runs steps and writes them down. Times are us from the start."""

    now: int = 0
    free: dict[int, int] = field(default_factory=dict)  # stream -> when its last kernel ends
    steps: list[tuple[int, int, list[tuple[str, int, int, int, int]]]] = field(default_factory=list)

    def run(self, program: Program) -> None:
        begin, seen = self.now, []
        for what, length, stream in program:
            start = self.now
            if what == "launch":
                kernel = max(start + LATENCY, self.free.get(stream, 0))
                self.free[stream] = kernel + length
                self.now += LAUNCH
                seen.append((what, start, self.now, kernel, stream))
            elif what == "wait":
                self.now = max(self.now, *self.free.values(), 0) + RETURN
                seen.append((what, start, self.now, 0, 0))
            else:
                self.now += length
                seen.append((what, start, self.now, 0, 0))
        self.steps.append((begin, self.now, seen))

    def recorded(self, program: Program) -> Replay:
        lengths = [[length for what, length, _ in program if what == "launch"]] * len(self.steps)
        scene = Scene()
        for (begin, end, seen), kernels in zip(self.steps, lengths, strict=True):
            scene.step(end - begin)
            left = iter(kernels)
            for what, start, finish, kernel, stream in seen:
                if what == "launch":
                    launch = scene.call("cudaLaunchKernel", start - begin, finish - start)
                    scene.work(ADD, kernel - begin, next(left), launch=launch, stream=stream)
                elif what == "wait":
                    scene.call("cudaDeviceSynchronize", start - begin, finish - start)
                elif what == "load":
                    scene.mark(FETCH, start - begin, finish - start)
        (found,) = analyze(scene.tables(V100)).replays
        return found


def recorded(program: Program) -> Replay:
    machine = Machine()
    for _ in range(STEPS):
        machine.run(program)
    return machine.recorded(program)


def without(program: Program, what: str) -> Program:
    return [line for line in program if line[0] != what]


work = st.one_of(
    st.tuples(st.just("launch"), st.integers(20, 400), st.just(7)),
    st.tuples(st.just("python"), st.integers(1, 200), st.just(0)),
    st.tuples(st.just("wait"), st.just(0), st.just(0)),
)
on_two_streams = st.one_of(work, st.tuples(st.just("launch"), st.integers(20, 400), st.just(8)))
load = st.tuples(st.just("load"), st.integers(20, 1000), st.just(0))


def foretold_us(found: Replay, kind: str) -> float:
    what_if = found.of(kind)
    return (what_if.mean_ns if what_if is not None else found.unchanged_mean_ns) / 1000


def _tolerance(program: Program) -> int:
    """What starting kernels takes an idle device is not known where the device was busy, and a wait returns in time."""
    return LATENCY + RETURN * sum(what == "wait" for what, _, _ in program)


@pytest.mark.parametrize(("what", "kind"), [("load", LOADER), ("wait", SYNC)])
@settings(max_examples=20, deadline=None)
@given(fetch=load, body=st.lists(work, max_size=8), last=st.integers(20, 400))
def test_on_one_stream_the_replay_foretells_the_step(
    what: str, kind: str, fetch: Line, body: list[Line], last: int
) -> None:
    program = [fetch, *body, ("launch", last, 7)]
    truth = recorded(without(program, what)).recorded_mean_ns / 1000
    foretold = foretold_us(recorded(program), kind)
    assert foretold == pytest.approx(truth, abs=_tolerance(program))


@pytest.mark.parametrize(("what", "kind"), [("load", LOADER), ("wait", SYNC)])
@settings(max_examples=20, deadline=None)
@given(fetch=load, body=st.lists(on_two_streams, max_size=8), last=st.integers(20, 400))
def test_on_two_streams_the_replay_never_foretells_a_longer_step(
    what: str, kind: str, fetch: Line, body: list[Line], last: int
) -> None:
    program = [fetch, *body, ("launch", last, 7)]
    truth = recorded(without(program, what)).recorded_mean_ns / 1000
    assert foretold_us(recorded(program), kind) <= truth + _tolerance(program)
