"""A GPU that somebody or something holds below its clock: heat, power, or clocks that were set."""

from __future__ import annotations

from stepscope.diagnose.common import clip_share, finding_id, lowest, severity, steps_confidence, train_steps
from stepscope.diagnose.cores import numa_caveat, numa_evidence
from stepscope.diagnose.thresholds import CLOCKS
from stepscope.model import Analysis, Evidence, Finding
from stepscope.model.machine import GpuClocks

RULE = "system.gpu_clocks"
LEARN = "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"
_FIXES = {
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
            id=finding_id(RULE, None),
            rule=RULE,
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
            evidence=_evidence(analysis, gpu, busy, source),
            fix="; ".join(dict.fromkeys(_FIXES[name] for name in reasons)),
            caveat="An upper bound: kernels that wait for memory do not follow the clock, and the highest clock is not "
            "reached under every load." + numa_caveat(analysis),
            learn=LEARN,
            falsified_by="On a GPU that keeps its clock the mean step does not get shorter",
        )
    ]


def _busy(analysis: Analysis, gpu: GpuClocks) -> tuple[float, str]:
    """(share of the step in which kernels run, source): of windows where there are any, else of telemetry."""
    shares = [one.compute_ns_per_step / one.step_ns for one in analysis.device_losses if one.step_ns > 0]
    if shares:
        return max(shares), "profiled steps"
    return (1.0, "not known") if gpu.utilization is None else (gpu.utilization, "system.jsonl, gpu_util_pct")


def _evidence(analysis: Analysis, gpu: GpuClocks, busy: float, busy_source: str) -> tuple[Evidence, ...]:
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
