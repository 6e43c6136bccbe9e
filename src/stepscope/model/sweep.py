"""A sweep: many runs of one command with other values of its parameters, what they reached, and which parameter it was.

The trial is the unit: one run of the whole command. A figure that a trial does not have is missing, and then it failed.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

SWEEP_SCHEMA = "stepscope.sweep/1"
FINISHED, PRUNED, FAILED, RUNNING = "finished", "pruned", "failed", "running"  # states of a trial
SURFACE, PED_ANOVA = "surface", "ped-anova"  # methods of importance
MINIMUM, MAXIMUM = "min", "max"
SECONDS, JOULES = "seconds", "joules"  # what is asked of a run, and is no metric of it

Value = float | int | str


class Parameter(Struct, frozen=True):
    """A knob and the values it may take: from `low` to `high`, whole numbers where `whole`, or one of `choices`.

    low (number): Least value; missing of choices.
    high (number): Largest value; missing of choices.
    """

    name: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    whole: bool = False
    choices: tuple[str, ...] = ()


class Objective(Struct, frozen=True):
    """A metric, whether less or more of it is better, and which figure of its curve counts (last, best, tail)."""

    name: str
    direction: str = MINIMUM
    of: str = "last"


class Trial(Struct, frozen=True, kw_only=True):
    """One run. `reason` says why it failed, or after how many steps it was pruned; `folder` is relative to the sweep's.

    number: Of the trial, from 0 on in order.
    value (number): Of the first metric.
    values (number): Of the metrics, in their order; none of a trial that did not finish.
    wall_s: Of the whole run, its start and its reading included.
    steps: Training steps of its first process.
    seconds (s): From the start of its first step to the end of its last.
    mean_ms: Of its steady steps.
    """

    number: int
    state: str
    params: Mapping[str, Value]
    value: float | None = None
    values: tuple[float | None, ...] = ()
    reason: str | None = None
    folder: str | None = None
    wall_s: float | None = None
    steps: int | None = None
    seconds: float | None = None
    mean_ms: float | None = None


class ParameterImportance(Struct, frozen=True):
    """What a parameter decides of a metric, with its interval, and its correlation with the metric.

    importance (share): Share of the metric's variation, over the values searched, that the parameter decides alone and
        in pairs; of 50 trials or more, how differently the best tenth lies in it (PED-ANOVA), by the sum of all.
    low (share): Lower end of the interval that holds 95 % of what trials drawn anew give.
    high (share): Its upper end.
    pearson (number): Correlation of parameter and metric, from -1 to 1, of a logarithmic range on its log; missing of a
        constant and of choices that are no numbers.
    spearman (number): The same of their ranks.
    """

    param: str
    importance: float
    low: float
    high: float
    pearson: float | None = None
    spearman: float | None = None


class Pair(Struct, frozen=True):
    """What two parameters decide together.

    share: Of the metric's variation, beyond what each decides alone.
    """

    first: str
    second: str
    share: float


class Contour(Struct, frozen=True):
    """The metric over the first pair, by the surface that is fitted to the trials, the mean over all other parameters.

    The first pair is the one that decides most together, or else the two most important parameters.

    x (number): Values of `first`, in order.
    y (number): Values of `second`, in order.
    values (number): The metric, a row for each value of y.
    explained (share): Share of the metric's variation over the trials that the surface explains.
    """

    first: str
    second: str
    x: tuple[Value, ...]
    y: tuple[Value, ...]
    values: tuple[tuple[float, ...], ...]
    explained: float


class Importance(Struct, frozen=True, kw_only=True):
    """Which parameters decide a metric, the most important first, of `trials` that finished.

    `important` are those that gain more than the same values dealt out anew do. `note` says why nothing is ranked, and
    then there is no `contour`, nor is there one of a single parameter.

    trials: Finished ones that it rests on.
    """

    metric: str
    trials: int
    method: str | None = None
    rows: tuple[ParameterImportance, ...] = ()
    important: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    contour: Contour | None = None
    note: str | None = None


class Sweep(Struct, frozen=True, kw_only=True):
    """What came of a sweep. `key` is that of the request; `finished` says that all trials asked for were made.

    seed: Of the choice of values, and of every trial.
    asked (count): Trials to make.
    best (number): Number of the trial that is best by the first metric.
    front (number): Numbers of the trials that no other beats in one metric without being worse in the other.
    """

    key: str
    command: tuple[str, ...]
    cwd: str
    params: tuple[Parameter, ...]
    objectives: tuple[Objective, ...]
    sampler: str
    seed: int
    asked: int
    trials: tuple[Trial, ...] = ()
    best: int | None = None
    front: tuple[int, ...] = ()
    importances: tuple[Importance, ...] = ()
    finished: bool = False
    stopped: str | None = None
    repeat: str = ""
    folder: str = ""
