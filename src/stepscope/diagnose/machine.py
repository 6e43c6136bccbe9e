"""What the machine takes of the step: garbage collections, cores, memory pressure, profilers, clocks of GPUs.

The main thread waits for cores because of too many threads, a quota, processes of the script, or other processes; a GPU
is held below its clock by heat, power, or clocks that were set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from stepscope.diagnose import gains
from stepscope.diagnose.rule import (
    ALL,
    ON_DEVICE,
    REPORT_FLOOR,
    STEPS,
    Claim,
    Known,
    Need,
    Thresholds,
    advice,
    always,
    at,
    at_place,
    clip_share,
    device_doubt,
    figure,
    figures,
    ms,
    risk_rule,
    rule,
    shown,
    steps_source,
)
from stepscope.model import Analysis, Evidence, Finding, Place, Risk, Try
from stepscope.model.counted import short, things
from stepscope.model.machine import THREADS_FOUND, Child, CpuFacts, PauseFacts
from stepscope.model.views import OperatorRow


class PAUSES(Thresholds):
    count: int = 3  # collections, and steps that they struck: fewer in a whole run are no rhythm
    one_line: float = 0.9  # of their time at one line: it asks for them, since automatic ones strike anywhere
    lines_shown: int = 3


class CORES(Thresholds):
    """When a main thread that waits for a core counts. Others need more: our own recorder is among them, with up to
    2 %, and a scheduler makes any thread wait a few percent."""

    others_floor: float = 0.10
    others_readings: int = 30  # half a minute: a shorter burst of others says nothing of the next run
    readings_for_high: int = 30
    child_cores: float = 0.1  # of what all children use: those below are not named
    shared_core: float = 0.4  # of its own time a thread may lose to a busy sibling on its core, and to cold caches: two
    # hyperthreads of one core do 1.2 to 1.3 times the work of one; 15 ms of a step beside three processes were 10 alone
    product_ms: float = 1.0  # of a call by one thread: waking another takes 15 us at most (`analyze/machine/cores.py`)
    added: float = 0.4  # of a core, what one more gives: on two, products of 0.1 to 6 ms were 1.4 to 1.9 times as fast
    command_shown: int = 60  # characters of a child's command in a title
    away: float = 0.5  # of the readings on another node than the GPU: then binding is worth a try


class MEMORY_PRESSURE(Thresholds):
    faults_per_step: float = 1.0  # that read a disk; below it pressure is that of others; chosen, untuned


class PROFILER(Thresholds):
    steps: int = 3  # in it: fewer are chance
    steps_for_high: int = 10


class CLOCKS(Thresholds):
    readings: int = 10  # in which it was not idle: ten seconds, more than a board takes to find its clock


JOURNAL = Need("the journal of events", lambda a: a.machine.journaled)
CPU = Need("telemetry of the main thread's wait for a core", lambda a: a.machine.cpu)
THREADS = Need(
    "the number of torch's threads", lambda a: a.machine.cpu is not None and a.machine.cpu.threads is not None
)
PRODUCTS = Need(
    "a profiler window with large products, by one thread that nobody asked for",
    lambda a: (
        a.machine.cpu is not None
        and a.machine.cpu.threads == 1
        and (a.machine.cpu.threads_source, a.machine.cpu.threads_place) == (THREADS_FOUND, None)
        and not ON_DEVICE.present(a)
        and _products(a)
    ),
    quiet=True,
    traced=always,
)
QUOTA = Need(
    "the throttled time of the cgroup",
    lambda a: a.machine.cpu is not None and a.machine.cpu.throttled_share is not None,
)
CHILDREN = Need(
    "processes that the script started",
    lambda a: a.machine.children if a.machine.children and a.machine.children.groups else None,
    quiet=True,
)
PRESSURE = Need(
    "telemetry of page faults and memory pressure",
    lambda a: a.machine.memory if a.machine.memory and a.machine.memory.stalled_pct is not None else None,
)
OWN_PROFILER = Need(
    "training steps inside and outside the script's own profiler",
    lambda a: a.machine.profiler if a.machine.journaled else None,  # whose windows they are stands there
    quiet=True,
)
HOOKED = Need("a profiler or tracer of Python", lambda a: a.machine.hook, quiet=True)
GPU_READINGS = Need("telemetry of the GPU's clocks", lambda a: a.machine.gpus)
LEARN_THREADS = (
    "https://pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html#tuning-the-number-of-threads"
)
LEARN_DELAY = "https://docs.kernel.org/scheduler/sched-stats.html#proc-pid-schedstat"


def asked_for(analysis: Analysis, pauses: PauseFacts) -> Place | None:
    """The line at which nearly all of the time struck: automatic collections strike anywhere.

    A line that only leads to the training that a library does is none: below it anything may have struck.
    """
    if not pauses.lines or pauses.lines[0].ms_per_step < PAUSES.one_line * pauses.ms_per_step:
        return None
    place = pauses.lines[0].place
    entries = {fact.entry for fact in analysis.python or () if fact.entry is not None}
    return place if replace(place, share=None) not in entries else None


@rule("system.garbage_collection", STEPS, JOURNAL, learn="https://docs.python.org/3/library/gc.html#gc.freeze")
def garbage_collection(analysis: Analysis) -> Iterator[Claim]:
    train, pauses = STEPS.of(analysis), analysis.machine.pauses
    if pauses is None or pauses.steps_struck < PAUSES.count or pauses.ms_per_step < REPORT_FLOOR * train.mean_ms:
        return
    line = asked_for(analysis, pauses)
    doubt, words = device_doubt(analysis)
    fix = "Let the collector look at less: "
    if line is not None:
        fix = f"If {shown(line)} calls gc.collect(), take the call out or make it once per epoch; else "
    source = f"events.jsonl, {things(pauses.count, 'collection')} in {things(pauses.steps, 'steady step')}"
    yield Claim(
        title=f"Python's garbage collector stops {pauses.steps_struck} of {things(pauses.steps, 'step')} for up to "
        f"{short(pauses.longest_ms)} ms, {clip_share(pauses.ms_per_step, train.mean_ms):.0%} of the mean step"
        + (f", at {shown(line)}" if line is not None else ""),
        steps=train,
        cost_ms=pauses.ms_per_step,
        ceiling_ms=gains.without_main(analysis, pauses.ms_per_step),
        levels=doubt,
        where=tuple(
            replace(each.place, share=min(1.0, each.ms_per_step / pauses.ms_per_step))
            for each in pauses.lines[: PAUSES.lines_shown]
        ),
        key=line,
        evidence=(
            ms("collections per step", pauses.ms_per_step, source),
            Evidence("full collections", pauses.full, "collections", source),
            ms("longest collection", pauses.longest_ms, source),
            ms("mean steady step", train.mean_ms, steps_source(train)),
            figure("objects they freed", pauses.collected, "objects", source, 0),
        ),
        fix=f"{fix}gc.freeze() after set-up keeps what lives anyway out of every collection, gc.set_threshold with a "
        "larger first number makes them rarer; objects without reference cycles need no collector at all",
        caveat=f"Where cycles are made, memory grows until they are collected: watch it after the change.{words}",
        falsified_by="With the collector switched off inside steps (gc.disable) the mean step does not get shorter",
    )


@rule("system.swapping_or_faults", STEPS, PRESSURE, learn="https://docs.kernel.org/accounting/psi.html")
def swapping_or_faults(analysis: Analysis) -> Iterator[Claim]:
    train, facts = STEPS.of(analysis), PRESSURE.of(analysis)
    share, faults = (facts.stalled_pct or 0.0) / 100.0, facts.major_faults_per_step
    if share < REPORT_FLOOR or faults < MEMORY_PRESSURE.faults_per_step:
        return
    doubt, words = device_doubt(analysis)
    whole = facts.stalled_of == "machine"
    others = " The figure is the machine's: what others lack is in it." if whole else ""
    yield Claim(
        title=f"Memory is short: pages come back from the disk {short(faults)} times per step, "
        f"up to {min(1.0, share):.0%} of it",
        steps=train,
        cost_ms=share * train.mean_ms,
        levels=("low" if whole else "medium", *doubt),
        evidence=tuple(
            figures(
                f"system.jsonl, {facts.seconds:.0f} s",
                ("page faults that read a disk, per step", faults, "faults", 3),
                ("time something stood still for memory", facts.stalled_pct, "%", 2),
                ("resident memory of a rank", facts.rss_bytes, "bytes", 0),
            )
        ),
        fix="Need less memory (fewer loader workers, a data set that is not copied into each of them, smaller "
        "caches) or ask for more; swap does not replace it",
        caveat=f"The time counts whenever any task stood still, so it is an upper bound.{others}{words}",
        falsified_by="With enough memory the mean step does not get shorter",
    )


@rule(
    "system.profiler_overhead",
    STEPS,
    OWN_PROFILER,
    learn="https://pytorch.org/docs/stable/profiler.html#torch.profiler.schedule",
)
def profiler_overhead(analysis: Analysis) -> Iterator[Claim]:
    facts = OWN_PROFILER.of(analysis)
    if facts.inside < PROFILER.steps:
        return
    enough = facts.inside >= PROFILER.steps_for_high and facts.outside >= PROFILER.steps_for_high
    yield Claim(
        title=f"The script's own profiler makes {facts.inside} of {facts.steps} steps "
        f"{facts.inside_ms / facts.outside_ms:.2g} times as long, "
        f"{clip_share(facts.lost_ms_per_step, facts.total_ms_per_step):.0%} of all step time",
        steps=STEPS.of(analysis),
        step_ms=facts.total_ms_per_step,
        basis=ALL,
        cost_ms=facts.lost_ms_per_step,
        levels=("high" if enough else "medium",),
        evidence=(
            ms("mean step under the profiler", facts.inside_ms, f"{things(facts.inside, 'step')}, {facts.source}"),
            ms("mean step outside", facts.outside_ms, f"{things(facts.outside, 'steady step')}"),
            ms("mean of all steps", facts.total_ms_per_step, f"{things(facts.steps, 'step')}"),
        ),
        fix="Profile a few steps only (torch.profiler.schedule with wait, active and repeat=1), without "
        "with_stack, profile_memory and record_shapes where they are not needed; leave it out of production runs",
        caveat="What its exports take between steps is not in this figure.",
        falsified_by="Without the profiler the run does not get shorter",
    )


@risk_rule("system.python_hook", HOOKED)
def python_hook(analysis: Analysis, _findings: Sequence[Finding]) -> Iterator[Risk]:
    """What it costs nobody can tell from this run: it is on in every step, and C functions leave no stack."""
    hook = HOOKED.of(analysis)
    yield python_hook.risk(
        hook.place or hook.name,
        title=f"A profiler or tracer of Python is on while the model trains: {hook.name} is called at every call, or "
        f"line, of Python{at(hook.place)}",
        evidence=(Evidence("profile or trace function when training began", hook.name, "", "rank.json"),),
        fix="Train without it (cProfile, sys.setprofile, sys.settrace, a debugger, coverage), or switch it on around a "
        "few steps; stacks sampled from outside show the same functions at no cost to the steps",
        caveat="The part that it takes is not in this run's figures; the more Python a step runs, the larger it is.",
        learn="https://docs.python.org/3/library/profile.html#limitations",
        falsified_by="Without it the mean step does not get shorter",
    )


RISKS = (python_hook,)


def _of_cores(analysis: Analysis, *, evidence: Iterable[Known], caveat: str, **said: Any) -> Claim:
    """A claim whose cost is a part of the main thread's waits, with what all of these stand on."""
    cpu, (doubt, words) = CPU.of(analysis), device_doubt(analysis)
    enough = "high" if cpu.readings >= CORES.readings_for_high else "medium"
    source = f"system.jsonl, {cpu.readings} readings in {cpu.seconds:.0f} s"
    others = cpu.pool.others_cores if cpu.pool is not None else None
    levels = (*said.pop("levels", ()), enough, *doubt)
    common = (
        figure("main thread ready, without a core", cpu.run_delay_share, "fraction", source),
        figure("CPU use of the run", cpu.own_cores, "cores", source, 2),
        figure("cores the run may use", cpu.cores, "cores", "manifest.json, affinity and cgroup", 2),
        *figures(
            source,
            ("CPU use of others", others or None, "cores", 2),
            ("cores a hypervisor gave to others", cpu.stolen_cores or None, "cores", 2),
            ("involuntary switches of the main thread", cpu.involuntary_switches_per_s or None, "1/s", 1),
            ("moves of the main thread to another core", cpu.migrations_per_s or None, "1/s", 1),
            ("time in which something waited for a core", cpu.pressure_pct or None, "%", 1),
        ),
        *numa_evidence(analysis),
    )
    caveat += words + numa_caveat(analysis)
    return Claim(steps=STEPS.of(analysis), levels=levels, evidence=(*evidence, *common), caveat=caveat, **said)


