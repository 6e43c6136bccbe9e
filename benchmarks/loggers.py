"""What it costs to learn something from a training loop, ours and peers': `python benchmarks/loggers.py`.

Every way runs in a process of its own, in which it goes in and out of one loop (`loggers_loop.py`): processor time of
the training thread, which nothing else takes of it, and the calls that read a tensor back, each of which waits for a
device where there is one. `--python` names an interpreter with wandb, lightning and traceml-ai, by default that of
`make frameworks`; what cannot be imported there is said. The result goes between the markers "loggers" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from estimates import estimate  # noqa: E402
from overhead import agent_environment, figure  # noqa: E402
from results import RESULTS, machine, put_between_markers  # noqa: E402
from tests.frameworks.catalogue import interpreter  # noqa: E402

from stepscope.record.agent.config import epoch_offset_ns  # noqa: E402

# (way, what is learned)
WAYS = (
    ("stepscope", "steps and phases, loss, learning rate; always on"),
    ("stepscope --watch", "the same, and norms of each gradient, weight and update, activations"),
    ("item", "the loss"),
    ("wandb.log", "five numbers that the script has"),
    ("wandb.watch", "histograms of gradients, every tenth step"),
    ("lightning.grad_norm", "the norm of each gradient"),
    ("traceml", "times of phases"),
)
# Read, not run: what does not install beside the torch of this machine, with the version whose source was read.
READ = (
    ("Lightning 2.6, ThroughputMonitor", "throughput, utilisation", "one `cuda.synchronize` per batch"),
    ("Composer 0.33, ActivationMonitor", "four figures of each activation", "four per tensor, every 25th batch"),
    ("Composer 0.33, NaNMonitor", "whether the loss is finite", "one per batch"),
    ("torchtitan 0.2, MetricsProcessor", "loss, norm of all gradients, memory", "one every tenth step"),
)
ROUNDS, STEPS, TIMEOUT_S = 12, 60, 240


def measured(way: str, python: Path, folder: Path, rounds: int) -> dict[str, object] | str:
    """What `loggers_loop.py` found, or why there is nothing."""
    out = folder / f"{way.replace(' ', '')}.json"
    environ = agent_environment(folder / way, epoch_offset_ns(), watch="--watch" in way) if "stepscope" in way else None
    config = {"way": way, "rounds": rounds, "steps": STEPS, "out": str(out)}
    command = [str(python), str(HERE / "loggers_loop.py"), json.dumps(config)]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"not over after {TIMEOUT_S} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    found: dict[str, object] = json.loads(out.read_text())
    return found


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description="measure what loggers cost a training loop")
    parser.add_argument("--python", type=Path, default=interpreter())
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", choices=[way for way, _ in WAYS])
    args = parser.parse_args()
    about = machine("stepscope", "torch")
    lines = [*(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [
        "| way | what is learned | cost of a step | A against A | reads of a tensor per step |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as name:
        for way, learned in WAYS:
            if args.only and way not in args.only:
                continue
            print(way, file=sys.stderr, flush=True)
            found = measured(way, args.python, Path(name), args.rounds)
            if isinstance(found, str):
                lines.append(f"| {way} | {learned} | not measured: {found} | – | – |")
                continue
            rounds = found["rounds"]
            assert isinstance(rounds, list)
            effect, control = (estimate([(arms[arm] - arms["A"]) / 1e3 for arms in rounds]) for arm in "BC")
            base_ms = statistics.median(arms["A"] for arms in rounds) / 1e6
            share = effect.median / 1e3 / base_ms
            cost = f"{figure(effect, 'us')}, {share:.1%} of {base_ms:.1f} ms"
            lines.append(f"| {way} | {learned} | {cost} | {figure(control, 'us')} | {found['waits']:.1f} |")
    lines += [f"| {way} | {learned} | not measured here | – | {waits} (source) |" for way, learned, waits in READ]
    text = "\n".join(lines)
    print(text)
    if not args.only:
        put_between_markers(RESULTS, "loggers", text)


if __name__ == "__main__":
    main()
