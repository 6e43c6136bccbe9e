"""HolisticTraceAnalysis loads one trace and analyzes it: `hta_analyze.py TRACE RESULT`, in the peers' environment.

Its load, and of its analyses those whose figures our report holds too: time by kind, kernels, idle time, overlap of
communication, launches, queue length and copies. Nothing is drawn. One that fails on a trace is left out and named.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pandas  # noqa: F401  # imports are left out on all sides
from gauge import measure
from hta.trace_analysis import TraceAnalysis

QUIET = {"visualize": False}
ANALYSES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("get_temporal_breakdown", QUIET),
    ("get_gpu_kernel_breakdown", QUIET),
    ("get_idle_time_breakdown", {"ranks": [0], **QUIET}),
    ("get_comm_comp_overlap", QUIET),
    ("get_cuda_kernel_launch_stats", {"ranks": [0], **QUIET}),
    ("get_queue_length_summary", {"ranks": [0]}),
    ("get_memory_bw_summary", {"ranks": [0]}),
)


def analyze(path: str) -> dict[str, Any]:
    """One trace as rank 0, in this process; which analyses failed."""
    analysis = TraceAnalysis(trace_files={0: path}, trace_dir="/", include_last_profiler_step=True)
    failed = [name for name, keywords in ANALYSES if not works(getattr(analysis, name), keywords)]
    return {"failed": failed}


def works(ask: Callable[..., Any], keywords: dict[str, Any]) -> bool:
    """Whether the analysis comes to an end."""
    try:
        ask(**keywords)
    except Exception:  # noqa: BLE001  # whatever a peer raises on a trace is its own affair
        return False
    return True


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        measure(lambda: analyze(sys.argv[1]), sys.argv[2])
