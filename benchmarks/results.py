"""Where results go, and what they depend on. Standard library only."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"


def put_between_markers(path: Path, name: str, text: str) -> None:
    """Replace what stands between the markers `name` of `path`; both are added where they are missing."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    old = path.read_text() if path.exists() else "# Benchmark results\n"
    if begin not in old or end not in old:
        old += f"\n{begin}\n{end}\n"
    head, _, rest = old.partition(begin)
    path.write_text(f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


def machine(*packages: str) -> dict[str, str]:
    """The processor, the interpreter, versions of `packages`, and whether anything else was running."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "processor": f"{model}, {cores()} cores to use",
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
