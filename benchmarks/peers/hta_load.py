"""HolisticTraceAnalysis loads one trace: `python hta_load.py TRACE RESULT`. Runs in the peers' environment.

What `TraceAnalysis(...)` does before any analysis: parse into a pandas frame, link launches with kernels by
correlation, give events their iteration.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from gauge import measure
from hta.common.trace import Trace


def load(path: str) -> dict[str, Any]:
    """One trace as rank 0, in this process."""
    trace = Trace({0: path}, "/")
    trace.load_traces(use_multiprocessing=False)
    return {"events": len(trace.get_trace(0))}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    measure(lambda: load(sys.argv[1]), sys.argv[2])
