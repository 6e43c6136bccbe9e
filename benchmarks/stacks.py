"""How fast sampled stacks are read: `python benchmarks/stacks.py [--quick] [--megabytes 1000] [--rounds 3]`.

Wall time and peak memory of our reader, of complete tables, and of a straightforward Python program that parses every
line anew (peers/stacks_read.py), each in a process of its own, one after the other on the same generated file
(generate_stacks.py), in another order each round. Times leave imports out, memory has them in. All must count the
samples that the file was written with. Keep the machine idle. The result goes between markers of benchmarks/RESULTS.md,
except with --quick.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from generate_stacks import generate
from results import RESULTS, machine, put_between_markers

HERE = Path(__file__).resolve().parent
MEMORY_BYTES = 16 * 2**30
GIVE_UP_SECONDS = 3600.0
MODES = {
    "lines": "its lines, decoded (the limit)",
    "read": "read, stack by stack",
    "build": "read into complete tables",
    "again": "every line parsed anew, all frames kept",
}
LIMIT_READ_MB, LIMIT_BUILD_MB = 400.0, 1200.0  # the memory that reading, and tables of a gigabyte, may take


@dataclass(frozen=True)
class Sample:
    """One run; `samples` is the sum of counts it found, None where it does not count."""

    seconds: float
    cpu_seconds: float
    peak_mb: float
    stacks: int
    samples: int | None


def run(mode: str, path: Path, out: Path) -> Sample | str:
    """Run a mode in a process of its own; says why where there is no measurement."""
    out.unlink(missing_ok=True)
    words = [sys.executable, str(HERE / "peers" / "stacks_read.py"), mode, str(out), str(path)]

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    try:
        done = subprocess.run(words, preexec_fn=bound, capture_output=True, timeout=GIVE_UP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"gave up after {GIVE_UP_SECONDS:.0f} s"
    if done.returncode or not out.exists():
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return f"failed: {said[-1][:160] if said else f'status {done.returncode}'}"
    found = json.loads(out.read_text())
    counted = found["samples"] + found.get("skipped", 0) if "samples" in found else None
    return Sample(found["seconds"], found["cpu_seconds"], found["peak_mb"], found["stacks"], counted)


def measure(path: Path, rounds: int, samples: int, folder: Path) -> dict[str, list[Sample | str]]:
    """All rounds. A mode that failed, or lost a sample, is not tried again."""
    results: dict[str, list[Sample | str]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        turn = number % len(MODES)
        for mode in (*list(MODES)[turn:], *list(MODES)[:turn]):
            if any(isinstance(result, str) for result in results[mode]):
                continue
            result = run(mode, path, folder / "result.json")
            if isinstance(result, Sample) and result.samples not in (None, samples):
                result = f"counted {result.samples} samples instead of {samples}"
            results[mode].append(result)
            print(f"round {number + 1}: {mode}: {result}", file=sys.stderr, flush=True)
    return results


def text(results: dict[str, list[Sample | str]], size_mb: float, records: int, about: dict[str, str], line: str) -> str:
    """The result as Markdown."""
    rows = [
        f"Made with `{line}`: a file of {size_mb:.0f} MB, {records} stacks of {1e3 * size_mb / records:.1f} KB."
        " Medians, in brackets the range over the rounds.",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
        "| what | seconds | MB/s | peak MB |",
        "|---|---|---|---|",
    ]
    for mode, title in MODES.items():
        good = [result for result in results[mode] if isinstance(result, Sample)]
        failed = next((result for result in results[mode] if isinstance(result, str)), None)
        if failed is not None or not good:
            rows.append(f"| {title} | {failed or 'not measured'} | – | – |")
            continue
        seconds = [sample.seconds for sample in good]
        speed = size_mb / statistics.median(seconds)
        peak = statistics.median(sample.peak_mb for sample in good)
        rows.append(f"| {title} | {ranged(seconds)} | {speed:.0f} | {peak:.0f} |")
    return "\n".join([*rows, "", *verdicts(results)])


def verdicts(results: dict[str, list[Sample | str]]) -> list[str]:
    """What the figures say: how many times as fast and as small as parsing anew, and whether limits hold."""
    good = {mode: [one for one in found if isinstance(one, Sample)] for mode, found in results.items()}
    said: list[str] = []
    for mode in ("read", "build"):
        pairs = list(zip(good["again"], good[mode], strict=False))
        if pairs:
            faster = statistics.median(peer.seconds / own.seconds for peer, own in pairs)
            smaller = statistics.median(peer.peak_mb / own.peak_mb for peer, own in pairs)
            said.append(
                f"- {MODES[mode]}: {faster:.1f} × as fast as parsing anew, which takes {smaller:.1f} × its memory"
            )
    for mode, limit in (("read", LIMIT_READ_MB), ("build", LIMIT_BUILD_MB)):
        if good[mode]:
            most = max(sample.peak_mb for sample in good[mode])
            said.append(f"- {MODES[mode]}, at most {limit:.0f} MB: {most:.0f} MB, {verdict(most <= limit)}")
    return said


def verdict(holds: bool) -> str:
    """A word for it."""
    return "holds" if holds else "missed"


def ranged(values: Sequence[float]) -> str:
    """Median and range."""
    middle = f"{statistics.median(values):.1f}"
    return middle if len(values) == 1 else f"{middle} [{min(values):.1f}, {max(values):.1f}]"


def main() -> None:
    """Generate, measure, print, keep."""
    parser = argparse.ArgumentParser(description="measure how fast files of sampled stacks are read")
    parser.add_argument("--quick", action="store_true", help="a smoke test on 20 MB: nothing is kept")
    parser.add_argument("--megabytes", type=float, default=1000, help="size of the file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the page that the result is written into")
    args = parser.parse_args()
    size_mb, rounds = (20.0, 1) if args.quick else (args.megabytes, args.rounds)
    about = machine("stepscope", "polars", "numpy")
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as name:
        folder = Path(name)
        path = folder / "stacks.raw"
        records, samples = generate(path, size_mb)
        for _ in path.open("rb"):
            pass  # from here on it is in memory for everybody
        results = measure(path, rounds, samples, folder)
        size_mb = path.stat().st_size / 1e6
    line = f"python benchmarks/stacks.py --megabytes {args.megabytes:g} --rounds {rounds}"
    report = text(results, size_mb, records, about, "python benchmarks/stacks.py --quick" if args.quick else line)
    print(report)
    if not args.quick:
        put_between_markers(args.results, "stacks", report)
        print(f"written to {args.results}", file=sys.stderr)


if __name__ == "__main__":
    main()
