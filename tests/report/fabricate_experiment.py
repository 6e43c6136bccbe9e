"""A made-up experiment: one candidate that wins, one without a difference, one undecided, one void."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from stepscope.dashboard import terminal
from stepscope.model.comparison import (
    AppliedKnob,
    ByHand,
    Candidate,
    Effect,
    Equivalence,
    Experiment,
    Flag,
    MainEffect,
    Measure,
    Noise,
    Outcome,
    PhaseEffect,
    PhaseTime,
    Protocol,
    Skipped,
    Tried,
    Verdict,
)
from stepscope.report import experiment_report
from stepscope.schema import Knob
from tests.records import replace

WORKERS = Knob("loader.num_workers", "2")
PERSISTENT = Knob("loader.persistent_workers", "true")
THREADS = Knob("torch.num_threads", "2")
COMMAND = ("python", "train.py", "--lr", "0.1")
REPEAT = "stepscope experiment --from findings -- python train.py --lr 0.1"


def measure(label: str, mean_ms: float, **changes: Any) -> Measure:
    """A run whose step waits for data and computes."""
    wait = max(0.4, mean_ms - 40.0)
    found = Measure(
        label=label,
        path=f"/somewhere/runs/{label}",
        steps=120,
        dropped=8,
        mean_ms=mean_ms,
        median_ms=mean_ms - 1,
        p95_ms=mean_ms * 1.3,
        samples_per_step=64.0,
        samples_per_second=64_000.0 / mean_ms,
        fixed_cost_s=2.5,
        phases=(PhaseTime("data_wait", wait), PhaseTime("forward", mean_ms - wait)),
        losses=((0, 2.3), (1, float("nan"))),
        started_ns=1_000,
    )
    return replace(found, **changes)


def pairs(before: list[float], after: list[float]) -> tuple[tuple[Measure, Measure], ...]:
    """Runs of the baseline beside runs of a candidate."""
    return tuple(
        (measure(f"{2 * number:03d}-baseline", one), measure(f"{2 * number + 1:03d}-candidate", other))
        for number, (one, other) in enumerate(zip(before, after, strict=True))
    )


def faster(**changes: Any) -> Tried:
    """Workers that take the wait away."""
    knobs = (WORKERS, PERSISTENT)
    outcome = Outcome(
        knobs=knobs,
        verdict=Verdict("faster", "faster by 38 % (95 %: 36 to 40 %), 3 pairs"),
        effects={
            "mean_ms": Effect(0.62, 0.60, 0.64, 3, 0.011, 0.0004),
            "p95_ms": Effect(0.7, 0.6, 0.8, 3, 0.05, 0.01),
        },
        phases=(
            PhaseEffect("data_wait", 21.6, 0.4, -21.2, -22.0, -20.4),
            PhaseEffect("forward", 40.0, 40.3, 0.3, -0.2, 0.8),
            PhaseEffect("optimizer", 2.0, 2.0, 0.0, None, None),
        ),
        pairs=pairs([61.6, 62.0, 61.2], [38.2, 38.4, 38.0]),
        equivalence=Equivalence(True, True, False, 0.012, 0.05, 120, "trains alike: its loss differs by 1.2 %"),
    )
    applied = (AppliedKnob("loader.num_workers", "2", True, observed="2", file="/home/me/project/train.py", line=77),)
    found = Tried(
        candidate=Candidate("workers", knobs, ceiling=0.57, finding="input.loader_bound:0"),
        outcome=outcome,
        applied=applied,
        change=("train.py:77: DataLoader(..., num_workers=2, persistent_workers=True)",),
    )
    return replace(found, **changes)


def equal() -> Tried:
    """Threads that change nothing."""
    outcome = Outcome(
        knobs=(THREADS,),
        verdict=Verdict("no_difference", "no difference larger than 1.8 %, 5 pairs", resolution=0.018),
        effects={"mean_ms": Effect(1.003, 0.988, 1.018, 5, 0.012, 0.6)},
        phases=(),
        pairs=pairs([61.6, 62.0], [61.8, 62.1]),
    )
    return Tried(
        Candidate("torch.num_threads=2", (THREADS,), ceiling=0.2),
        outcome,
        (),
        ("torch.set_num_threads(2), before the training loop",),
    )


def undecided() -> Tried:
    """Noise."""
    knob = Knob("optimizer.fused", "true")
    outcome = Outcome(
        knobs=(knob,),
        verdict=Verdict("undecided", "undecided: -3 % (95 %: -9 to +3 %), 3 pairs; about 4 more pairs needed", None, 4),
        effects={"mean_ms": Effect(0.97, 0.91, 1.03, 3, 0.03, 0.3)},
        phases=(),
        pairs=pairs([60.0, 64.0, 61.0], [58.0, 61.0, 62.0]),
        flags=(Flag("other_processes", "other processes took 0.4 cores", "system.jsonl", withholds=False),),
    )
    return Tried(Candidate("optimizer.fused=true", (knob,)), outcome, (), ())


def void() -> Tried:
    """A knob that could not be applied."""
    knob = Knob("compile", "true")
    outcome = Outcome(
        knobs=(knob,),
        verdict=Verdict("void", "void: compile=true was not applied: no model was called"),
        effects={},
        phases=(),
        pairs=(),
        left_out=(measure("009-compile", 60.0, knobs=(AppliedKnob("compile", "true", False, reason="no model"),)),),
        flags=(Flag("knob_not_applied", "compile=true was not applied: no model was called", "events.jsonl", True),),
    )
    return Tried(
        Candidate("compile=true", (knob,)),
        outcome,
        (AppliedKnob("compile", "true", False, reason="no model was called"),),
        (),
    )


def protocol(**changes: Any) -> Protocol:
    """Three to ten pairs of 120 steps."""
    found = Protocol(
        command=COMMAND,
        warmup_steps=20,
        measured_steps=120,
        least_pairs=3,
        most_pairs=10,
        width=0.02,
        threshold=0.01,
        loss_band=0.05,
        seed=0,
        quiet_machine=False,
        budget_s=None,
        rate_hz=5.0,
    )
    return replace(found, **changes)


BY_HAND = ByHand(
    title="A Python loop calls cross_entropy 256 times per step",
    fix="Call it once on the whole tensor.",
    file="/home/me/project/train.py",
    line=66,
    ceiling=0.61,
    finding="host.per_item_loop:0",
)


def experiment(**changes: Any) -> Experiment:
    """All of them in one experiment, whose files lie in /home/me/project."""
    found = Experiment(
        protocol=protocol(),
        baseline=tuple(measure(f"{number:03d}-baseline", 61.0 + number) for number in range(3)),
        tried=(equal(), undecided(), void(), faster()),
        skipped=(Skipped("loader.workers=4", (Knob("loader.workers", "4"),), "'loader.workers' is no knob"),),
        effects=(),
        noise=None,
        repeat=REPEAT,
        finished=True,
        runs=19,
        wall_s=402.0,
        folder="/home/me/project/stepscope-runs/experiment-1",
        cwd="/home/me/project",
    )
    return replace(found, **changes)


def screening() -> Experiment:
    """Two knobs in a design, one of which matters."""
    effects = (
        MainEffect(WORKERS, 0.66, 0.64, 0.68, 8, with_knobs=(PERSISTENT,), ceiling=0.57),
        MainEffect(THREADS, 1.01, 0.98, 1.04, 8),
    )
    return experiment(effects=effects, tried=(faster(),))


def self_test() -> Experiment:
    """The baseline against itself."""
    return experiment(
        tried=(),
        skipped=(),
        noise=Noise(0.023, 6, (("seeds", "all of them 0"),), (("governor", "powersave: the clock follows the load"),)),
    )


def hostile(text: str, folder: Path) -> Experiment:
    """An experiment whose every text is `text`."""
    knob = Knob(f"env:{text}", text)
    tried = faster()
    outcome = replace(
        tried.outcome,
        knobs=(knob,),
        verdict=Verdict("faster", text),
        flags=(Flag(text, text, text, False),),
        phases=(PhaseEffect(text, 1.0, 2.0, 1.0),),
        pairs=((measure(text, 60.0), measure(text, 40.0)),),
        equivalence=Equivalence(True, True, False, 0.0, 0.05, 1, text),
    )
    applied = (AppliedKnob(knob.knob, text, True, observed=text, file=text, line=1),)
    again = (AppliedKnob(knob.knob, text, False, reason=text),)
    return experiment(
        protocol=protocol(command=("python", text)),
        tried=(Tried(Candidate(text, (knob,), 0.3, text), outcome, (*applied, *again), (text,)),),
        skipped=(Skipped(text, (knob,), text),),
        effects=(MainEffect(knob, 0.9, 0.8, 1.0, 8),),
        noise=Noise(0.01, 6, ((text, text),), ((text, text),)),
        by_hand=(ByHand(text, text, text, 1, 0.2, text),),
        notes=(text,),
        repeat=text,
        stopped=text,
        finished=False,
        source=text,
        folder=str(folder),
        cwd=text,
    )


def shown(found: Experiment, *, width: int = 100, encoding: str = "utf-8", page: str | None = None) -> str:
    """What a terminal of that width shows of it."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    console = Console(file=stream, width=width, color_system=None)
    terminal.show_experiment(experiment_report.experiment_document(found), console, page=page)
    stream.flush()
    return raw.getvalue().decode(encoding)
