"""The probes: what the agent wraps or hooks inside torch, a file per kind of event, and the table that names them.

A probe can be taken out again exactly as it went in: while the user's own profiler records stacks, all of them leave
(`ProbeSet.suspend`), so that no frame of ours appears in the user's trace.
"""

from __future__ import annotations

# (module of this package, class). Installed in this order, taken out in reverse. A new probe is a new line here.
PROBES: tuple[tuple[str, str], ...] = (
    ("side_events", "PtracerProbe"),
    ("sites", "SitesProbe"),
    ("loader", "LoaderProbe"),
    ("training", "AutogradProbe"),
    ("training", "OptimizerProbe"),
    ("training", "ScalerProbe"),
    ("training", "ModuleForwardProbe"),
    ("user_profiler", "ProfilerStepProbe"),
    ("xla", "XlaProbe"),
    ("side_events", "CollectorProbe"),
    ("side_events", "SavesProbe"),
    ("side_events", "ChildrenProbe"),
    ("compiles", "CompilesProbe"),
    ("side_events", "NvtxProbe"),
    ("frameworks", "FrameworkSeamsProbe"),
    ("user_profiler", "UserProfilerProbe"),
)
