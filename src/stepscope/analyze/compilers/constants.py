"""The numbers the compiler views are made with, each with its reason. Thresholds of rules stand in diagnose/."""

from __future__ import annotations

# The article's rule (torch_xla's debug profiler): it speaks only after so many steps, of more compiles per step.
WARMUP_STEPS = 10  # also what we call warm-up: per process and kind of step, because evaluation compiles its own first
PER_STEP = 0.5

# The windowed rule: a storm is a compile in 3 of the last 10 steps. Chosen on four recorded sequences, not tuned.
WINDOW_STEPS = 10
WINDOW_COMPILES = 3
QUIET_STEPS = 50  # a compile after so many steps without one comes as a surprise

SLOW_COMPILE_NS = 300 * 10**9  # torch_xla's own bounds for one compilation and one execution
SLOW_EXECUTE_NS = 30 * 10**9
RING = 1024  # samples torch_xla keeps of a metric; its rates and percentiles stand on these

STEPS_SHOWN = 64  # of a cause; as many as a line of text or a small chart can hold
CHANGES_SHOWN = 64
POINTS_SHOWN = 500  # as many as a chart of that width can draw
EAGER_STEPS = 3  # a median of fewer steps is no measurement

TORCH_COMPILE = "torch.compile"
TORCH_XLA = "torch_xla"
COMPILERS = (TORCH_COMPILE, TORCH_XLA)  # other backends are devices whose copies a trace shows
TRACE = "trace"  # how sources begin that are profiler traces
COMPILATIONS = ("compile", "recompile")  # kinds that end in a compiled version
TIMED = (*COMPILATIONS, "limit_hit", "failure")  # kinds whose durations are time spent on compiling
