"""What a sweep is asked for: parameters with their ranges, one or two metrics, and how trials are chosen.

Two command lines that ask for the same thing have the same `key`, and only then is one the continuation of the other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from stepscope.errors import UsageError, refuse
from stepscope.experiment.plan import key_of
from stepscope.model.sweep import JOULES, MAXIMUM, MINIMUM, SECONDS, Objective, Parameter, Value
from stepscope.record.agent import knobs
from stepscope.schema import Knob

TPE, RANDOM, GRID = "tpe", "random", "grid"
SAMPLERS = (TPE, RANDOM, GRID)
LAST, BEST, TAIL = "last", "best", "tail"  # of a metric's curve
FIGURES = (LAST, BEST, TAIL)
TRIALS = 20  # where the user names no number; of a grid, all of it
MOST_TRIALS = 2_000
MOST_PARAMETERS = 32
MOST_CHOICES = 256
MOST_OBJECTIVES = 2  # a front of three is a surface, which no table shows
_LARGEST_WHOLE = 2**53  # beyond it floats skip whole numbers
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")
_WHOLE = re.compile(r"[+-]?\d+")
_EXAMPLE = "stepscope sweep --param arg:--lr=log:1e-5..1e-2 --metric train/loss:min -- python train.py"
_WRITTEN = "write KNOB=LOW..HIGH, KNOB=log:LOW..HIGH or KNOB=a,b,c"


class Request(Struct, frozen=True, kw_only=True):
    """One call of `stepscope sweep`. `trials` and `budget_s` do not belong to the key: more of them continue the same
    sweep. `prune_after` is in training steps, None prunes nothing."""

    command: tuple[str, ...]
    cwd: str
    params: tuple[Parameter, ...]
    objectives: tuple[Objective, ...]
    base_knobs: tuple[Knob, ...] = ()
    sampler: str = TPE
    seed: int = 0
    prune_after: int | None = None
    trials: int = TRIALS
    budget_s: float | None = None

    def __post_init__(self) -> None:
        names = [param.name for param in self.params]
        twice = next((name for name in names if names.count(name) > 1), None)
        both = next((knob.knob for knob in self.base_knobs if knob.knob in names), None)
        ranged = next((param.name for param in self.params if self.sampler == GRID and not levels(param)), None)
        metrics = [objective.name for objective in self.objectives]
        refuse(
            {
                f"no command given; write: {_EXAMPLE}": not self.command,
                "nothing to vary; add --param KNOB=LOW..HIGH or KNOB=a,b,c": not self.params,
                "no metric to judge by; add --metric NAME:min or NAME:max, such as train/loss:min": (
                    not self.objectives
                ),
                f"{len(metrics)} metrics are more than {MOST_OBJECTIVES}; leave one out": (
                    len(metrics) > MOST_OBJECTIVES
                ),
                f"--metric {metrics[0] if metrics else ''} is given twice; give it once": (
                    len(set(metrics)) < len(metrics)
                ),
                f"{len(names)} parameters are more than {MOST_PARAMETERS}; vary fewer at once": (
                    len(names) > MOST_PARAMETERS
                ),
                f"--param {twice} is given twice; give each knob once": twice is not None,
                f"{both} is in --base and in --param; leave one of them away": both is not None,
                f"--sampler {self.sampler}: there are {', '.join(SAMPLERS)}": self.sampler not in SAMPLERS,
                f"--sampler grid needs values; write --param {ranged}=a,b,c": ranged is not None,
                f"--trials {self.trials}: give a number from 1 to {MOST_TRIALS}": not 1 <= self.trials <= MOST_TRIALS,
                "--budget: give minutes, more than 0": (self.budget_s is not None and not 0 < self.budget_s < math.inf),
                f"--seed {self.seed}: give a number from 0 to 4294967295": not 0 <= self.seed < 2**32,
                f"--prune-after {self.prune_after}: give training steps, 1 or more": (
                    self.prune_after is not None and self.prune_after < 1
                ),
                "--prune-after judges by one metric; drop it, or the second --metric": (
                    self.prune_after is not None and len(metrics) > 1
                ),
                f"--prune-after judges by a metric that is logged on the way, not by {' '.join(metrics)}; drop it": (
                    self.prune_after is not None and metrics in ([SECONDS], [JOULES])
                ),
            }
        )


def key(request: Request) -> str:
    """16 hex digits that are equal for requests that ask for the same thing on the same machine."""
    return key_of(request, "trials", "budget_s")


def parameter(text: str) -> Parameter:
    """`KNOB=VALUES` of `--param`. Raises `UsageError`, one line, for what no run could be started with."""
    name, equals, values = text.partition("=")
    name, values = name.strip(), values.strip()
    if not equals or not name or not values:
        raise UsageError(f"--param {text}: not a parameter; {_WRITTEN}")
    match = _RANGE.fullmatch(values)
    if match is not None:
        found = _ranged(text, name, *match.groups())
    elif values.startswith("log:") or (".." in values and "," not in values):
        raise UsageError(f"--param {text}: not a range of numbers; {_WRITTEN}")
    else:
        found = _chosen(text, name, [each.strip() for each in values.split(",")])
    for value in found.choices or (found.low, found.high):
        knobs.check(Knob(name, shown(value)))  # type: ignore[arg-type]
    return found


def _ranged(text: str, name: str, log: str | None, first: str, last: str) -> Parameter:
    whole = _WHOLE.fullmatch(first) is not None and _WHOLE.fullmatch(last) is not None
    low, high = float(first), float(last)
    refuse(
        {
            f"--param {text}: such numbers are too large": not (math.isfinite(low) and math.isfinite(high - low)),
            f"--param {text}: the first number must be below the second": not low < high,
            f"--param {text}: a logarithm needs numbers above 0": log is not None and low <= 0,
            f"--param {text}: whole numbers beyond 2^53 cannot be told apart": (
                whole and max(abs(int(first)), abs(int(last))) > _LARGEST_WHOLE
            ),
        }
    )
    return Parameter(name, low, high, log=log is not None, whole=whole)


def _chosen(text: str, name: str, choices: Sequence[str]) -> Parameter:
    refuse(
        {
            f"--param {text}: one value is nothing to vary; set it with --base {name}={choices[0]}": len(choices) < 2,
            f"--param {text}: a value between the commas is empty": "" in choices,
            f"--param {text}: a value is given twice": len(set(choices)) < len(choices),
            f"--param {text}: more than {MOST_CHOICES} values; give fewer, or a range": len(choices) > MOST_CHOICES,
        }
    )
    return Parameter(name, choices=tuple(choices))


def objective(text: str, of: str) -> Objective:
    """`NAME:min` or `NAME:max` of `--metric`; less is better of seconds and joules, where nothing is said."""
    if of not in FIGURES:
        raise UsageError(f"--metric-of {of}: there are {', '.join(FIGURES)}")
    name, _, way = text.rpartition(":")
    if text in (SECONDS, JOULES):
        name, way = text, MINIMUM
    if not name.strip() or way not in (MINIMUM, MAXIMUM):
        raise UsageError(f"--metric {text}: say what is better, {text.rpartition(':')[0] or text}:min or :max")
    one = name in (SECONDS, JOULES)  # a figure of the run, and no curve
    return Objective(name.strip(), way, LAST if one else of)


def levels(param: Parameter) -> tuple[Value, ...]:
    """All values of a parameter, where they can be counted: its choices, or a short range of whole numbers."""
    if param.choices:
        return param.choices
    assert param.low is not None
    assert param.high is not None
    few = param.whole and param.high - param.low < MOST_CHOICES
    return tuple(range(int(param.low), int(param.high) + 1)) if few else ()


def grid(params: Iterable[Parameter]) -> list[dict[str, Value]]:
    """Every combination of levels, the first `MOST_TRIALS` of them."""
    known = list(params)
    every = itertools.islice(itertools.product(*(levels(param) for param in known)), MOST_TRIALS)
    return [dict(zip((param.name for param in known), values, strict=True)) for values in every]


def count(request: Request) -> int:
    """Trials to make: as many as are asked for, of a grid no more than it has."""
    return min(request.trials, len(grid(request.params))) if request.sampler == GRID else request.trials


def shown(value: Value) -> str:
    """A value as the command gets it: nothing of it is rounded off."""
    return value if isinstance(value, str) else f"{int(value)}" if float(value).is_integer() else repr(float(value))


def at(params: Sequence[Parameter], values: dict[str, Value]) -> tuple[Knob, ...]:
    return tuple(Knob(param.name, shown(values[param.name])) for param in params)


def label(values: dict[str, Value]) -> str:
    """A trial in few words: lr-0.0013 batch-size-16."""
    parts = []
    for name, value in values.items():
        bare = name.partition(":")[2].lstrip("-") or name
        parts.append(f"{bare}={value if isinstance(value, str) else format(value, '.3g')}")
    return " ".join(parts)
