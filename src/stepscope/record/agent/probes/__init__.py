"""The probes: what the agent wraps or hooks inside torch, a file per kind of event, and the table that names them.

A probe can be taken out again exactly as it went in: while the user's own profiler records stacks, all of them leave
(`ProbeSet.suspend`), so that no frame of ours appears in the user's trace.
"""

from __future__ import annotations

# (module of this package, class, what must have been imported). Installed in this order, taken out in reverse. A new
# probe is a new line here.
PROBES: tuple[tuple[str, str, str], ...] = (
    ("side_events", "SitesProbe", "torch"),
    ("loader", "LoaderProbe", "torch"),
    ("training", "AutogradProbe", "torch"),
    ("training", "OptimizerProbe", "torch"),
    ("training", "ScalerProbe", "torch"),
    ("training", "MetricsProbe", "torch"),
    ("training", "ModuleForwardProbe", "torch"),
    ("user_profiler", "ProfilerStepProbe", "torch"),
    ("side_events", "CollectorProbe", "torch"),
    ("side_events", "SavesProbe", "torch"),
    ("side_events", "ChildrenProbe", "torch"),
    ("compiles", "CompilesProbe", "torch"),
    ("side_events", "NvtxProbe", "torch"),
    ("frameworks", "TapsProbe", "torch"),  # before the next, whose wrappers may lie around the same functions
    ("frameworks", "FrameworkSeamsProbe", "torch"),
    ("user_profiler", "UserProfilerProbe", "torch"),
    ("xla", "XlaProbe", "torch_xla"),
)
