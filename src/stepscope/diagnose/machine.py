"""What the machine takes of the step: garbage collections, cores, memory pressure, profilers, clocks of GPUs.

The main thread waits for cores because of too many threads, a quota, processes of the script, or other processes; a GPU
is held below its clock by heat, power, or clocks that were set.
"""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.diagnose import gains
from stepscope.diagnose.common import (
    ALL,
    clip_share,
    finding_id,
    lowest,
    severity,
    shown,
    steps_confidence,
    steps_source,
    train_steps,
)
from stepscope.diagnose.thresholds import CLOCKS, CORES, MEMORY_PRESSURE, PAUSES, PROFILER
from stepscope.model import Analysis, Evidence, Finding, Place, StepFacts, Try
from stepscope.model.machine import (
    Child,
    CpuFacts,
    GpuClocks,
    MemoryPressureFacts,
    PauseFacts,
    PoolFacts,
    ProfilerFacts,
)

GC_RULE = "system.garbage_collection"
THREADS_RULE = "system.threads_beyond_cores"
THROTTLED_RULE = "system.cpu_throttled"
OTHERS_RULE = "system.other_processes"
CHILDREN_RULE = "system.children_hold_cores"
MEMORY_RULE = "system.swapping_or_faults"
PROFILER_RULE = "system.profiler_overhead"
LEARN_GC = "https://docs.python.org/3/library/gc.html#gc.freeze"
LEARN_PRESSURE = "https://docs.kernel.org/accounting/psi.html"
LEARN_PROFILER = "https://pytorch.org/docs/stable/profiler.html#torch.profiler.schedule"


def device_doubt(analysis: Analysis) -> tuple[list[str], str]:
    """(levels of confidence, caveat) of time lost on the host of an accelerator: queued work may hide it."""
    device = next((device for device in analysis.devices if device != "cpu"), None)
    if device is None:
        return [], ""
    return ["low"], f" The {device} may be working meanwhile: then the gain is smaller, down to nothing."


def reported_pauses(analysis: Analysis) -> PauseFacts | None:
    """The collections, where they are worth a finding."""
    train, machine = train_steps(analysis), analysis.machine
    pauses = machine.pauses if machine is not None else None
    if train is None or pauses is None or pauses.count < PAUSES.count:
        return None
    return pauses if pauses.ms_per_step >= PAUSES.floor * train.mean_ms else None


def asked_for(analysis: Analysis, pauses: PauseFacts) -> Place | None:
    """The line at which nearly all of the time struck: automatic collections strike anywhere.

    A line that only leads to the training that a library does is none: below it anything may have struck.
    """
    entries = {fact.entry for fact in analysis.python or () if fact.entry is not None}
    top = pauses.lines[0] if pauses.lines else None
    one = top is not None and top.ms_per_step >= PAUSES.one_line * pauses.ms_per_step
    return top.place if one and top is not None and replace(top.place, share=None) not in entries else None


def garbage_collection(analysis: Analysis) -> list[Finding]:
    """One finding when collections inside steps take more than the floor."""
    train, pauses = train_steps(analysis), reported_pauses(analysis)
    if train is None or pauses is None:
        return []
    share = clip_share(pauses.ms_per_step, train.mean_ms)
    line = asked_for(analysis, pauses)
    at = f", at {shown(line)}" if line is not None else ""
    doubt, words = device_doubt(analysis)
    if line is not None:
        fix = f"If {shown(line)} calls gc.collect(), take the call out or make it once per epoch; else "
    else:
        fix = "Let the collector look at less: "
    fix += (
        "gc.freeze() after set-up keeps what lives anyway out of every collection, gc.set_threshold with a larger "
        "first number makes them rarer; objects without reference cycles need no collector at all"
    )
    return [
        Finding(
            id=finding_id(GC_RULE, line),
            rule=GC_RULE,
            category="system",
            title=f"Python's garbage collector stops {pauses.steps_struck} of {pauses.steps} steps for up to "
            f"{pauses.longest_ms:.3g} ms, {share:.0%} of the mean step{at}",
            severity=severity(share),
            confidence=lowest([steps_confidence(train), *doubt]),
            cost_ms_per_step=pauses.ms_per_step,
            share=share,
            gain_ceiling=max(share, clip_share(gains.without_main(analysis, pauses.ms_per_step), train.mean_ms)),
            where=tuple(
                replace(each.place, share=min(1.0, each.ms_per_step / pauses.ms_per_step))
                for each in pauses.lines[: PAUSES.lines_shown]
            ),
            ranks=train.ranks,
            evidence=_gc_evidence(train, pauses),
            fix=fix,
            caveat=f"Where cycles are made, memory grows until they are collected: watch it after the change.{words}",
            learn=LEARN_GC,
            falsified_by="With the collector switched off inside steps (gc.disable) the mean step does not get shorter",
        )
    ]


