"""What an experiment is asked for, and what it is made of: candidates, runs, and how many steps each of them takes.

A `Request` is what the user typed; two command lines that ask for the same thing have the same `key`, and only then is
one the continuation of the other. A `Plan` is what the first run of the command made of it. A `Slot` is one run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from stepscope.comparison.thresholds import LEAST_PAIRS, LOSS_BAND, MOST_PAIRS, THRESHOLD, WIDTH, Limits
from stepscope.errors import UsageError, refuse
from stepscope.model.comparison import ByHand, Candidate, MainEffect, Noise, Protocol, Skipped
from stepscope.schema import Knob

FINDINGS = "findings"  # `--from findings`: of a recording that the experiment makes first

PILOT = "pilot"  # the first run: warms the page cache, finds the step time, is compared with nothing
SCREEN = "screen"  # a row of a two-level design
PAIRS = "pairs"  # a run of a block of baseline and candidates

SELF_PAIRS = 6  # of the baseline against itself, where the user names no number
# Stacks are not what is compared; at 5 Hz the recorder costs a quarter of the little it costs by default.
RATE_HZ = 5.0

MEASURED_S = 20.0  # the measured part of a run, where the steps allow it
LEAST_STEPS, MOST_STEPS = 50, 300
WARMUP_S = 5.0
LEAST_WARMUP, MOST_WARMUP = 10, 100
FEWEST_STEPS = 10  # a training shorter than this has nothing to measure
MOST_CANDIDATES = 64


class Request(Struct, frozen=True, kw_only=True):
    """One call of `stepscope experiment`. `steps`, `warmup` None: chosen from the step time that the pilot finds.

    `source` is FINDINGS, the absolute path of a run whose findings name the candidates, or None. `itself` compares the
    baseline with itself. `budget_s` does not belong to the key: more time continues the same experiment.
    """

    command: tuple[str, ...]
    cwd: str
    candidates: tuple[Candidate, ...] = ()
    source: str | None = None
    screen: bool = False
    itself: bool = False
    quiet_machine: bool = False
    base_knobs: tuple[Knob, ...] = ()
    steps: int | None = None
    warmup: int | None = None
    least_pairs: int = LEAST_PAIRS
    most_pairs: int = MOST_PAIRS
    width: float = WIDTH
    threshold: float = THRESHOLD
    loss_band: float = LOSS_BAND
    seed: int = 0
    budget_s: float | None = None

    def __post_init__(self) -> None:
        knobs = [knob.knob for candidate in self.candidates for knob in candidate.knobs]
        alone = all(len(candidate.knobs) == 1 for candidate in self.candidates) and len(set(knobs)) == len(knobs)
        too_few = f"too few; a run needs {FEWEST_STEPS} measured steps or more"
        refuse(
            {
                "no command given; write: stepscope experiment --try KNOB=VALUE -- python train.py": not self.command,
                "nothing to try; add --try KNOB=VALUE, --from RUN, --from findings or --self": (
                    not (self.candidates or self.source or self.itself)
                ),
                "--self compares the baseline with itself; drop --try, --from and --screen": (
                    self.itself and bool(self.candidates or self.source or self.screen)
                ),
                f"--pairs {self.least_pairs}:{self.most_pairs}: give MIN:MAX with 2 <= MIN <= MAX <= 100": (
                    not 2 <= self.least_pairs <= self.most_pairs <= 100
                ),
                f"--steps {self.steps}: {too_few}": self.steps is not None and self.steps < FEWEST_STEPS,
                f"--warmup {self.warmup}: {too_few}": self.warmup is not None and self.warmup < 0,
                "--budget: give minutes, more than 0": self.budget_s is not None and self.budget_s <= 0,
                "--screen switches each knob between two levels; give every --try one value, no --together": (
                    self.screen and not alone
                ),
                "--screen needs two knobs or more; give --try twice, or leave --screen away": (
                    self.screen and self.source is None and len(knobs) < 2
                ),
            }
        )


def key(request: Request, host: str | None = None) -> str:
    """16 hex digits that are equal for requests that ask for the same thing on the same machine."""
    return key_of(request, "budget_s", host=host)


def key_of(request: Struct, *without: str, host: str | None = None) -> str:
    """The key of any request; the fields named belong to none."""
    values = {name: value for name, value in msgspec.to_builtins(request).items() if name not in without}
    values["host"] = host if host is not None else os.uname().nodename
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


class Plan(Struct, frozen=True):
    """What the pilot made of a request. `run_s` is the wall time a run takes, its reading included."""

    protocol: Protocol
    candidates: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...]
    run_s: float
    design: tuple[tuple[bool, ...], ...] = ()  # of a screening: one row per run, one level per candidate
    by_hand: tuple[ByHand, ...] = ()
    notes: tuple[str, ...] = ()
    noise: Noise | None = None  # what was set and what was left as it is, without an effect


class Screened(Struct, frozen=True):
    """What came of a screening. `candidate` is what the pairs are to confirm, None where no knob helps."""

    effects: tuple[MainEffect, ...]
    candidate: Candidate | None
    skipped: tuple[Skipped, ...] = ()


class Slot(Struct, frozen=True):
    """One run to make. `candidate` is a place in the list of candidates, None the baseline; in a screening, a row of
    the design. `attempt` counts the runs made for one place in a block, from 0."""

    phase: str
    block: int
    candidate: int | None
    attempt: int
    knobs: tuple[Knob, ...]
    label: str


def candidates_of(texts: Iterable[str], *, together: bool = False) -> tuple[Candidate, ...]:
    """`--try` texts as candidates: one for each value, or with `together` one for each combination of values.

    Raises `UsageError` for a knob or value that there is not, and for one that is named twice.
    """
    groups = [_knobs_of(text) for text in texts]
    sets = [tuple(chosen) for chosen in itertools.product(*groups)] if together else [(k,) for g in groups for k in g]
    twice = _twice(group[0].knob for group in groups) if together else None
    if twice is not None:
        raise UsageError(f"--together: {twice} is given twice; give each knob once, with commas between its values")
    found = tuple(candidate_of(knobs) for knobs in sets if knobs)
    again = _twice(candidate.name for candidate in found)
    if again is not None:
        raise UsageError(f"--try {again} is given twice; give it once")
    if len(found) > MOST_CANDIDATES:
        raise UsageError(f"{len(found)} candidates are more than {MOST_CANDIDATES}; try fewer values at once")
    return found


def candidate_of(knobs: Sequence[Knob]) -> Candidate:
    """A candidate that sets `knobs` together, named after them."""
    return Candidate(name=" + ".join(f"{knob.knob}={knob.value}" for knob in knobs), knobs=tuple(knobs))


def _knobs_of(text: str) -> list[Knob]:
    """One knob per value. What is valid as a whole is never split: the values of `env:`, `arg:` and of lists of
    processors may hold commas themselves."""
    from stepscope.record.agent import knobs

    try:
        return [knobs.parse(text)]
    except UsageError:
        name, _, value = text.partition("=")
        if "," not in value:
            raise
    parts = [Knob(name.strip(), each.strip()) for each in value.split(",")]
    for part in parts:
        knobs.check(part)
    return parts


def _twice(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def sizes(request: Request, step_s: float, length: int | None) -> tuple[int, int]:
    """(warm-up limit, measured steps) of every run, for steps of `step_s` seconds.

    `length` is how many steps the command makes by itself where it ended before we did, else None: then both parts must
    fit into it. Raises `UsageError` where they cannot.
    """
    step_s = max(step_s, 1e-6)
    warmup, steps = request.warmup, request.steps
    if warmup is None:
        warmup = max(LEAST_WARMUP, min(round(WARMUP_S / step_s), MOST_WARMUP))
    if steps is None:
        steps = max(LEAST_STEPS, min(round(MEASURED_S / step_s), MOST_STEPS))
    if length is None or warmup + steps <= length:
        return warmup, steps
    if request.warmup is None:
        warmup = min(warmup, length // 4)
    if request.steps is None:
        steps = min(steps, length - warmup)
    if steps < FEWEST_STEPS or warmup + steps > length:
        asked = f"{warmup} + {steps}" if request.steps is not None else f"{warmup} + {FEWEST_STEPS}"
        raise UsageError(f"the command ends after {length} steps, fewer than {asked} to be run; let it train longer")
    return warmup, steps


def together(base: Sequence[Knob], knobs: Sequence[Knob]) -> tuple[Knob, ...]:
    """All knobs of a run: those of `base`, unless `knobs` set them otherwise, and `knobs`."""
    own = {knob.knob for knob in knobs}
    return (*(knob for knob in base if knob.knob not in own), *knobs)


def limits_of(protocol: Protocol) -> Limits:
    return Limits(protocol.threshold, protocol.width, protocol.loss_band)
