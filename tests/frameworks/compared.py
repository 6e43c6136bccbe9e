"""A loop run twice, plain and recorded, and what its recording says beside what it counted of itself."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from tests.frameworks.catalogue import Loop
from tests.integration.harness import environment, run_line, run_to_end

TRUTH = "LOOP_TRUTH"  # as in loops/control.py
PHASES = ("data", "forward", "backward", "optimizer")
COLUMNS = dict(zip(PHASES, ("data_wait_ns", "forward_ns", "backward_ns", "optimizer_ns"), strict=True))
TIMINGS = re.compile(r"('\w*(?:runtime|per_second)': '?)[\d.e+-]+")


@dataclass(frozen=True)
class Run:
    """One run of a loop's script; `truth` is None where it wrote none."""

    status: int
    stdout: str
    stderr: str
    truth: dict[str, Any] | None


@dataclass(frozen=True)
class Compared:
    """Both runs of a loop. Phases and steps are compared within the recorded run, which timed itself as well."""

    plain: Run
    recorded: Run
    folder: Path

    @property
    def truth(self) -> dict[str, Any]:
        """What the recorded script counted of itself."""
        if self.recorded.truth is None:
            raise AssertionError(f"status {self.recorded.status}, and no truth:\n{self.recorded.stderr[-2000:]}")
        return self.recorded.truth

    @cached_property
    def rows(self) -> pl.DataFrame:
        """The steps of the first rank, in the order of time."""
        steps = pl.read_parquet(self.folder / "tables" / "steps.parquet")
        return steps.filter(pl.col("rank").fill_null(0) == 0).sort("start_ns")

    @cached_property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return loaded

    def steps(self, kind: str) -> pl.DataFrame:
        """The rows of one kind, `train` or `eval`."""
        return self.rows.filter(pl.col("kind") == kind)

    def values(self, metric: str) -> pl.DataFrame:
        """The values of a metric of the first rank, in the order of time."""
        metrics = pl.read_parquet(self.folder / "tables" / "metrics.parquet")
        return metrics.filter((pl.col("rank") == 0) & (pl.col("name") == metric)).sort("time_ns")

    def by_step(self, metric: str, *, holds: bool = False) -> list[float | None]:
        """The last value in each trained step; with `holds` that of an earlier one where the step has none."""
        values = self.values(metric).group_by("step").agg(pl.col("value").last())
        joined = self.steps("train").select("step").join(values, on="step", how="left", maintain_order="left")["value"]
        return (joined.forward_fill() if holds else joined).to_list()

    @property
    def samples(self) -> tuple[list[int | None], list[int | None]]:
        """Samples of each trained and of each evaluation step."""
        trained, evaluated = (self.steps(kind)["samples"].to_list() for kind in ("train", "eval"))
        return trained, evaluated

    @property
    def framework_step(self) -> int | None:
        """The framework's number of the last trained step; None where the recording has none."""
        if "framework_step" not in self.rows.columns:
            return None
        known = self.steps("train")["framework_step"].drop_nulls().to_list()
        return known[-1] if known else None

    @property
    def points(self) -> dict[str, float]:
        """Each phase's difference from the time taken by hand, in points of all that was timed by hand.

        Windows open and close between two steps of ours, which for a hand is in the middle of a call: steps next to
        those of a window are left out.
        """
        trained = self.steps("train")
        windows = [0, *trained["in_window"].to_list(), 0]
        by_hand = self.truth["seconds"]
        apart = [step for step in range(min(len(trained), len(by_hand))) if not any(windows[step : step + 3])]
        whole = sum(sum(by_hand[step].values()) for step in apart)
        ours = {name: trained[COLUMNS[name]].gather(apart).sum() / 1e9 for name in PHASES}
        return {name: (ours[name] - sum(by_hand[step][name] for step in apart)) / whole * 100 for name in PHASES}

    @property
    def worst_points(self) -> float:
        return max(abs(points) for points in self.points.values())

    @property
    def step_ratio(self) -> float | None:
        """Median trained step, ours over that timed by hand; None without one."""
        median = self.steps("train")["wall_ns"].median()
        return None if median is None else float(median) / 1e9 / self.truth["median_step_s"]  # type: ignore[arg-type]

    @property
    def first_finding(self) -> str:
        """What the report says first, in a few words."""
        findings = sorted(self.report["findings"], key=lambda finding: -finding["cost_ms_per_step"])
        if not findings:
            return "none"
        first, where = findings[0], findings[0]["where"]
        place = f", {Path(where[0]['file']).name}:{where[0]['line']}" if where else ""
        return f"{first['rule']} {first['share'] * 100:.0f} %{place}"

    @property
    def problems(self) -> list[str]:
        """Everything in which the recording differs from the truth, or the recorded run from the plain one."""
        truth, (trained, evaluated) = self.truth, self.samples
        found = []
        if len(trained) != truth["steps"]:
            found.append("steps")
        if truth["evaluated"] is not None and len(evaluated) != len(truth["evaluated"]):
            found.append("evaluation")
        if (truth["samples"] is not None and trained != truth["samples"]) or (
            truth["evaluated"] is not None and evaluated != truth["evaluated"]
        ):
            found.append("samples")
        if self.worst_points > 5:
            found.append("phases")
        if truth["framework_step"] is not None and self.framework_step != truth["framework_step"]:
            found.append("framework step")
        return found + self.changes

    @property
    def changes(self) -> list[str]:
        """What the recording changed of the run."""
        changed = []
        if self.plain.status or self.recorded.status:
            changed.append(f"status {self.recorded.status}, plain {self.plain.status}")
        if self.plain.truth is None or self.plain.truth["loss"] != self.truth["loss"]:
            changed.append("loss")
        if untimed(self.plain.stdout) != untimed(self.recorded.stdout):
            changed.append("stdout")
        return changed


def untimed(text: str) -> str:
    """What a loop printed, without timings."""
    return TIMINGS.sub(r"\1…", text)


def compare(loop: Loop, python: Path, folder: Path) -> Compared:
    """Run `loop` plain and recorded, everything it leaves below `folder`, which must be empty."""
    command = loop.command(python)
    out = folder / "run"
    plain = _run(command, folder, "plain")
    return Compared(plain, _run(run_line(out, command), folder, "recorded"), out)


def _run(line: list[str], folder: Path, name: str) -> Run:
    truth = folder / f"{name}.json"
    done: subprocess.CompletedProcess[bytes] = run_to_end(line, folder, environment({TRUTH: str(truth)}))
    told = json.loads(truth.read_text()) if truth.exists() else None
    return Run(done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace"), told)
