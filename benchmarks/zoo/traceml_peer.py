"""TraceML on the same scripts: its own environment, its own launcher, what it says first. Standard library only.

Each script is wrapped as its documentation asks for plain PyTorch (`init(mode="auto")`, the step inside
`trace_step(model)`, and `wrap_dataloader_fetch` around a loop that has no DataLoader, see `common.py`) and started by
`traceml run`. What it says first is the primary diagnosis of its `final_summary.json`. Its environment sees our
packages behind its own, so that both watch the same PyTorch.
"""

from __future__ import annotations

import json
import site
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REQUIREMENT = "traceml-ai==0.5.0"

# Its diagnoses in our categories, as its documentation explains them. One that covers several is right for each.
CATEGORIES: dict[str, tuple[str, ...]] = {
    "INPUT_BOUND": ("input",),
    "INPUT_STRAGGLER": ("input", "communication"),
    "H2D_BOUND": ("transfer",),
    "H2D_STRAGGLER": ("transfer", "communication"),
    "COMPUTE_BOUND": ("compute",),
    "COMPUTE_STRAGGLER": ("compute", "communication"),
    "STRAGGLER": ("communication",),
    # "logging, checkpointing, validation, CPU stalls, or unobserved work"
    "RESIDUAL_HEAVY": ("host", "io", "sync", "system"),
    "LOW_GPU_UTILIZATION_UNEXPLAINED": (),
    "NO_CLEAR_PERFORMANCE_BOTTLENECK": (),
    "INSUFFICIENT_STEP_TIME_DATA": (),
}
# What it may say of a clean script: that it computes, or that it sees nothing.
HEALTHY = ("COMPUTE_BOUND", "NO_CLEAR_PERFORMANCE_BOTTLENECK", "INSUFFICIENT_STEP_TIME_DATA")


@dataclass(frozen=True)
class Said:
    """Its primary diagnosis, or why there is none."""

    kind: str | None
    severity: str | None = None
    problem: str = ""

    def right(self, expected: Sequence[str] | None) -> bool | None:
        """Whether the category is right, or on a clean script nothing but computing is blamed; None if not run."""
        if self.kind is None:
            return None
        if expected is None:
            return self.kind in HEALTHY
        return any(category in expected for category in CATEGORIES.get(self.kind, ()))


def environment(folder: Path) -> tuple[Path | None, str]:
    """The launcher inside an environment made in `folder` once, and why there is none otherwise."""
    stamp, launcher = folder / "complete", folder / "bin" / "traceml"
    if not (stamp.exists() and stamp.read_text() == REQUIREMENT):
        print(f"installing {REQUIREMENT} into {folder}", file=sys.stderr, flush=True)
        python = str(folder / "bin" / "python")
        made = ([sys.executable, "-m", "venv", "--clear", str(folder)],)
        installed = ([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", REQUIREMENT],)
        for command in made + installed:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return None, f"{REQUIREMENT} could not be installed: {_last_line(done.stderr)}"
        own = next(folder.glob("lib/python*/site-packages"))
        (own / "recorded_environment.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        stamp.write_text(REQUIREMENT)
    check = [str(folder / "bin" / "python"), "-c", "import torch, traceml_ai"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    if done.returncode:
        return None, f"{REQUIREMENT} cannot be imported: {_last_line(done.stderr)}"
    return launcher, ""


def command(launcher: Path, script: Path, arguments: Sequence[str], ranks: int, logs: Path) -> list[str]:
    """The command line for one script; `logs` is a folder that does not hold a run yet."""
    several = ["--nproc-per-node", str(ranks)] if ranks > 1 else []
    line = [str(launcher), "run", "--mode", "summary", "--logs-dir", str(logs), "--run-name", "run", *several]
    return [*line, str(script), *(["--args", *arguments] if arguments else [])]


def said(logs: Path) -> Said:
    """What the summary under `logs` says first."""
    found = sorted(logs.rglob("final_summary.json"))
    if not found:
        return Said(None, problem="it wrote no final_summary.json")
    try:
        primary = json.loads(found[0].read_text())["primary_diagnosis"]
        return Said(str(primary["kind"]), str(primary.get("severity")))
    except (ValueError, KeyError, TypeError) as error:
        return Said(None, problem=f"its final_summary.json has no primary diagnosis ({error!r})")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
