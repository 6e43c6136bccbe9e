"""What of the step nobody explained, so that silence is earned: "nothing worth fixing" is not said of what none saw.

The main thread is on a core, ready without one, or asleep. On a core it computes or runs Python, which operators,
phases and sampled lines account for. Ready without a core is explained where a finding says who had it. Asleep is
explained by waits for data and files, lines that sleep, communication, compilation, and by what other threads of the
process computed meanwhile. The rest is unexplained, and said with its figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.diagnose.collectives import exposed_share
from stepscope.diagnose.common import clip_share, train_steps
from stepscope.diagnose.system import CHILDREN_RULE, OTHERS_RULE, THREADS_RULE, THROTTLED_RULE
from stepscope.diagnose.thresholds import SILENCE
from stepscope.model import Analysis, Finding, StepFacts, Unexplained, UnexplainedPart
from stepscope.model.machine import CpuFacts

_CORES = (THREADS_RULE, THROTTLED_RULE, OTHERS_RULE, CHILDREN_RULE)
_UNKNOWN = ("idle_unknown", "host_unknown")  # of a trace: what no slice tells
NO_CORE = "ready to run, without a core"
ASLEEP = "asleep, not for data or files, for communication or for threads that computed"
WAITING = "asleep, most of it perhaps for other ranks"
NO_SOURCE = "outside the passes and the optimizer, without sampled stacks or a profiler window"
NO_SLICE = "in no operator, kernel, call or function of the trace"


def unexplained(analysis: Analysis, findings: Sequence[Finding]) -> Unexplained | None:
    """None without training steps."""
    train = train_steps(analysis)
    if train is None:
        return None
    parts = sorted(_parts(analysis, train, findings), key=lambda part: (-part.ms, part.what))
    parts = [part for part in parts if part.ms > 0]
    ms = min(train.mean_ms, sum(part.ms for part in parts))
    share = clip_share(ms, train.mean_ms)
    return Unexplained(ms, share, tuple(parts), tuple(_unseen(analysis)), share >= SILENCE.unexplained)


def _parts(analysis: Analysis, train: StepFacts, findings: Sequence[Finding]) -> Iterator[UnexplainedPart]:
    cpu = analysis.machine.cpu if analysis.machine is not None else None

    def part(what: str, ms: float, source: str) -> UnexplainedPart:
        return UnexplainedPart(what, ms, clip_share(ms, train.mean_ms), source)

    if cpu is not None:
        source = f"system.jsonl, {cpu.readings} readings"
        waited = cpu.run_delay_share * train.mean_ms
        told = sum(finding.cost_ms_per_step for finding in findings if finding.rule in _CORES)
        yield part(NO_CORE + _users(cpu), max(0.0, waited - told), source)
        if cpu.main_cpu_share is not None and not _on_device(analysis):
            asleep = max(0.0, 1.0 - cpu.main_cpu_share - cpu.run_delay_share) * train.mean_ms
            # a compiler sleeps for the programs it calls
            told_asleep = sum(one.cost_ms_per_step for one in findings if one.category == "compile")
            told_asleep += max(0.0, told - waited) + _known(analysis, cpu, train, findings)
            ranks = len(analysis.run.ranks)
            yield part((ASLEEP if ranks == 1 else WAITING) + _users(cpu), max(0.0, asleep - told_asleep), source)
    if analysis.stacks is None and not analysis.traces:
        outside = [one.ms for one in train.partition if one.category in ("before_forward", "other", "unattributed")]
        yield part(NO_SOURCE, sum(outside), "steps.jsonl")
    elif cpu is None and analysis.stacks is None:
        yield part(NO_SLICE, _in_no_slice(analysis) * train.mean_ms, "traces")


def _users(cpu: CpuFacts) -> str:
    """Who used the cores besides, where that is known: no rule may have had reason to name them."""
    if cpu.pool is None:
        return ""
    others = "" if cpu.pool.others_cores is None else f", others on the machine {cpu.pool.others_cores:.1f}"
    return f" (other threads of the process used {cpu.pool.used_cores:.1f}{others} of {cpu.cores:g} cores)"


def _known(analysis: Analysis, cpu: CpuFacts, train: StepFacts, findings: Sequence[Finding]) -> float:
    """What the main thread is known to sleep for, ms a step."""
    told = [one.gain_ceiling * train.mean_ms for one in findings if one.category == "communication"]
    communication = max([exposed_share(analysis) * train.mean_ms, *told])
    return cpu.waits_ms_per_step + communication + _computing(cpu) * train.mean_ms


def _computing(cpu: CpuFacts) -> float:
    """The part of the step in which torch's other threads may have computed while the main one waited for them.

    They get parts of an operator as large as the main thread's. What threads use beyond that is the script's own, and
    the main thread may be kept waiting by it (for the interpreter's lock, for one).
    """
    used = cpu.pool.used_cores if cpu.pool is not None else 0.0
    if cpu.threads is None or cpu.main_cpu_share is None:
        return used
    return min(used, (cpu.threads - 1) * cpu.main_cpu_share)


def _in_no_slice(analysis: Analysis) -> float:
    overviews = [span.overview for span in analysis.views.spans if span.overview is not None] if analysis.views else []
    shares = [sum(one.parts[name].share for name in _UNKNOWN if name in one.parts) for one in overviews]
    return sum(shares) / len(shares) if shares else 0.0


def _unseen(analysis: Analysis) -> Iterator[str]:
    """What was not recorded: of runs of our own the telemetry, of devices their work, of ranks what they exchange."""
    machine = analysis.machine
    if machine is not None and machine.journaled and machine.cpu is None:
        yield "whether the main thread had a core (too little telemetry of the steady steps)"
    if _on_device(analysis) and not analysis.device_losses:
        yield "what the devices did (no profiler window with their work)"
    communicates = len(analysis.run.ranks) > 1 and not (analysis.views is not None and analysis.views.communication)
    if communicates and not _on_device(analysis):
        yield "what the ranks exchanged (no profiler window with collectives)"


def _on_device(analysis: Analysis) -> bool:
    return bool(analysis.device_losses) or any(device != "cpu" for device in analysis.devices)
