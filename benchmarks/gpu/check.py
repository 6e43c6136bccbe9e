"""Checks stepscope on the CUDA device of this machine: `make gpu`, or `python benchmarks/gpu/check.py [--out DIR]`.

Four parts, each within its share of eight minutes: device figures against arithmetic and events (`truth`), planted
costs and their twins (`zoo`), knobs through `stepscope experiment` (`knobs`), what recording costs (`cost`). It prints
a table with pass and fail, writes it with its figures to DIR/gpu.json, and keeps small recordings in DIR/recordings. It
installs nothing: torch and stepscope are those of the Python that runs it. What fails makes a row, never a traceback.

Without a CUDA device it says so and exits with 4. `--device cpu` runs everything on the CPU for a few steps, to try the
plumbing: its figures mean nothing. `--fake` judges a made-up trace of known times, without torch.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

from turn import TURN, leave_core_free  # noqa: E402 - found by the line above

TOLERANCE = 0.02  # of device figures
NVML_GRAIN = 10  # percent
# What ncu counts of a kernel. Ours are estimates: a launch's occupancy takes every warp to last as long as its kernel,
# those that load for others end early (0.73 of it was counted); and multiprocessors run out of blocks at the end.
COUNTERS = {
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "SM efficiency": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
}
TENSOR_PIPE_PCT = 5.0  # kernels without products were seen at 1.4
OCCUPANCY, SM_POINTS = (0.98, 1.5), 15.0
CLEAN = 0.10  # share of the step from which a finding on a clean script is a false alarm, as in the zoo
RECORDING_SHARE, RECORDING_US = 0.01, 30.0  # of a step, whichever is more
MOST_BYTES = 2_000_000  # of a recording that is kept
KEPT = ("host-*/manifest.json", "rank-0/rank.json", "rank-0/steps.jsonl", "rank-0/events.jsonl", "rank-0/trace-*")
TWIN = "twin.json"  # in a recording: mean ms of a step, planted and without, by the script's own clock
BUDGET_S = {"truth": 45.0, "zoo": 220.0, "cost": 95.0, "knobs": 110.0}  # together below eight minutes
LONG = 6.0  # times as long
AT_ONCE = 4  # processes; one of them has the device, the others import or report
ENVIRON = {"POLARS_MAX_THREADS": "2"}  # reports beside what is timed
TURNS = 3  # of each way to record a loop
PASS, FAIL, SKIP = "pass", "FAIL", "-"
NO_DEVICE = 4


@dataclass(frozen=True)
class Row:
    """A line of the table: what was checked, what was found, what was expected, and whether that agrees."""

    part: str
    name: str
    found: str
    expected: str
    verdict: str


@dataclass(frozen=True)
class Setting:
    """Where things are written, what they run on, and when a part must be over."""

    out: Path
    device: str
    end: float = 0.0
    long: bool = False

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    def steps(self, count: int) -> int:
        return 30 if self.small else count

    def left(self) -> float:
        return max(1.0, self.end - time.monotonic())


class Failed(Exception):
    """A process did not do what it was started for."""


def start(setting: Setting, *words: str, environ: Mapping[str, str] = {}) -> str:
    """Run Python with `words` in the output folder; its stdout. Raises `Failed` with its last line."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=setting.out, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **ENVIRON, **environ, TURN: str(setting.out / "turn")},
    )  # fmt: skip
    try:
        said, complained = process.communicate(timeout=setting.left())
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children as well, which hold the pipes
        process.communicate()
        raise Failed("out of time") from None
    if process.returncode != 0:
        last = (complained.strip() or said.strip() or "no output").splitlines()[-1]
        raise Failed(f"status {process.returncode}: {last[:120]}")
    return said