def _part(analysis: Analysis, cost_ms: float) -> str:
    return f"{clip_share(cost_ms, STEPS.of(analysis).mean_ms):.0%} of the step"


def _fitting_threads(cpu: CpuFacts) -> int:
    return max(1, int(cpu.cores) // cpu.ranks_on_host)


@rule("system.threads_beyond_cores", STEPS, CPU, THREADS, learn=LEARN_THREADS)
def threads_beyond_cores(analysis: Analysis) -> Iterator[Claim]:
    """Torch has more threads than cores and the main thread waits for its own.

    By the counts of all threads; in recordings without them, by the main thread's wait for a core.
    """
    cpu = CPU.of(analysis)
    if cpu.threads is None or cpu.threads * cpu.ranks_on_host <= cpu.cores:
        return
    pool, cost, most = cpu.pool, cpu.own_ms_per_step, cpu.own_ms_per_step
    if pool is not None and pool.lost_ms_per_step is not None:
        cost, most = pool.lost_ms_per_step, pool.at_most_ms_per_step or pool.lost_ms_per_step
    fits = _fitting_threads(cpu)
    of = f" in each of {cpu.ranks_on_host} ranks" if cpu.ranks_on_host > 1 else ""
    cores = f"{cpu.cores:g} cores" if cpu.cores != 1 else "1 core"
    waits = "the main thread waits for a core" if pool is None else "the main thread waits for the last of them"
    source = f"system.jsonl, schedstat of every thread, {cpu.readings} readings"
    of_pool = (
        ()
        if pool is None
        else figures(  # what the scheduler counted for all threads of a training process
            source,
            ("main thread on a core", pool.main_cpu_share, "fraction", 4),
            ("main thread asleep", pool.main_off_share, "fraction", 4),
            ("of it, for data, files or by its own will", pool.other_waits_share, "fraction", 4),
            ("CPU use of its other threads", pool.used_cores, "cores", 2),
            ("threads of the pool that were ready without a core", pool.ready_threads, "threads", 2),
            ("times a thread was put on a core, per step", pool.timeslices_per_step, "times", 1),
        )
    )
    yield _of_cores(
        analysis,
        title=f"{cpu.threads} torch threads{of} on {cores}: {waits}, {_part(analysis, cost)}",
        cost_ms=cost,
        ceiling_ms=most,
        levels=("medium",),
        where=(cpu.threads_place,) if cpu.threads_place is not None else (),
        evidence=(Evidence("torch threads per rank", cpu.threads, "threads", cpu.threads_source), *of_pool),
        fix=f"torch.set_num_threads({fits}){at_place(cpu.threads_place)}, or OMP_NUM_THREADS={fits}; for small "
        "operators one thread may be faster still, since none has to be woken",
        caveat="What the other threads compute while the main one waits has to be computed in any case: the gain "
        "is smaller than the wait.",
        tries=(Try("torch.num_threads", str(fits)),),
        falsified_by=f"With {fits} threads the mean step does not get shorter",
    )


def _products(analysis: Analysis) -> list[OperatorRow]:
    rows = analysis.views.operators if analysis.views is not None else ()
    return [one for one in rows if one.tensor_core_eligible and one.host_self_ns >= CORES.product_ms * 1e6 * one.calls]


@rule("system.threads_below_cores", STEPS, CPU, PRODUCTS, learn=LEARN_THREADS)
def threads_below_cores(analysis: Analysis) -> Iterator[Claim]:
    """Large products by one thread, with cores that nobody uses: of two hyperthreads one core counts."""
    train, cpu, hardware = STEPS.of(analysis), CPU.of(analysis), analysis.run.hardware
    others = cpu.pool.others_cores if cpu.pool is not None else None
    whole, logical = hardware.get("physical_cores"), hardware.get("logical_cores")
    if others is None or not isinstance(whole, int) or not isinstance(logical, int) or not logical:
        return
    free = (cpu.cores - cpu.own_cores - others) / cpu.ranks_on_host
    fits = min(int(_fitting_threads(cpu) * whole / logical), 1 + round(free))
    if fits < 2:
        return
    products = [(one.name, (one.host_self_ns_per_step or 0.0) / 1e6) for one in _products(analysis)]
    took = min(sum(each for _, each in products), train.mean_ms)
    wait = sum(part.ms for part in train.partition if part.category == "data_wait")
    yield _of_cores(
        analysis,
        title=f"Torch computes with one thread while {free:.1f} of {cpu.cores:g} cores are free: large products take "
        f"{_part(analysis, took)}",
        cost_ms=took * (1.0 - 1.0 / (1.0 + CORES.added * (fits - 1))),
        ceiling_ms=(train.mean_ms - wait) * (1.0 - 1.0 / fits),
        levels=("medium",),
        evidence=(
            Evidence("torch threads per rank", 1, "threads", cpu.threads_source),
            *(ms(f"{name}, per step, as recorded", each, "profiler window") for name, each in products[:3]),
        ),
        fix=f"torch.set_num_threads({fits}), or OMP_NUM_THREADS={fits}, which torchrun sets to 1 where it is not set",
        caveat="Small operators gain nothing, and loader workers need cores as well.",
        tries=(Try("torch.num_threads", str(fits)),),
        falsified_by=f"With {fits} threads the mean step does not get shorter",
    )


@rule("system.cpu_throttled", STEPS, CPU, QUOTA, learn="https://docs.kernel.org/scheduler/sched-bwc.html")
def cpu_throttled(analysis: Analysis) -> Iterator[Claim]:
    cpu = CPU.of(analysis)
    cost = cpu.throttled_ms_per_step or 0.0
    fits = _fitting_threads(cpu)
    workers = analysis.loader.num_workers if analysis.loader is not None else None
    few = cpu.threads is not None and cpu.threads <= fits and not workers  # nothing is left to take away
    source = "system.jsonl, cgroup_throttled_ns"
    yield _of_cores(
        analysis,
        title=f"The CPU quota of {cpu.cores:g} cores stops the run, up to {_part(analysis, cost)}",
        cost_ms=cost,
        evidence=(
            figure("time the cgroup was throttled, summed over cores", cpu.throttled_share or 0.0, "s per s", source),
        ),
        fix="Ask for a larger quota"
        if few
        else f"Use no more threads than the quota holds (torch.set_num_threads({fits}), fewer loader workers), or "
        "ask for a larger quota",
        caveat="Throttled time is summed over cores; the main thread's wait for a core bounds its part of it.",
        tries=() if few else (Try("torch.num_threads", str(fits)),),
        falsified_by="Without a quota the mean step does not get shorter",
    )


@rule("system.other_processes", STEPS, CPU, learn=LEARN_DELAY)
def other_processes(analysis: Analysis) -> Iterator[Claim]:
    cpu = CPU.of(analysis)
    cost = cpu.others_ms_per_step
    if cpu.readings < CORES.others_readings or cost < CORES.others_floor * STEPS.of(analysis).mean_ms:
        return
    yield _of_cores(
        analysis,
        title=f"Other processes hold the cores: the main thread waits for one, {_part(analysis, cost)}",
        cost_ms=cost,
        evidence=() if cpu.load is None else (figure("load, 1 minute", cpu.load, "processes", "system.jsonl", 2),),
        fix="Run where nothing else runs, or reserve cores (SLURM --exclusive, a cpuset, taskset for the others)",
        caveat="Every time of this run is longer for it, those of other findings too. Our own sampling is among "
        "the other processes, with 2 % at most.",
        falsified_by="With nothing else on the machine the mean step does not get shorter",
    )


@rule("system.children_hold_cores", STEPS, CPU, CHILDREN, learn=LEARN_DELAY)
def children_hold_cores(analysis: Analysis) -> Iterator[Claim]:
    train, cpu, children = STEPS.of(analysis), CPU.of(analysis), CHILDREN.of(analysis)
    cost, most = children.ms_per_step, children.at_most_ms_per_step
    if cost is None:
        return
    if most is not None:
        # what is left of the step without waiting would be quicker too, were the cores and their caches its own
        most += CORES.shared_core * max(0.0, train.mean_ms - most)
    named = [child for child in children.groups if child.cores >= CORES.child_cores * children.cores]
    named = named or [children.groups[0]]  # the largest, of many small ones
    first = named[0]
    also = f" and {sum(child.processes for child in named[1:])} more" if len(named) > 1 else ""
    place = f", {shown(first.place)}" if first.place is not None else ""
    started = "that the script started" if first.how is not None else "of the run that neither train nor load"
    source = f"system.jsonl, {cpu.readings} readings; processes.jsonl"
    yield _of_cores(
        analysis,
        title=f"{_count(first)} {started} ({_command(first)}{place}){also} hold {children.cores:.1f} of {cpu.cores:g} "
        f"cores: the main thread waits for one, {_part(analysis, cost)}",
        cost_ms=cost,
        ceiling_ms=most or 0.0,
        levels=("medium",),
        where=tuple(
            replace(child.place, share=min(1.0, child.cores / children.cores))
            for child in named
            if child.place is not None
        ),
        evidence=[
            figure(f"CPU use of {_command(child)} ({_count(child)})", child.cores, "cores", source, 2)
            for child in named
        ],
        fix="Do their work before or after the training or on another machine, start fewer of them, give each one "
        "thread (OMP_NUM_THREADS=1 in its environment), or let the training go first (os.nice(19) in them, or "
        "taskset to cores that training leaves free)",
        caveat="The wait is divided by the processor time of all that ran beside the main thread.",
        falsified_by="With these processes left out the mean step does not get shorter",
    )


def _count(child: Child) -> str:
    return f"{child.processes} processes" if child.processes != 1 else "1 process"


def _command(child: Child) -> str:
    text = " ".join(child.command.split())
    return text if len(text) <= CORES.command_shown else f"{text[: CORES.command_shown - 1]}…"


def numa_evidence(analysis: Analysis) -> Iterator[Known]:
    """Nodes the main threads ran on, where a thread moved between nodes or was away from its GPU; else nothing."""
    numa = analysis.machine.numa
    if numa is None:
        return
    source = "system.jsonl, processor of the main thread; manifest.json, numa_nodes"
    if len(numa.main_nodes) > 1 and len(analysis.run.ranks) == 1:
        told = ", ".join(f"{node}: {share:.0%}" for node, share in numa.main_nodes.items())
        yield Evidence("nodes of memory the main thread ran on", told, "", source)
    if numa.away_share:
        yield figure("main thread on another node than its GPU", numa.away_share, "fraction", source)


def numa_caveat(analysis: Analysis) -> str:
    """Advice where a main thread was away from its GPU for most of the time: what it costs cannot be told."""
    numa = analysis.machine.numa
    if numa is None or (numa.away_share or 0.0) < CORES.away:
        return ""
    return (
        " The main thread runs on another node of memory than its GPU: bind the process to that node (numactl "
        "--cpunodebind and --membind, or the launcher's binding) and measure."
    )


@rule(
    "system.gpu_clocks",
    STEPS,
    ON_DEVICE,
    GPU_READINGS,
    learn="https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",
)
def gpu_clocks(analysis: Analysis) -> Iterator[Claim]:
    """A GPU of the run was kept below its highest clock for a reason that can be removed.

    Of several GPUs the one that loses most speaks: ranks that work together wait for the slowest.
    """
    train = STEPS.of(analysis)
    gpus = [gpu for gpu in GPU_READINGS.of(analysis) if gpu.busy_readings >= CLOCKS.readings]
    if not gpus:
        return
    gpu = max(gpus, key=lambda one: one.lost_share)
    # the share of the step in which kernels run: of windows where there are any, else of telemetry
    busy, of_busy = (1.0, "not known") if gpu.utilization is None else (gpu.utilization, "system.jsonl, gpu_util_pct")
    shares = [one.compute_ns_per_step / one.step_ns for one in analysis.device_losses if one.step_ns > 0]
    if shares:
        busy, of_busy = max(shares), "profiled steps"
    # lost_share is of all readings: in those in which the GPU idled it had nothing to lose
    share = clip_share(min(busy, 1.0) * gpu.lost_share * gpu.readings / gpu.busy_readings, 1.0)
    if share < REPORT_FLOOR:
        return
    reasons = sorted(gpu.reasons, key=lambda name: (-gpu.reasons[name], name))
    slowed = sum(one.lost_share >= REPORT_FLOOR for one in gpus)
    which = f"GPU {gpu.device.partition(':')[2]}" + (f" ({slowed} of {len(gpus)} GPUs)" if len(gpus) > 1 else "")
    source = f"system.jsonl, {gpu.busy_readings} readings of {gpu.device} that was not idle"
    others = f"system.jsonl, processes on {gpu.device}"
    yield Claim(
        title=f"{which} runs at {gpu.clock_mhz:.0f} of {gpu.max_clock_mhz:.0f} MHz ({reasons[0]}), up to "
        f"{share:.0%} of the step",
        steps=train,
        cost_ms=share * train.mean_ms,
        levels=("medium" if analysis.device_losses else "low",),
        evidence=(
            Evidence("mean SM clock", round(gpu.clock_mhz), "MHz", source),
            Evidence("highest SM clock", round(gpu.max_clock_mhz), "MHz", source),
            figure("share of the step with kernels running", busy, "fraction", of_busy),
            *(figure(f"slowed by: {name}", part, "fraction", source) for name, part in gpu.reasons.items()),
            *(
                Evidence(name, round(value), unit, source)
                for name, value, unit in (
                    ("power", gpu.power_w, "W"),
                    ("power limit", gpu.power_limit_w, "W"),
                    ("power limit as delivered", gpu.power_default_w, "W"),
                    ("highest temperature", gpu.temperature_c, "C"),
                )
                if value is not None
            ),
            *figures(
                others,
                (f"processes of others on {gpu.device}", gpu.strangers or None, "processes", 0),
                (f"memory they hold on {gpu.device}", gpu.strangers_bytes if gpu.strangers else None, "bytes", 0),
            ),
            *numa_evidence(analysis),
        ),
        fix="; ".join(dict.fromkeys(advice("clocks", name) for name in reasons)),
        caveat="An upper bound: kernels that wait for memory do not follow the clock, and the highest clock is not "
        "reached under every load." + numa_caveat(analysis),
        falsified_by="On a GPU that keeps its clock the mean step does not get shorter",
    )
