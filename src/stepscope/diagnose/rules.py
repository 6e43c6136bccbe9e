"""All rules: those of the categories' files, where a new one is a function under `@rule` and nothing else.

A rule names its inputs; where one is missing the rule abstains by name instead of guessing from the rest. A risk is no
finding: it has no cost, no share and no rank among the losses.
"""

from __future__ import annotations

from stepscope.diagnose import (
    communication,
    compiled_run,
    compute,
    device,
    host,
    input,
    machine,
    memory,
    needless_work,
    ranks,
    training,
)
from stepscope.diagnose.rule import Rule

_FILES = (input, host, machine, device, compute, memory, ranks, communication, needless_work)

# The order in which rules stand in `docs/findings.md` and abstain; those that are not listed follow, as in their files.
_ORDER = (
    *("input.loader_bound", "host.per_item_loop", "host.python_on_critical_path"),
    *("host.logging", "host.anomaly_detection", "io.blocking_in_step", "input.prefetch_waves", "input.first_batch"),
    *("host.step_drift", "system.garbage_collection", "system.threads_beyond_cores"),
    *("system.cpu_throttled", "system.children_hold_cores", "system.other_processes", "system.swapping_or_faults"),
    *("system.profiler_overhead", "compile.limit_hit", "compile.close_to_limit"),
    *("compile.same_cause", "compile.recompiles", "compile.too_frequent", "compile.storm", "compile.late"),
    *("compile.share", "compile.slow", "compile.graph_break", "compile.unlowered"),
    *("transfer.device_to_host", "compute.execution_slow", "sync.host_waits"),
    *("memory.allocator_in_steps", "launch.short_kernels", "host.device_idle"),
    *("transfer.made_on_host", "transfer.host_to_device", "compute.no_tensor_cores", "compute.attention_unfused"),
    *("compute.layout_conversions", "compute.unfused_pointwise", "compute.cpu_only"),
    *("communication.straggler", "communication.unbalanced_work", "communication.late_ranks"),
    *(
        "communication.many_small_collectives",
        "communication.exposed",
        "communication.gloo_on_gpu",
        "memory.allocator_retries",
    ),
    *("memory.page_faults", "transfer.device_to_device", "launch.unfused_optimizer"),
    *("launch.zeroing_gradients", "launch.compiled_kernels", "compute.small_batch"),
    *(
        "compute.sizes_off_tiles",
        "compute.serial_linalg",
        "communication.data_parallel",
        "host.evaluation_between_steps",
    ),
    *("host.evaluation_in_step", "host.model_copied_in_step", "compute.double_precision"),
    *("compute.recompute", "compute.wasted_operators", "memory.short_lived_gradients", "system.gpu_clocks"),
)
_found = [*compiled_run.ON_COMPILERS, *(value for file in _FILES for value in vars(file).values())]
_FOUND = {value.name: value for value in _found if isinstance(value, Rule)}
RULES: tuple[Rule, ...] = tuple(_FOUND[name] for name in dict.fromkeys((*_ORDER, *_FOUND)))
RISKS = (ranks.hang, *machine.RISKS, *memory.RISKS, *training.RISKS)