def _gc_evidence(train: StepFacts, pauses: PauseFacts) -> tuple[Evidence, ...]:
    source = f"events.jsonl, {pauses.count} collections in {pauses.steps} steady steps"
    found = [
        Evidence("collections per step", round(pauses.ms_per_step, 3), "ms", source),
        Evidence("full collections", pauses.full, "collections", source),
        Evidence("longest collection", round(pauses.longest_ms, 3), "ms", source),
        Evidence("mean steady step", round(train.mean_ms, 3), "ms", steps_source(train)),
    ]
    if pauses.collected is not None:
        found.append(Evidence("objects they freed", pauses.collected, "objects", source))
    return tuple(found)


# ------------------------------------------------------------------------------------------- memory, profilers


def swapping_or_faults(analysis: Analysis) -> list[Finding]:
    """One finding when page faults read the disk in every step and the kernel says that time was lost to it."""
    train, machine = train_steps(analysis), analysis.machine
    facts = machine.memory if machine is not None else None
    if train is None or facts is None or facts.stalled_pct is None:
        return []
    cost = facts.stalled_pct / 100.0 * train.mean_ms
    if cost < MEMORY_PRESSURE.floor * train.mean_ms or facts.major_faults_per_step < MEMORY_PRESSURE.faults_per_step:
        return []
    share = clip_share(cost, train.mean_ms)
    doubt, words = device_doubt(analysis)
    others = " The figure is the machine's: what others lack is in it." if facts.stalled_of == "machine" else ""
    levels = [steps_confidence(train), "low" if facts.stalled_of == "machine" else "medium", *doubt]
    return [
        Finding(
            id=finding_id(MEMORY_RULE, None),
            rule=MEMORY_RULE,
            category="system",
            title=f"Memory is short: pages come back from the disk {facts.major_faults_per_step:.3g} times per step, "
            f"up to {share:.0%} of it",
            severity=severity(share),
            confidence=lowest(levels),
            cost_ms_per_step=cost,
            share=share,
            gain_ceiling=share,
            where=(),
            ranks=train.ranks,
            evidence=_memory_evidence(facts),
            fix="Need less memory (fewer loader workers, a data set that is not copied into each of them, smaller "
            "caches) or ask for more; swap does not replace it",
            caveat=f"The time counts whenever any task stood still, so it is an upper bound.{others}{words}",
            learn=LEARN_PRESSURE,
            falsified_by="With enough memory the mean step does not get shorter",
        )
    ]


def _memory_evidence(facts: MemoryPressureFacts) -> tuple[Evidence, ...]:
    source = f"system.jsonl, {facts.seconds:.0f} s"
    found = [
        Evidence("page faults that read a disk, per step", round(facts.major_faults_per_step, 3), "faults", source),
        Evidence("time something stood still for memory", round(facts.stalled_pct or 0.0, 2), "%", source),
    ]
    if facts.rss_bytes is not None:
        found.append(Evidence("resident memory of a rank", facts.rss_bytes, "bytes", source))
    return tuple(found)


