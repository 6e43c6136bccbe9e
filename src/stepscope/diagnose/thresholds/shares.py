"""What holds for all rules: from where on a loss counts, how it is called, how sure it is."""

from __future__ import annotations

from msgspec import Struct

# Below this share of the step no finding is made: runs of the same script on one machine differ by a few percent, so
# no experiment could confirm a smaller gain. A healthy run is one without a finding above it.
REPORT_FLOOR = 0.05


class Severity(Struct, frozen=True):
    """Shares from which a finding is called a warning or critical, whatever its rule."""

    warning: float = 0.10  # where other trainers' diagnosers begin to warn about their phases
    critical: float = 0.25  # a quarter of the training time: worth stopping a running job for


SEVERITY = Severity()


class Confidence(Struct, frozen=True):
    """How much evidence a sampled share needs. n samples give a share of 10 % a standard error of 0.3 / sqrt(n)."""

    few_samples: int = 30  # +- 5 points: enough to rank, not to quote
    many_samples: int = 100  # +- 3 points


class Trace(Struct, frozen=True):
    """When a trace is too poor to be believed as it stands."""

    lost: float = 0.01  # of its events: a loss that could hide a whole kind of operator
    linked: float = 0.9  # of the device time launched in it; sound traces reach 0.99


class Causes(Struct, frozen=True):
    """When one finding explains another."""

    part: float = 0.5  # of the other's cost that lies in the cause's code, and that the cause's cost could hold: most


class Silence(Struct, frozen=True):
    """When "nothing worth fixing" may be said."""

    # of the step that nobody explained: from there on a finding of the same size would have been a warning. Healthy
    # runs left 0 to 4 %: our own sampling, the scheduler, readings that begin and end within a step
    unexplained: float = SEVERITY.warning


class Agreement(Struct, frozen=True):
    """When two sources that tell the same quantity disagree."""

    sigmas: float = 4.0  # standard errors of a sampled share: a handful of comparisons, so chance speaks in no run
    share: float = 0.10  # of the step at least: less changes neither the order of findings nor the advice
    slowed: float = 1.5  # a window's step by the steady one: profilers with stacks add a third; chosen, untuned
    utilization: float = 0.20  # NVML counts a sixth of a second to a second as busy where any kernel ran in it


CONFIDENCE = Confidence()
TRACE = Trace()
CAUSES = Causes()
AGREEMENT = Agreement()
SILENCE = Silence()
