"""stepscope finds why a PyTorch training run is slow, names the line, and proves the fix.

The names below are loaded when first used: importing the package costs nothing, imports none of torch, polars and
numpy, and works inside the training process on Python 3.8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.api import ReadOptions, Run, open_run
    from stepscope.comparing import compare
    from stepscope.notebook import display
    from stepscope.record.agent.marks import log, mark, region, step
    from stepscope.record.profile import profile
    from stepscope.reduction.run import reduce_run

__version__ = "0.1.0"

__all__ = [
    "ReadOptions",
    "Run",
    "__version__",
    "compare",
    "display",
    "log",
    "mark",
    "open_run",
    "profile",
    "reduce_run",
    "region",
    "step",
]

_HOMES = {
    "ReadOptions": "stepscope.api",
    "Run": "stepscope.api",
    "compare": "stepscope.comparing",
    "display": "stepscope.notebook",
    "load_ipython_extension": "stepscope.notebook",
    "log": "stepscope.record.agent.marks",
    "mark": "stepscope.record.agent.marks",
    "open_run": "stepscope.api",
    "profile": "stepscope.record.profile",
    "reduce_run": "stepscope.reduction.run",
    "region": "stepscope.record.agent.marks",
    "step": "stepscope.record.agent.marks",
    "unload_ipython_extension": "stepscope.notebook",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