def record(setting: Setting, name: str, *words: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """The report of Python with `words` under `stepscope run`; what an analysis needs is kept where it is small."""
    folder = setting.out / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    report = setting.out / "runs" / f"{name}.json"
    line = ["-m", "stepscope", "run", "--quiet", "--out", str(folder), "--json", str(report), "--force", *options]
    start(setting, *line, "--", sys.executable, *words)
    kept = setting.out / "recordings" / name
    shutil.rmtree(kept, ignore_errors=True)
    parts = [part for pattern in KEPT for part in sorted(folder.glob(pattern))[:1]]
    if sum(part.stat().st_size for part in parts) < MOST_BYTES:
        for part in parts:
            (kept / part.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(part, kept / part.relative_to(folder))
    document: dict[str, Any] = json.loads(report.read_text())
    return document


def within(found: float | None, truth: float, tolerance: float = TOLERANCE) -> str:
    return FAIL if found is None or not truth or abs(found / truth - 1) > tolerance else PASS


# ------------------------------------------------------------------------------------------------- device figures


def truth(setting: Setting) -> Iterator[Row]:
    """Our durations beside those of events; FLOP/s, bandwidth and tensor cores by arithmetic."""
    told = setting.out / "truth.json"
    words = (str(HERE / "work.py"), str(told), "--device", setting.device, "--steps", str(setting.steps(40)))
    report = record(setting, "truth", *words, options=("--window", "skip_first=3,active=4"))
    folder = setting.out / "runs" / "truth"
    tables = {name: table(setting, folder, name) for name in ("operators", "kernels")}
    known = of_steps(json.loads(told.read_text()), recorded_steps(folder))
    if (kept := setting.out / "recordings" / "truth").exists():
        (kept / told.name).write_text(json.dumps(known))
    yield from judge_work(known["cases"], tables, cpu=setting.small)
    yield from judge_gpu(report, known)
    yield from counters(setting, tables["kernels"])


def recorded_steps(folder: Path) -> slice:
    """The steps of the first window of a run."""
    events = (json.loads(line) for line in (folder / "rank-0" / "events.jsonl").read_text().splitlines())
    window = next(event for event in events if event["kind"] == "window" and event["trace"])
    return slice(window["first_step"], window["first_step"] + window["steps"])


def of_steps(known: dict[str, Any], steps: slice) -> dict[str, Any]:
    """What is known of some steps: the mean of a case, the median of a step, one of which has the profiler's end."""
    for case in known["cases"].values():
        case["us"] = mean(case["us"][steps])
    for key in ("step_us", "other_us"):
        known["about"][key] = median(known["about"][key][steps])
    return known


def table(setting: Setting, folder: Path, name: str) -> list[dict[str, Any]]:
    """A table of a run in full, operators by shapes."""
    by = ("--group", "shapes") if name == "operators" else ()
    text = start(setting, "-m", "stepscope", "analyze", str(folder), "--table", name, *by, "--json", "-")
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    return rows


def judge_work(
    cases: Mapping[str, Mapping[str, Any]], tables: Mapping[str, list[dict[str, Any]]], *, cpu: bool = False
) -> Iterator[Row]:
    """A row for each figure of each case."""
    for name, case in cases.items():
        row = row_of(case, tables)
        if row is None:
            yield Row("truth", name, "not in the table", f"{case['us']:.1f} µs", FAIL)
            continue
        total = row["host_total_ns"] if cpu else row.get("device_total_ns", row.get("total_ns"))
        found_us = None if total is None or not row["calls"] else total / row["calls"] / 1e3
        us, most = case["us"], case.get("most_us")
        said = "no device time" if found_us is None else f"{found_us:.1f} µs"
        if most is not None:
            right = found_us is not None and 0 < found_us <= most
            yield Row("truth", f"{name}: duration", said, f"at most {most} µs", PASS if right else FAIL)
            continue
        tolerance = case.get("tolerance", TOLERANCE)
        yield Row("truth", f"{name}: duration", said, f"{us:.1f} µs by events", within(found_us, us, tolerance))
        for key, unit in (("flop", "TFLOP/s"), ("bytes", "TB/s")):
            if key in case and found_us:
                rate, expected = (case[key] / time_us / 1e6 for time_us in (found_us, us))
                yield Row(
                    "truth", f"{name}: {unit}", f"{rate:.3f}", f"{expected:.3f}", within(rate, expected, tolerance)
                )
        if "tensor_cores" in case and not cpu:
            pct = row.get("tensor_core_total_pct")
            wanted = 100.0 if case["tensor_cores"] else 0.0
            agrees = pct is not None and abs(pct - wanted) <= 100 * TOLERANCE
            yield Row("truth", f"{name}: tensor cores", percent(pct), f"{wanted:.0f} %", PASS if agrees else FAIL)


def row_of(case: Mapping[str, Any], tables: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """The row of the operator with the case's shapes, or of its kernel."""
    if "kernel" in case:
        return next((row for row in tables["kernels"] if case["kernel"] in row["name"]), None)
    shapes, prefix = case.get("shapes"), case.get("prefix", "[")
    for row in tables["operators"]:
        here = row["shapes"] or ""
        if row["name"] == case["operator"] and (here == shapes or (shapes is None and here.startswith(prefix))):
            return row
    return None


def judge_gpu(report: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Row]:
    """Shares of the device: utilisation beside what events and NVML say of kernels, the others as shares."""
    about, cases = known["about"], known["cases"]
    kernels_us = sum(about["calls"] * case["us"] for name, case in cases.items() if not name.startswith("copy"))
    for gpu in report["views"].get("gpus") or ():
        for key in ("sm_efficiency_pct", "achieved_occupancy_pct", "tensor_core_pct"):
            value = gpu[key]
            right = value is not None and 0 < value <= 100
            yield Row("truth", f"GPU: {key}", percent(value), "above 0, at most 100", PASS if right else FAIL)
        busy, nvml = gpu["utilization_pct"], about.get("nvml_busy_pct")
        expected = 100 * (kernels_us + about["other_us"]) / about["step_us"]
        right = busy is not None and abs(busy - expected) <= 100 * TOLERANCE
        said = f"{expected:.1f} % by events"
        yield Row("truth", "GPU: utilization_pct", percent(busy), said, PASS if right else FAIL)
        if nvml is not None and busy is not None:
            # NVML counts a sample period as busy in which any kernel ran: never below ours by more than its grain
            right = busy <= nvml + NVML_GRAIN
            yield Row("truth", "GPU: NVML", percent(busy), f"at most {nvml:.0f} % + 10", PASS if right else FAIL)


def percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f} %"


def counters(setting: Setting, kernels: list[dict[str, Any]]) -> Iterator[Row]:
    """What hardware counters say of every kernel that the table names too, where ncu may read them."""
    if setting.small or shutil.which("ncu") is None:
        return
    line = ["ncu", "--clock-control", "none", "--csv", "--metrics", ",".join(COUNTERS.values())]
    work = [sys.executable, str(HERE / "work.py"), os.devnull, "--once"]
    done = subprocess.run(
        [*line, *work], capture_output=True, text=True, timeout=setting.left(), cwd=setting.out, check=False
    )
    lines = done.stdout.splitlines()
    first = next((number for number, text in enumerate(lines) if text.startswith('"ID"')), None)
    if first is None:
        yield Row("truth", "counters", (done.stdout.strip() or "no output").splitlines()[-1][:80], "by ncu", SKIP)
        return
    counted: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines[first:]):
        value = float(row["Metric Value"].replace(",", ""))
        counted.setdefault(row["Kernel Name"], {})[row["Metric Name"]] = value
    for name, values in counted.items():
        kernel = next((one for one in kernels if one["name"].startswith(name.split("(")[0])), None)
        if kernel is None:  # of what prepares the cases
            continue
        short = kernel["short_name"][:40]
        tensor = values[COUNTERS["tensor cores"]] > TENSOR_PIPE_PCT
        verdict = PASS if bool(kernel["tensor_cores"]) == tensor else FAIL
        yield Row("truth", f"{short}: tensor cores", str(bool(kernel["tensor_cores"])), f"{tensor} by ncu", verdict)
        blocks, active = kernel["blocks_per_sm"], values[COUNTERS["SM efficiency"]]
        if blocks is not None and blocks >= 0.5:  # smaller ones have ended before all multiprocessors began
            ours, theirs = kernel["occupancy_pct"], values[COUNTERS["occupancy"]] * active / 100  # of all, as ours
            verdict = PASS if ours is not None and OCCUPANCY[0] <= ours / theirs <= OCCUPANCY[1] else FAIL
            yield Row("truth", f"{short}: occupancy", percent(ours), f"{theirs:.1f} % by ncu", verdict)
            ours = 100 * min(1.0, blocks)
            verdict = PASS if abs(ours - active) <= SM_POINTS else FAIL
            yield Row("truth", f"{short}: SM efficiency", percent(ours), f"{active:.1f} % by ncu", verdict)


# ------------------------------------------------------------------------------------------------------------- zoo


def zoo(setting: Setting) -> Iterator[Row]:
    """First finding, line and ceiling of every planted cost; silence on clean scripts."""
    from cases import CASES

    scored = {"first finding": 0, "line": 0, "ceiling": 0}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        timed = pool.submit(start, setting, *case_words(setting, "twins"))  # first, as it takes longest
        recorded = {name: pool.submit(record, setting, f"zoo-{name}", *case_words(setting, name)) for name in CASES}
        for name, (_case, expected) in CASES.items():
            try:
                report = recorded[name].result()
                if expected is None:
                    yield silent(name, report)
                    continue
                times = json.loads(timed.result())[name]
            except (Failed, OSError, ValueError, KeyError) as error:
                yield Row("zoo", name, str(error)[:100], "", FAIL)
                continue
            if (kept := setting.out / "recordings" / f"zoo-{name}").exists():
                (kept / TWIN).write_text(json.dumps(times))
            for key, row in judge_case(name, report, expected, 1 - times[1] / times[0]).items():
                scored[key] += row.verdict == PASS
                yield row
    for key, least in (("first finding", 11), ("line", 11), ("ceiling", 12)):
        yield Row("zoo", f"{key}, of 13", str(scored[key]), f"at least {least}", PASS if scored[key] >= least else FAIL)


def case_words(setting: Setting, name: str) -> tuple[str, ...]:
    small = ("--small",) if setting.small else ()
    return (str(HERE / "cases.py"), name, "--device", setting.device, "--steps", str(setting.steps(120)), *small)


def judge_case(name: str, report: Mapping[str, Any], expected: tuple[str, ...], saved: float) -> dict[str, Row]:
    """Of a planted cost: is it found first, at its line, and does the ceiling cover what the twin saves?"""
    lines = planted_lines(name)
    findings = sorted(report["findings"], key=lambda finding: -finding["cost_ms_per_step"])
    first = findings[0] if findings else None
    right = first is not None and first["category"] in expected
    places = [(place["file"].rpartition("/")[2], place["line"]) for place in (first or {"where": ()})["where"]]
    there = any(file == "cases.py" and at in lines for file, at in places)
    ceiling = next((one["gain_ceiling"] for one in findings if one["category"] in expected), None)
    holds = ceiling is not None and ceiling >= saved - TOLERANCE
    said = first["rule"] if first else "nothing"
    at = ", ".join(f"{file}:{number}" for file, number in places[:3]) or "no line"
    top = "none" if ceiling is None else f"{100 * ceiling:.0f} %"
    return {
        "first finding": Row("zoo", f"{name}: first finding", said, " or ".join(expected), PASS if right else FAIL),
        "line": Row("zoo", f"{name}: line", at, f"cases.py:{lines[0]}", PASS if there else FAIL),
        "ceiling": Row(
            "zoo", f"{name}: ceiling", top, f"the twin saves {100 * saved:.0f} %", PASS if holds else FAIL
        ),
    }  # fmt: skip


def planted_lines(name: str) -> list[int]:
    """The numbers of the lines that end with `# planted: NAME`; ValueError where there is none."""
    lines = (HERE / "cases.py").read_text().splitlines()
    marked = [number for number, text in enumerate(lines, 1) if text.endswith(f"# planted: {name}")]
    if not marked:
        raise ValueError(f"no line of cases.py ends with '# planted: {name}'")
    return marked


def silent(name: str, report: Mapping[str, Any]) -> Row:
    loud = [one["rule"] for one in report["findings"] if one["share"] > CLEAN and one["category"] != "compute"]
    return Row("zoo", f"{name}: silent", ", ".join(loud) or "nothing", "nothing", FAIL if loud else PASS)


# ----------------------------------------------------------------------------------------------------------- knobs

# Models of knobbed.py and the knobs that are tried on each; the first of each by default, all with --long
KNOBS: dict[str, tuple[str, ...]] = {
    "mlp": (
        *(
            "amp.dtype=bf16",
            "matmul_precision=high",
            "optimizer.fused=true",
            "amp.dtype=fp16",
            "loader.pin_memory=true",
        ),
        *("compile=true", "compile=reduce-overhead", "allocator.conf=expandable_segments:True"),
    ),
    "conv": ("memory_format=channels_last", "cudnn.allow_tf32=false", "cudnn.benchmark=true"),
}
SHORT = {"mlp": 2, "conv": 1}
SEEN = 0.05  # of a step: what a knob gains by hand that an experiment of a few pairs must decide on


def knobs(setting: Setting) -> Iterator[Row]:
    """What `experiment` says of each knob, beside what the same change made by hand gains."""
    chosen = {model: names if setting.long else names[: SHORT[model]] for model, names in KNOBS.items()}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tried = {
            (model, knob): pool.submit(experiment, setting, model, knob)
            for model, names in chosen.items()
            for knob in names
        }
        alone = {model: pool.submit(by_hand, setting, model, names) for model, names in chosen.items()}
        for (model, knob), found in tried.items():
            try:
                times = alone[model].result()
                yield judge_knob(f"{knob} on {model}", found.result(), times[knob] / times["="] - 1)
            except (Failed, OSError, ValueError, KeyError, IndexError) as error:
                yield Row("knobs", f"{knob} on {model}", str(error)[:100], "a verdict", FAIL)


def experiment(setting: Setting, model: str, knob: str) -> dict[str, Any]:
    """What `stepscope experiment` came to for one knob."""
    folder = setting.out / "runs" / f"knobs-{model}-{knob.replace('=', '-').replace(':', '-')}"
    shutil.rmtree(folder, ignore_errors=True)
    words = ("--try", knob, "--pairs", "3:4", "--steps", str(setting.steps(120) // 2), "--out", str(folder))
    options = ("--quiet", "--fresh", "--budget", f"{0.9 * setting.left() / 60:.2f}")
    script = (sys.executable, str(HERE / "knobbed.py"), model, "--device", setting.device)
    start(setting, "-m", "stepscope", "experiment", *words, *options, "--", *script)
    found: dict[str, Any] = json.loads((folder / "experiment.json").read_text())["candidates"][0]
    return found


def by_hand(setting: Setting, model: str, knobs: tuple[str, ...]) -> dict[str, float]:
    """Milliseconds of a step with each change made in the script, by the device's clock; "=" is none, done twice."""
    words = (str(HERE / "knobbed.py"), model, "--device", setting.device, "--steps", str(setting.steps(120)), "--hand")
    outside = [knob for knob in knobs if knob.startswith("allocator.conf=")]  # is read when a process starts
    said: dict[str, float] = json.loads(
        start(setting, *words, "=", "=", *(knob for knob in knobs if knob not in outside))
    )
    for knob in outside:
        environ = {"PYTORCH_CUDA_ALLOC_CONF": knob.partition("=")[2]}
        said[knob] = json.loads(start(setting, *words, "=", "=", environ=environ))["="]
    return said


def judge_knob(what: str, found: Mapping[str, Any], by_hand: float) -> Row:
    """The verdict must have the direction that the change has by hand, where that is large enough to be decided."""
    verdict, effect = str(found["verdict"]), (found.get("effect") or {}).get("ratio")
    said = verdict + (f" ({100 * (effect - 1):+.0f} %)" if effect is not None else f": {found.get('text', '')[:60]}")
    right = {"slower", "undecided", "no_difference"} if by_hand > 0 else {"faster", "undecided", "no_difference"}
    if abs(by_hand) >= SEEN:
        right = {"slower" if by_hand > 0 else "faster"}
    return Row("knobs", what, said, f"{100 * by_hand:+.0f} % by hand", PASS if verdict in right else FAIL)


# ------------------------------------------------------------------------------------------------------------ cost


def cost(setting: Setting) -> Iterator[Row]:
    """A loop alone, recorded without and with windows, in turns; synchronisations that are ours; graphs unbroken."""
    words = (str(HERE / "loop.py"), "--device", setting.device, "--steps", str(setting.steps(1000)))
    ways: dict[str, tuple[str, ...]] = {
        "alone": (),
        "hooks": ("-m", "stepscope", "run", "--quiet", "--no-report", "--no-window", "--rate", "1"),
        "windows": ("-m", "stepscope", "run", "--quiet", "--no-report"),
    }
    for mode in ("eager", "graph", "reduce-overhead"):
        lines: list[tuple[str, tuple[str, ...]]] = []
        for turn in range(TURNS):
            for way, before in ways.items():
                out = ("--out", str(setting.out / "runs" / f"cost-{mode}-{way}-{turn}")) if before else ()
                shutil.rmtree(out[1], ignore_errors=True) if out else None
                recorded = (*before, *out, "--", sys.executable) if out else ()
                if mode == "eager" or way != "hooks":
                    lines.append((way, (*recorded, *words, "--mode", mode)))
        times: dict[str, list[float]] = {}
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for (way, _), text in zip(lines, pool.map(lambda one: start(setting, *one[1]), lines), strict=True):
                    said = json.loads(text.strip().splitlines()[-1])
                    times.setdefault(way, []).append(said["us"])
                    if said["replayed"] is False:
                        raise Failed(f"{way}: the graph was not replayed")
        except (Failed, OSError, ValueError, KeyError) as error:
            yield Row("cost", mode, str(error)[:100], "runs", FAIL)
            continue
        yield from judge_cost(mode, times)
    yield from synchronisations(setting)


def judge_cost(mode: str, times: Mapping[str, list[float]]) -> Iterator[Row]:
    """The least of the runs of each way: what others on the machine add is never negative."""
    alone = min(times["alone"])
    most = max(RECORDING_SHARE * alone, RECORDING_US)
    for way, measured in times.items():
        if way == "alone":
            continue
        more = min(measured) - alone
        verdict = PASS if more <= most else FAIL
        yield Row("cost", f"{mode}: {way}", f"{more:+.1f} µs of {alone:.0f}", f"at most {most:.0f} µs", verdict)


def synchronisations(setting: Setting) -> Iterator[Row]:
    """Calls that wait for the device between the first and the last update in a window of a loop that has none."""
    traces = sorted((setting.out / "runs" / "cost-eager-windows-0").glob("rank-0/trace-*"))
    if not traces:
        yield Row("cost", "synchronisations in steps", "no window", "0", SKIP if setting.small else FAIL)
        return
    packed = traces[0].read_bytes()
    data = gzip.decompress(packed) if traces[0].suffix == ".gz" else packed
    events = [event for event in json.loads(data)["traceEvents"] if event.get("ph") == "X"]
    updates = [event["ts"] for event in events if event["name"].startswith("Optimizer.step#")]
    inside = [event for event in events if updates and min(updates) <= event["ts"] <= max(updates)]
    waits = [event["name"] for event in inside if event.get("cat") == "cuda_runtime" and "Synchronize" in event["name"]]
    verdict = SKIP if setting.small else FAIL if waits or not updates else PASS
    yield Row("cost", "synchronisations in steps", f"{len(waits)} in {len(updates)} updates", "0", verdict)


# ------------------------------------------------------------------------------------------------------------ fake


def fake(setting: Setting) -> Iterator[Row]:
    """The judges on a made-up trace: kernels of 300 and 100 µs pass, a truth that is wrong must not."""
    from tests.gpu_traces import write

    trace = write(setting.out / "fake.pt.trace.json", steps=4)
    tables = {name: table(setting, trace, name) for name in ("operators", "kernels")}
    right = {
        "operator": "aten::mm",
        "shapes": "[[64,32],[32,8]]",
        "us": 300.0,
        "flop": 2 * 64 * 32 * 8,
        "tensor_cores": True,
    }
    copy = {"kernel": "reduce_kernel", "us": 100.0, "bytes": 4096}
    for row in judge_work({"product": right, "sum": copy}, tables):
        yield Row("fake", row.name, row.found, row.expected, row.verdict)
    wrong = list(judge_work({"wrong": {**right, "us": 250.0}, "absent": {**right, "shapes": "[]"}}, tables))
    caught = sum(row.verdict == FAIL for row in wrong)
    yield Row("fake", "wrong truths are caught", str(caught), "3", PASS if caught == 3 else FAIL)


PARTS: dict[str, Callable[[Setting], Iterator[Row]]] = {"truth": truth, "zoo": zoo, "cost": cost, "knobs": knobs}


def show(rows: list[Row]) -> None:
    """The table, as wide as its columns."""
    lines = [("part", "what", "found", "expected", ""), *(tuple(asdict(row).values()) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(4)]
    for line in lines:
        print("  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[4]]).rstrip())


def main() -> None:
    """Run the parts, print the table, write gpu.json; exits with 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="where recordings and gpu.json go")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--long", action="store_true", help="all knobs, and six times as long for everything")
    parser.add_argument("--fake", action="store_true", help="judge a made-up trace, without a device")
    options = parser.parse_args()
    if options.device == "cuda" and not options.fake:
        try:
            import torch

            here = torch.cuda.is_available()
        except ImportError:
            here = False
        if not here:
            print("no CUDA device that torch can use here; --fake or --device cpu try the plumbing", file=sys.stderr)
            sys.exit(NO_DEVICE)
    leave_core_free()
    out = options.out.absolute()
    (out / "runs").mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    parts = {"fake": fake} if options.fake else {name: PARTS[name] for name in options.only}
    for name, part in parts.items():
        seconds = BUDGET_S.get(name, 60.0) * (LONG if options.long else 1.0)
        setting = Setting(out, options.device, time.monotonic() + seconds, options.long)
        try:
            for row in part(setting):
                rows.append(row)
                print(f"{row.verdict:5}{row.part}: {row.name}: {row.found}", file=sys.stderr, flush=True)
                (out / "gpu.json").write_text(json.dumps([asdict(one) for one in rows], indent=1))
        except Exception as error:  # noqa: BLE001 - a row, never a traceback
            rows.append(Row(name, "the part itself", f"{type(error).__name__}: {error}"[:120], "runs", FAIL))
    if options.device == "cuda" and not options.fake:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    show(rows)
    failed = sum(row.verdict == FAIL for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} rows pass; {out / 'gpu.json'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
