"""Losses to torch.compile and torch_xla."""

from __future__ import annotations

from msgspec import Struct

from stepscope.diagnose.thresholds.shares import REPORT_FLOOR


class Compile(Struct, frozen=True):
    """When compiling during training counts. The rates per step of the run-level rules stand in `analyze/compilers`."""

    floor: float = REPORT_FLOOR
    close: float = 0.75  # of the limit of versions: 6 of torch's default 8; chosen, untuned
    same_cause: int = 3  # times: twice may be training and evaluation; chosen, untuned
    explained: float = 0.8  # of the lost time: what is left is no second loss; chosen, untuned
    slow_ms: float = 300_000  # one compilation; torch_xla's debug profiler warns above it
    share_warning: float = 0.20  # of the steps after warm-up; below it `compile.share` is info; chosen, untuned
    every: float = 0.8  # of the steps between first and last: then a cause is said to change "every step"
    eager: float = REPORT_FLOOR  # a median that grew by less is chance
    part: float = 0.2  # of the compilations: a smaller cause is not worth advice; chosen, untuned
    few_steps: int = 10  # fewer recorded steps make every compilation look expensive; torch_xla's own warm-up
    places_shown: int = 5
    changes_shown: int = 3


class Transfers(Struct, frozen=True):
    """When values read from the device count. They are ranked by their time: many cheap ones are no finding."""

    floor: float = REPORT_FLOOR
    per_step: float = 0.5  # over the whole run; torch_xla's debug profiler warns above it
    late_per_step: float = 1.0  # after warm-up: one logged loss per step is usual; chosen, untuned
    warmup_steps: int = 10  # torch_xla's own, of compilations


class Unlowered(Struct, frozen=True):
    """When operators that run on the host count. Any that the steps keep using: what they cost is only partly timed."""

    per_step: float = 0.1  # calls; below it an operator belongs to the preparations; chosen, untuned
    operators_shown: int = 5


class Execution(Struct, frozen=True):
    """When one execution of a compiled graph takes too long."""

    floor: float = REPORT_FLOOR
    slow_ms: float = 30_000  # torch_xla's debug profiler warns above it


COMPILE = Compile()
TRANSFERS = Transfers()
UNLOWERED = Unlowered()
EXECUTION = Execution()
