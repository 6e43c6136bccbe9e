"""Small texts as torch_xla writes them: reports, logs with steps, debug logs; and where the recorded ones lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepscope.read.raw import RawRun, Row
from stepscope.read.xla_files import read_xla_files

RECORDED = Path(__file__).parents[3] / ".." / "shared" / "traces" / "torch_xla"
SCALAR = "aten::_local_scalar_dense"

_PARTS = (("d", 86_400 * 10**9), ("h", 3_600 * 10**9), ("m", 60 * 10**9), ("s", 10**9), ("ms", 10**6))


def recorded(name: str) -> Path:
    """A file of the recorded runs; skips where they are not there."""
    if not RECORDED.is_dir():
        pytest.skip("the recorded torch_xla runs are not there")
    return RECORDED / name


def time_text(ns: int) -> str:
    """A time as torch_xla writes it: every part is rounded, and its whole number is taken off what follows."""
    rest, text = ns, ""
    for suffix, unit in _PARTS:
        if rest >= unit or text:
            text += f"{rest / unit:0{3 if suffix == 'ms' else 2}.0f}{suffix}"
            rest -= rest // unit * unit
    return text + f"{rest / 1000:07.3f}us"


def metric(name: str, samples: int, total: str, *, percentiles: str = "", rates: tuple[str, str] | None = None) -> str:
    """A block of a metric; `rates` are those of the value and of the samples."""
    lines = [f"Metric: {name}", f"  TotalSamples: {samples}", f"  Accumulator: {total}"]
    if rates is not None:
        lines += [f"  ValueRate: {rates[0]} / second", f"  Rate: {rates[1]} / second"]
    return "\n".join([*lines, f"  Percentiles: {percentiles or f'1%={total}; 99%={total}'}"]) + "\n"


def counter(name: str, value: int) -> str:
    """A block of a counter."""
    return f"Counter: {name}\n  Value: {value}\n"


def report(steps: int, compiles: int = 0, transfers: int = 0, operators: Mapping[str, int] | None = None) -> str:
    """A report of a run in which a compilation takes 100 ms and a transfer 1 ms and 4 bytes."""
    text = metric("LazyTracing", 10 * (steps + 1), time_text(123_456 * (steps + 1)))
    text += counter("CachedCompile", steps + 1)
    if compiles:
        text += metric("CompileTime", compiles, time_text(compiles * 100_000_000))
    if transfers:
        text += metric("InboundData", transfers, f"{4 * transfers}.00B")
        text += metric("TransferFromDeviceTime", transfers, time_text(transfers * 1_000_000))
    text += counter("MarkStep", steps) if steps else ""
    return text + "".join(counter(name, count) for name, count in (operators or {}).items() if count)


def section(step: int, text: str) -> str:
    """A section of a log of XLA_METRICS_FILE."""
    return f"[MetricsData; step={step}]\n{text}\n"


def analysis(
    kind: str, cause: str, graph: str = "abc", frames: Sequence[str] = ("<module> (/home/me/train.py:28)",)
) -> str:
    """An analysis of a debug log; `kind` is Compilation or Execution."""
    lines = [
        *("=" * 80, f"{kind} Cause", f"  {cause}", "Graph Info: ", f"  Graph Hash: {graph}"),
        *("  Number of Graph Inputs: 6", "  Number of Graph Outputs: 1", "Python Frame Triggered Execution: "),
        *(f"  {frame}" for frame in frames),
        *("-" * 80, "=" * 80),
    ]
    return "\n" + "".join(f"{kind} Analysis: {line}\n" for line in lines)


SYNC = "user torch_xla.sync"
READ = "most likely user code trying to access tensor value before torch_xla.sync"
SYNC_FRAMES = ("sync (/venv/lib/python3.11/site-packages/torch_xla/torch_xla.py:87)", "loop (/home/me/train.py:29)")


def post_analysis() -> str:
    """What follows a compilation."""
    lines = ("=" * 80, "Graph input size: 0.000044 GB", "-" * 80, "=" * 80)
    return "\nComputation hash: 5ee6\n\n" + "".join(f"Post Compilation Analysis: {line}\n" for line in lines)


def table(*rows: tuple[int, str], calls: int | None = None) -> str:
    """The table of frames that a debug log ends with: (count, frame)."""
    blocks = [f'FRAME (count={calls}):\nUnlowered Op: "xla_fallback"\n\n\n'] if calls is not None else []
    blocks += [f"FRAME (count={count}):\n  {frame}\n\n\n" for count, frame in rows]
    head = "Unlowered Op usage summary (more of these ops, lower performance)\n"
    note = "Note: _local_scalar_dense typically indicates CPU context access\n"
    return "=" * 80 + "\n" + head + note + "-" * 80 + "\n" + "".join(blocks) + "=" * 80 + "\n"


def read(folder: Path, **texts: str) -> RawRun:
    """The run of files with these texts; `__` in a name stands for a dot."""
    paths = []
    for name, text in texts.items():
        paths.append(folder / name.replace("__", "."))
        paths[-1].write_text(text)
    return read_xla_files(paths)


def events(run: RawRun, kind: str, rank: int = 0) -> list[Row]:
    """Events of a kind."""
    return [event for event in run.ranks[rank].journal if event["kind"] == kind]


def counts(run: RawRun, kind: str, by: str) -> dict[Any, int]:
    """Counts of a kind by one field."""
    found: Counter[Any] = Counter()
    for event in events(run, kind):
        found[event[by]] += event["count"]
    return dict(found)


def total_ns(found: Iterable[Row]) -> int:
    """The sum of what is known of durations."""
    return sum(event["duration_ns"] or 0 for event in found)