def profiler_overhead(analysis: Analysis) -> list[Finding]:
    """One finding when the script's own profiler makes its steps so much longer that the whole run notices."""
    train, machine = train_steps(analysis), analysis.machine
    facts = machine.profiler if machine is not None else None
    if train is None or facts is None or facts.inside < PROFILER.steps:
        return []
    if facts.lost_ms_per_step < PROFILER.floor * facts.total_ms_per_step:
        return []
    share = clip_share(facts.lost_ms_per_step, facts.total_ms_per_step)
    enough = facts.inside >= PROFILER.steps_for_high and facts.outside >= PROFILER.steps_for_high
    return [
        Finding(
            id=finding_id(PROFILER_RULE, None),
            rule=PROFILER_RULE,
            category="system",
            title=f"The script's own profiler makes {facts.inside} of {facts.steps} steps "
            f"{facts.inside_ms / facts.outside_ms:.2g} times as long, {share:.0%} of all step time",
            severity=severity(share),
            confidence=lowest([steps_confidence(train), "high" if enough else "medium"]),
            cost_ms_per_step=facts.lost_ms_per_step,
            share=share,
            gain_ceiling=share,
            basis=ALL,
            step_ms=facts.total_ms_per_step,
            where=(),
            ranks=train.ranks,
            evidence=_profiler_evidence(facts),
            fix="Profile a few steps only (torch.profiler.schedule with wait, active and repeat=1), without "
            "with_stack, profile_memory and record_shapes where they are not needed; leave it out of production runs",
            caveat="What its exports take between steps is not in this figure.",
            learn=LEARN_PROFILER,
            falsified_by="Without the profiler the run does not get shorter",
        )
    ]


def _profiler_evidence(facts: ProfilerFacts) -> tuple[Evidence, ...]:
    return (
        Evidence(
            "mean step under the profiler", round(facts.inside_ms, 3), "ms", f"{facts.inside} steps, {facts.source}"
        ),
        Evidence("mean step outside", round(facts.outside_ms, 3), "ms", f"{facts.outside} steady steps"),
        Evidence("mean of all steps", round(facts.total_ms_per_step, 3), "ms", f"{facts.steps} steps"),
    )


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


def _cores_confidence(cpu: CpuFacts) -> str:
    """By the telemetry it stands on."""
    return "high" if cpu.readings >= CORES.readings_for_high else "medium"


def _cores_evidence(analysis: Analysis, cpu: CpuFacts) -> tuple[Evidence, ...]:
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
        confidence=lowest([_cores_confidence(cpu), steps_confidence(train), most, *doubt]),
        cost_ms_per_step=cost,
        share=share,
        gain_ceiling=max(share, clip_share(most_cost or 0.0, train.mean_ms)),
        where=(where, *also) if where is not None else (),
        ranks=train.ranks,
        evidence=(*more, *_cores_evidence(analysis, cpu)),
        fix=fix,
        caveat=caveat + words + numa_caveat(analysis),
        learn=learn,
        try_=try_,
        falsified_by=falsified_by,
    )


CLOCKS_RULE = "system.gpu_clocks"
LEARN_CLOCKS = "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"
_CLOCK_FIXES = {
    "set clocks": "reset the clocks that were set (nvidia-smi --reset-gpu-clocks, --reset-applications-clocks)",
    "power cap": "ask why the power limit was lowered (nvidia-smi --query-gpu=power.limit,power.default_limit)",
    "hardware slowdown": "have cooling and power supply of the node looked at",
    "thermal slowdown by software": "have the cooling of the node looked at",
    "thermal slowdown by hardware": "have the cooling of the node looked at",
    "power brake": "have the power supply of the node looked at",
}


