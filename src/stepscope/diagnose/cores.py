"""What the main thread waits for cores: too many threads, a quota, processes of the script, other processes.

Moves of the main thread from core to core, and memory on another node, are evidence here: their cost cannot be told
from outside.
"""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.diagnose.common import (
    clip_share,
    finding_id,
    lowest,
    severity,
    shown,
    steps_confidence,
    train_steps,
)
from stepscope.diagnose.system import CHILDREN_RULE, OTHERS_RULE, THREADS_RULE, THROTTLED_RULE, device_doubt
from stepscope.diagnose.thresholds import CORES
from stepscope.model import Analysis, Evidence, Finding, Place, StepFacts, Try
from stepscope.model.machine import Child, CpuFacts, PoolFacts

LEARN_THREADS = (
    "https://pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html#tuning-the-number-of-threads"
)
LEARN_CGROUP = "https://docs.kernel.org/scheduler/sched-bwc.html"
LEARN_DELAY = "https://docs.kernel.org/scheduler/sched-stats.html#proc-pid-schedstat"


def threads_beyond_cores(analysis: Analysis) -> list[Finding]:
    """One finding when torch has more threads than cores and the main thread waits for its own.

    By the counts of all threads; in recordings without them, by the main thread's wait for a core.
    """
    train, machine = train_steps(analysis), analysis.machine
    cpu = machine.cpu if machine is not None else None
    if train is None or cpu is None or cpu.threads is None or cpu.threads * cpu.ranks_on_host <= cpu.cores:
        return []
    cost, most = _lost(cpu)
    if cost < CORES.floor * train.mean_ms:
        return []
    fits = max(1, int(cpu.cores) // cpu.ranks_on_host)
    of = f" in each of {cpu.ranks_on_host} ranks" if cpu.ranks_on_host > 1 else ""
    cores = f"{cpu.cores:g} cores" if cpu.cores != 1 else "1 core"
    at = f" at {shown(cpu.threads_place)}" if cpu.threads_place is not None else ""
    waits = "the main thread waits for a core" if cpu.pool is None else "the main thread waits for the last of them"
    return [
        _of_cores(
            analysis,
            train,
            cpu,
            rule=THREADS_RULE,
            cost=cost,
            most_cost=most,
            title=f"{cpu.threads} torch threads{of} on {cores}: {waits}, {{share}} of the step",
            where=cpu.threads_place,
            more=(
                Evidence("torch threads per rank", cpu.threads, "threads", cpu.threads_source),
                *_pool_evidence(cpu, cpu.pool),
            ),
            fix=f"torch.set_num_threads({fits}){at}, or OMP_NUM_THREADS={fits}; for small operators one thread may be "
            "faster still, since none has to be woken",
            caveat="What the other threads compute while the main one waits has to be computed in any case: the gain "
            "is smaller than the wait.",
            learn=LEARN_THREADS,
            try_=(Try("torch.num_threads", str(fits)),),
            falsified_by=f"With {fits} threads the mean step does not get shorter",
            most="medium",
        )
    ]


def _lost(cpu: CpuFacts) -> tuple[float, float]:
    """(cost, ceiling) in ms per step."""
    pool = cpu.pool
    if pool is not None and pool.lost_ms_per_step is not None:
        return pool.lost_ms_per_step, pool.at_most_ms_per_step or pool.lost_ms_per_step
    return cpu.own_ms_per_step, cpu.own_ms_per_step


def _pool_evidence(cpu: CpuFacts, pool: PoolFacts | None) -> tuple[Evidence, ...]:
    """What the scheduler counted for all threads of a training process."""
    if pool is None:
        return ()
    source = f"system.jsonl, schedstat of every thread, {cpu.readings} readings"
    return (
        Evidence("main thread on a core", round(pool.main_cpu_share, 4), "fraction", source),
        Evidence("main thread asleep", round(pool.main_off_share, 4), "fraction", source),
        Evidence("of it, for data, files or by its own will", round(pool.other_waits_share, 4), "fraction", source),
        Evidence("CPU use of its other threads", round(pool.used_cores, 2), "cores", source),
        Evidence("threads of the pool that were ready without a core", round(pool.ready_threads, 2), "threads", source),
        Evidence("times a thread was put on a core, per step", round(pool.timeslices_per_step, 1), "times", source),
    )


def cpu_throttled(analysis: Analysis) -> list[Finding]:
    """One finding when the cgroup's quota stopped the main thread for more than the floor."""
    train, machine = train_steps(analysis), analysis.machine
    cpu = machine.cpu if machine is not None else None
    if train is None or cpu is None or (cpu.throttled_ms_per_step or 0.0) < CORES.floor * train.mean_ms:
        return []
    fits = max(1, int(cpu.cores) // cpu.ranks_on_host)
    workers = analysis.loader.num_workers if analysis.loader is not None else None
    few = cpu.threads is not None and cpu.threads <= fits and not workers  # nothing is left to take away
    return [
        _of_cores(
            analysis,
            train,
            cpu,
            rule=THROTTLED_RULE,
            cost=cpu.throttled_ms_per_step or 0.0,
            title=f"The CPU quota of {cpu.cores:g} cores stops the run, up to {{share}} of the step",
            where=None,
            more=(
                Evidence(
                    "time the cgroup was throttled, summed over cores",
                    round(cpu.throttled_share or 0.0, 4),
                    "s per s",
                    "system.jsonl, cgroup_throttled_ns",
                ),
            ),
            fix="Ask for a larger quota"
            if few
            else f"Use no more threads than the quota holds (torch.set_num_threads({fits}), fewer loader workers), or "
            "ask for a larger quota",
            caveat="Throttled time is summed over cores; the main thread's wait for a core bounds its part of it.",
            learn=LEARN_CGROUP,
            try_=() if few else (Try("torch.num_threads", str(fits)),),
            falsified_by="Without a quota the mean step does not get shorter",
        )
    ]


def other_processes(analysis: Analysis) -> list[Finding]:
    """One finding when processes that are not the run's held the core that the main thread waited for."""
    train, machine = train_steps(analysis), analysis.machine
    cpu = machine.cpu if machine is not None else None
    if train is None or cpu is None or cpu.readings < CORES.others_readings:
        return []
    if cpu.others_ms_per_step < CORES.others_floor * train.mean_ms:
        return []
    more = [Evidence("load, 1 minute", round(cpu.load, 2), "processes", "system.jsonl")] if cpu.load is not None else []
    return [
        _of_cores(
            analysis,
            train,
            cpu,
            rule=OTHERS_RULE,
            cost=cpu.others_ms_per_step,
            title="Other processes hold the cores: the main thread waits for one, {share} of the step",
            where=None,
            more=tuple(more),
            fix="Run where nothing else runs, or reserve cores (SLURM --exclusive, a cpuset, taskset for the others)",
            caveat="Every time of this run is longer for it, those of other findings too. Our own sampling is among "
            "the other processes, with 2 % at most.",
            learn=LEARN_DELAY,
            try_=(),
            falsified_by="With nothing else on the machine the mean step does not get shorter",
        )
    ]


def _most_of_children(most_ms: float | None, mean_ms: float) -> float | None:
    """What is left of the step without waiting would be quicker too, were the cores and their caches its own."""
    return None if most_ms is None else most_ms + CORES.shared_core * max(0.0, mean_ms - most_ms)


def children_hold_cores(analysis: Analysis) -> list[Finding]:
    """One finding when processes that the script started had the cores that the main thread waited for."""
    train, machine = train_steps(analysis), analysis.machine
    cpu, children = (machine.cpu, machine.children) if machine is not None else (None, None)
    if train is None or cpu is None or children is None or children.ms_per_step is None or not children.groups:
        return []
    if children.ms_per_step < CORES.floor * train.mean_ms:
        return []
    first, *more = (child for child in children.groups if child.cores >= CORES.child_cores * children.cores)
    also = f" and {sum(child.processes for child in more)} more" if more else ""
    places = [
        replace(child.place, share=min(1.0, child.cores / children.cores))
        for child in (first, *more)
        if child.place is not None
    ]
    source = f"system.jsonl, {cpu.readings} readings; processes.jsonl"
    return [
        _of_cores(
            analysis,
            train,
            cpu,
            rule=CHILDREN_RULE,
            cost=children.ms_per_step,
            most_cost=_most_of_children(children.at_most_ms_per_step, train.mean_ms),
            title=_escaped(
                f"{_told(first)}{also} hold {children.cores:.1f} of {cpu.cores:g} cores: the main thread waits "
            )
            + "for one, {share} of the step",
            where=places[0] if places else None,
            also=tuple(places[1:]),
            more=tuple(
                Evidence(f"CPU use of {_command(child)} ({_count(child)})", round(child.cores, 2), "cores", source)
                for child in (first, *more)
            ),
            fix="Do their work before or after the training or on another machine, start fewer of them, give each one "
            "thread (OMP_NUM_THREADS=1 in its environment), or let the training go first (os.nice(19) in them, or "
            "taskset to cores that training leaves free)",
            caveat="The wait is divided by the processor time of all that ran beside the main thread.",
            learn=LEARN_DELAY,
            try_=(),
            falsified_by="With these processes left out the mean step does not get shorter",
            most="medium",
        )
    ]


def _told(child: Child) -> str:
    """`3 processes that the script started (python prepare.py, train.py:7)`."""
    at = f", {shown(child.place)}" if child.place is not None else ""
    started = "that the script started" if child.how is not None else "of the run that neither train nor load"
    return f"{_count(child)} {started} ({_command(child)}{at})"


def _count(child: Child) -> str:
    return f"{child.processes} processes" if child.processes != 1 else "1 process"


def _command(child: Child) -> str:
    text = " ".join(child.command.split())
    return text if len(text) <= CORES.command_shown else f"{text[: CORES.command_shown - 1]}…"


def _escaped(text: str) -> str:
    """For a title, which is a format."""
    return text.replace("{", "{{").replace("}", "}}")


def _confidence(cpu: CpuFacts) -> str:
    """By the telemetry it stands on."""
    return "high" if cpu.readings >= CORES.readings_for_high else "medium"


def _evidence(analysis: Analysis, cpu: CpuFacts) -> tuple[Evidence, ...]:
    """What all rules on cores stand on."""
    source = f"system.jsonl, {cpu.readings} readings in {cpu.seconds:.0f} s"
    found = [
        Evidence("main thread ready, without a core", round(cpu.run_delay_share, 4), "fraction", source),
        Evidence("CPU use of the run", round(cpu.own_cores, 2), "cores", source),
        Evidence("cores the run may use", round(cpu.cores, 2), "cores", "manifest.json, affinity and cgroup"),
    ]
    others = cpu.pool.others_cores if cpu.pool is not None else None
    figures = (
        ("CPU use of others", others, 2, "cores"),
        ("cores a hypervisor gave to others", cpu.stolen_cores, 2, "cores"),
        ("involuntary switches of the main thread", cpu.involuntary_switches_per_s, 1, "1/s"),
        ("moves of the main thread to another core", cpu.migrations_per_s, 1, "1/s"),
        ("time in which something waited for a core", cpu.pressure_pct, 1, "%"),
    )
    found += [Evidence(name, round(v, digits), unit, source) for name, v, digits, unit in figures if v]
    return (*found, *numa_evidence(analysis))


def numa_evidence(analysis: Analysis) -> tuple[Evidence, ...]:
    """Nodes the main threads ran on, where a thread moved between nodes or was away from its GPU; else nothing."""
    numa = analysis.machine.numa if analysis.machine is not None else None
    if numa is None:
        return ()
    source = "system.jsonl, processor of the main thread; manifest.json, numa_nodes"
    found = []
    if len(numa.main_nodes) > 1 and len(analysis.run.ranks) == 1:
        told = ", ".join(f"{node}: {share:.0%}" for node, share in numa.main_nodes.items())
        found.append(Evidence("nodes of memory the main thread ran on", told, "", source))
    if numa.away_share:
        found.append(
            Evidence("main thread on another node than its GPU", round(numa.away_share, 4), "fraction", source)
        )
    return tuple(found)


def numa_caveat(analysis: Analysis) -> str:
    """Advice where a main thread was away from its GPU for most of the time: what it costs cannot be told."""
    numa = analysis.machine.numa if analysis.machine is not None else None
    if numa is None or (numa.away_share or 0.0) < CORES.away:
        return ""
    return (
        " The main thread runs on another node of memory than its GPU: bind the process to that node (numactl "
        "--cpunodebind and --membind, or the launcher's binding) and measure."
    )


def _of_cores(
    analysis: Analysis,
    train: StepFacts,
    cpu: CpuFacts,
    *,
    rule: str,
    cost: float,
    title: str,
    where: Place | None,
    more: tuple[Evidence, ...],
    fix: str,
    caveat: str,
    learn: str,
    try_: tuple[Try, ...],
    falsified_by: str,
    also: tuple[Place, ...] = (),
    most: str = "high",
    most_cost: float | None = None,
) -> Finding:
    """A finding whose cost is a part of the main thread's waits; `title` has a place for the share."""
    cost = min(cost, train.mean_ms)
    share = clip_share(cost, train.mean_ms)
    doubt, words = device_doubt(analysis)
    return Finding(
        id=finding_id(rule, where),
        rule=rule,
        category="system",
        title=title.format(share=f"{share:.0%}"),
        severity=severity(share),
        confidence=lowest([_confidence(cpu), steps_confidence(train), most, *doubt]),
        cost_ms_per_step=cost,
        share=share,
        gain_ceiling=max(share, clip_share(most_cost or 0.0, train.mean_ms)),
        where=(where, *also) if where is not None else (),
        ranks=train.ranks,
        evidence=(*more, *_evidence(analysis, cpu)),
        fix=fix,
        caveat=caveat + words + numa_caveat(analysis),
        learn=learn,
        try_=try_,
        falsified_by=falsified_by,
    )
