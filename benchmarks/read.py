"""How fast traces are read: `python benchmarks/read.py [--quick] [--peers-python PATH] [--size-mb 1000]`.

Wall time and peak memory of our reader, of two peers and of the physical limit, each in a process of its own, one after
the other on the same trace, in another order each round:

- gunzip, decode   the limit: inflate the file; inflate it and decode it to typed objects (peers/physical_limit.py), in
                   stretches of 4 MB; decode_fast takes small stretches, which is the fastest way we know
- read             our reader alone: columns in memory, thrown away (peers/stepscope_read.py)
- build            the trace to complete Parquet tables; `again` does it a second time, from the tables kept
- analyze          the whole `stepscope analyze`, with report and page
- hta              HolisticTraceAnalysis loads it (peers/hta_load.py)
- hta_analyze      it loads it and makes those of its analyses that our report holds too (peers/hta_analyze.py)
- tb_plugin        torch-tb-profiler loads it, which is all its views but the drawing (peers/tb_plugin.py)

Traces are real ones (--traces, from the peers' own test data) and larger ones made of them (generate_trace.py). Times
leave imports out, except where a whole process is meant; memory has them in. Keep the machine idle. The result goes
between markers of benchmarks/RESULTS.md, except with --quick.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from generate_trace import generate
from peers_environment import peers_python, versions
from read_report import Failure, Figure, Measured, Sample, Subject, text
from results import RESULTS, machine, put_between_markers

HERE = Path(__file__).resolve().parent
TRACES = HERE.parent.parent / "shared" / "traces"
LARGEST = "hta/df_index_resolver/df_index_resolver.json.gz"
SMALL = (
    "kineto_tb_plugin/resnet50_num_workers_0/worker0.1623143089861.pt.trace.json.gz",
    LARGEST,
    "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "hta/trace_diff/control/control.json.gz",
    "tracelens/h100/facebook_timesformer-base-finetuned-k400__1016002.json.gz",
    "tracelens/b200/eager_trace.json.gz",
    "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
)
QUICK = (SMALL[2], SMALL[5])
PAIR = (LARGEST, SMALL[3])  # what the two files of the pool are made of

# What is done on the same trace in one go; `again` needs the tables `build` left.
GROUPS = (
    ("gunzip",),
    ("decode", "decode_fast"),
    ("read",),
    ("build", "again"),
    ("analyze",),
    ("hta",),
    ("hta_analyze",),
    ("tb_plugin",),
)
POOL_GROUPS = (("one process",), ("two processes",))
PEERS = {"hta": "hta_load.py", "hta_analyze": "hta_analyze.py", "tb_plugin": "tb_plugin.py"}
PEER_MEMORY_BYTES = 16 * 2**30


@dataclass(frozen=True)
class Plan:
    """How often and how large. A peer is given up after `peer_seconds`, we after `own_seconds`."""

    rounds: int = 5
    large_rounds: int = 3
    size_mb: float = 1000
    pair_mb: float = 200
    peers_on_large: bool = False
    peer_seconds: float = 1200
    own_seconds: float = 600


# ------------------------------------------------------------------------------------------------------ one process


def command(arm: str, subject: Subject, folder: Path, out: Path, peers: Path | None) -> list[str]:
    """The command line that does `arm` once; what it leaves on disk goes below `folder`."""
    paths = [str(path) for path in subject.paths]
    if arm in PEERS:
        return [str(peers), str(HERE / "peers" / PEERS[arm]), paths[0], str(out)]
    if arm in {"gunzip", "decode", "decode_fast"}:
        return [sys.executable, str(HERE / "peers" / "physical_limit.py"), arm, paths[0], str(out)]
    mode = arm if arm in {"read", "analyze"} else "build"
    kept = folder / ("tables" if arm == "again" else arm.replace("build", "tables"))
    if arm != "again":
        shutil.rmtree(kept, ignore_errors=True)
    workers = "2" if arm == "two processes" else "1"
    script = str(HERE / "peers" / "stepscope_read.py")
    return [sys.executable, script, mode, str(kept), str(out), *paths, "--workers", workers]


def run(words: list[str], out: Path, seconds: float, *, memory_bytes: int = 0) -> Sample | Failure:
    """Run a command that measures itself into `out`; says why where there is no measurement.

    Beyond `memory_bytes` of address space the command gets a MemoryError; 0 sets no bound.
    """
    out.unlink(missing_ok=True)

    def bound() -> None:
        if memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    start = time.perf_counter()
    try:
        done = subprocess.run(
            words, preexec_fn=bound, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Failure(f"gave up after {seconds:.0f} s")
    process_seconds = time.perf_counter() - start
    if done.returncode or not out.exists():
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return Failure(f"failed: {said[-1][:160] if said else f'status {done.returncode}'}")
    found = json.loads(out.read_text())
    return Sample(
        seconds=found["seconds"],
        process_seconds=process_seconds,
        cpu_seconds=found["cpu_seconds"],
        peak_mb=found["peak_mb"],
        events=found.get("events"),
        bytes=found.get("bytes"),
    )


# ---------------------------------------------------------------------------------------------------------- rounds


def measure(subjects: Iterable[Subject], plan: Plan, folder: Path, peers: Path | None) -> Measured:
    """All rounds of all subjects. What failed or was given up once is not tried again."""
    measured = Measured()
    todo = list(subjects)
    for number in range(max(subject.rounds for subject in todo)):
        for subject in todo:
            if number >= subject.rounds:
                continue
            say(f"round {number + 1} of {subject.rounds}: {subject.name}")
            for arm in order(subject, number):
                if not wanted(arm, subject, number, plan, peers) or measured.failure(subject, arm):
                    continue
                out = folder / "result.json"
                words = command(arm, subject, folder, out, peers)
                result = (
                    run(words, out, plan.peer_seconds, memory_bytes=PEER_MEMORY_BYTES)
                    if arm in PEERS
                    else run(words, out, plan.own_seconds)
                )
                measured.add(subject, arm, result)
                say(f"  {arm}: {result}")
            for left in folder.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
    return measured


def order(subject: Subject, number: int) -> list[str]:
    """The arms, turned by one group each round."""
    groups = POOL_GROUPS if len(subject.paths) > 1 else GROUPS
    turn = number % len(groups)
    return [arm for group in (*groups[turn:], *groups[:turn]) for arm in group]


def wanted(arm: str, subject: Subject, number: int, plan: Plan, peers: Path | None) -> bool:
    """Peers are tried where they are installed; on the large trace once, and only if asked for."""
    if arm not in PEERS:
        return True
    return peers is not None and (not subject.large or (plan.peers_on_large and number == 0))


def subjects(plan: Plan, names: Iterable[str], traces: Path, folder: Path) -> list[Subject]:
    """The traces to read, generated ones included."""
    chosen = [
        Subject(short_name(name), (traces / name,), plan.rounds, reference=name == LARGEST)
        for name in names
        if exists(traces / name)
    ]
    if plan.pair_mb and all((traces / name).exists() for name in PAIR):
        pair = tuple(folder / f"pair{number}.pt.trace.json.gz" for number in range(len(PAIR)))
        for name, out in zip(PAIR, pair, strict=True):
            generate(traces / name, out, plan.pair_mb)
        chosen.append(Subject(f"two files of {plan.pair_mb:.0f} MB", pair, plan.large_rounds))
    if plan.size_mb and (traces / LARGEST).exists():
        say(f"generating a trace of {plan.size_mb:.0f} MB")
        out = folder / "large.pt.trace.json.gz"
        generate(traces / LARGEST, out, plan.size_mb)
        chosen.append(Subject(f"generated, {plan.size_mb:.0f} MB", (out,), plan.large_rounds, large=True))
    for subject in chosen:
        for path in subject.paths:
            path.read_bytes()  # from here on it is in memory for everybody
    return chosen


def exists(path: Path) -> bool:
    """Whether a trace is there; says so where it is not."""
    if not path.exists():
        say(f"{path} is missing: left out")
    return path.exists()


def short_name(name: str) -> str:
    """What tells a trace from the others: the first folders, or the file where there is only one."""
    parts = Path(name).parts
    return "/".join(parts[:2]) if parts[0] != "tracelens" else f"{parts[1]}/{parts[2].split('_')[0]}"


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------- command line


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="measure how fast traces are read, against peers and the limit")
    parser.add_argument("--quick", action="store_true", help="a smoke test: the figures mean little, none is kept")
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--large-rounds", type=int, default=Plan.large_rounds, help="on generated traces")
    parser.add_argument("--size-mb", type=float, default=Plan.size_mb, help="of the large trace, unpacked; 0 for none")
    parser.add_argument("--pair-mb", type=float, default=Plan.pair_mb, help="of each file of the pool; 0 for none")
    parser.add_argument("--peers-at-1gb", action="store_true", help="let the peers try the large trace, once")
    parser.add_argument("--peer-seconds", type=float, default=Plan.peer_seconds, help="then a peer is given up")
    parser.add_argument("--peers-python", type=Path, help="an interpreter that has the peers; default: one is made")
    parser.add_argument("--no-peers", action="store_true", help="measure our own side only")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the real traces")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    return parser.parse_args()


def shown_command(args: argparse.Namespace) -> str:
    """The command line without what only says where things are on this machine."""
    words = ["python benchmarks/read.py"]
    for name, default in (("rounds", Plan.rounds), ("large_rounds", Plan.large_rounds), ("size_mb", Plan.size_mb),
                          ("pair_mb", Plan.pair_mb), ("peer_seconds", Plan.peer_seconds)):  # fmt: skip
        if getattr(args, name) != default:
            words.append(f"--{name.replace('_', '-')} {getattr(args, name):g}")
    words += [f"--{name.replace('_', '-')}" for name in ("quick", "peers_at_1gb", "no_peers") if getattr(args, name)]
    return " ".join(words)


def main() -> None:
    """Measure, print, keep."""
    args = arguments()
    plan = Plan(
        rounds=args.rounds,
        large_rounds=args.large_rounds,
        size_mb=args.size_mb,
        pair_mb=args.pair_mb,
        peers_on_large=args.peers_at_1gb,
        peer_seconds=args.peer_seconds,
    )
    if args.quick:
        plan = replace(plan, rounds=1, large_rounds=1, size_mb=min(plan.size_mb, 100), pair_mb=0)
    about = machine("stepscope", "polars", "msgspec", "isal")
    if float(about["load before"]) > 0.5:
        say(f"the machine is busy (load {about['load before']}): times will be too long")
    peers = None if args.no_peers else peers_python(HERE / ".peers", args.peers_python)
    if peers is not None:
        about |= {f"peers' {name}": version for name, version in versions(peers).items()}
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as name:
        folder = Path(name)
        inputs, scratch = folder / "inputs", folder / "scratch"
        inputs.mkdir()
        scratch.mkdir()
        chosen = subjects(plan, QUICK if args.quick else SMALL, args.traces, inputs)
        if not chosen:
            say("nothing measured: the traces are test data of the peers; give their folder with --traces")
            return
        measured = measure(chosen, plan, scratch, peers)
    report = text(chosen, measured, shown_command(args), about)
    print(report)
    if args.json is not None:
        figures = [asdict(Figure(s.name, arm, r)) for s in chosen for arm, r in measured.of(s)]
        args.json.write_text(json.dumps(figures, indent=1))
    if not args.quick:
        put_between_markers(RESULTS, "read", report)
        say(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
