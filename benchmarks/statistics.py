#!/usr/bin/env python
"""How often comparisons are wrong where the truth is known: our way, and naive ways beside it.

    python benchmarks/statistics.py            # about three minutes on one core; writes its section of RESULTS.md
    python benchmarks/statistics.py --print    # to the terminal alone

Everything is simulated with fixed seeds (`simulation.py` has the noise), so the figures are the same on every machine.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path


def _pythons_own() -> None:
    """Scripts of this folder that import Python's own `statistics` find this file first: give them what they want."""
    path = Path(sysconfig.get_path("stdlib")) / "statistics.py"
    spec = importlib.util.spec_from_file_location("statistics", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["statistics"] = module
    spec.loader.exec_module(module)


if __name__ == "statistics":
    _pythons_own()
elif __name__ == "__main__":
    import simulation_report

    simulation_report.main(sys.argv[1:])