def gpu_clocks(analysis: Analysis) -> list[Finding]:
    """One finding when a GPU of the run was kept below its highest clock for a reason that can be removed.

    Of several GPUs the one that loses most speaks: ranks that work together wait for the slowest.
    """
    train, machine = train_steps(analysis), analysis.machine
    gpus = [gpu for gpu in machine.gpus if gpu.busy_readings >= CLOCKS.readings] if machine is not None else []
    if train is None or not gpus:
        return []
    gpu = max(gpus, key=lambda one: one.lost_share)
    busy, source = _busy(analysis, gpu)
    # lost_share is of all readings: in those in which the GPU idled it had nothing to lose
    share = clip_share(min(busy, 1.0) * gpu.lost_share * gpu.readings / gpu.busy_readings, 1.0)
    if share < CLOCKS.floor:
        return []
    reasons = sorted(gpu.reasons, key=lambda name: (-gpu.reasons[name], name))
    slowed = sum(one.lost_share >= CLOCKS.floor for one in gpus)
    which = f"GPU {gpu.device.partition(':')[2]}" + (f" ({slowed} of {len(gpus)} GPUs)" if len(gpus) > 1 else "")
    return [
        Finding(
            id=finding_id(CLOCKS_RULE, None),
            rule=CLOCKS_RULE,
            category="system",
            title=f"{which} runs at {gpu.clock_mhz:.0f} of {gpu.max_clock_mhz:.0f} MHz ({reasons[0]}), up to "
            f"{share:.0%} of the step",
            severity=severity(share),
            confidence=lowest([steps_confidence(train), "medium" if analysis.device_losses else "low"]),
            cost_ms_per_step=share * train.mean_ms,
            share=share,
            gain_ceiling=share,
            where=(),
            ranks=train.ranks,
            evidence=_clocks_evidence(analysis, gpu, busy, source),
            fix="; ".join(dict.fromkeys(_CLOCK_FIXES[name] for name in reasons)),
            caveat="An upper bound: kernels that wait for memory do not follow the clock, and the highest clock is not "
            "reached under every load." + numa_caveat(analysis),
            learn=LEARN_CLOCKS,
            falsified_by="On a GPU that keeps its clock the mean step does not get shorter",
        )
    ]


def _busy(analysis: Analysis, gpu: GpuClocks) -> tuple[float, str]:
    """(share of the step in which kernels run, source): of windows where there are any, else of telemetry."""
    shares = [one.compute_ns_per_step / one.step_ns for one in analysis.device_losses if one.step_ns > 0]
    if shares:
        return max(shares), "profiled steps"
    return (1.0, "not known") if gpu.utilization is None else (gpu.utilization, "system.jsonl, gpu_util_pct")


def _clocks_evidence(analysis: Analysis, gpu: GpuClocks, busy: float, busy_source: str) -> tuple[Evidence, ...]:
    source = f"system.jsonl, {gpu.busy_readings} readings of {gpu.device} that was not idle"
    found = [
        Evidence("mean SM clock", round(gpu.clock_mhz), "MHz", source),
        Evidence("highest SM clock", round(gpu.max_clock_mhz), "MHz", source),
        Evidence("share of the step with kernels running", round(busy, 4), "fraction", busy_source),
    ]
    found += [
        Evidence(f"slowed by: {name}", round(share, 4), "fraction", source) for name, share in gpu.reasons.items()
    ]
    figures = (
        ("power", gpu.power_w, "W"),
        ("power limit", gpu.power_limit_w, "W"),
        ("power limit as delivered", gpu.power_default_w, "W"),
        ("highest temperature", gpu.temperature_c, "C"),
    )
    found += [Evidence(name, round(value), unit, source) for name, value, unit in figures if value is not None]
    return (*found, *strangers_evidence(analysis, gpu), *numa_evidence(analysis))


def strangers_evidence(analysis: Analysis, gpu: GpuClocks | None = None) -> tuple[Evidence, ...]:
    """Processes of others on a GPU of the run (on any of them for None); nothing where there are none."""
    machine = analysis.machine
    gpus = (gpu,) if gpu is not None else machine.gpus if machine is not None else ()
    found = []
    for one in gpus:
        if one.strangers:
            source = f"system.jsonl, processes on {one.device}"
            found.append(Evidence(f"processes of others on {one.device}", one.strangers, "processes", source))
            if one.strangers_bytes is not None:
                found.append(Evidence(f"memory they hold on {one.device}", one.strangers_bytes, "bytes", source))
    return tuple(found)
