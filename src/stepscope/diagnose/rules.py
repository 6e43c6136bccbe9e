"""All rules: those of the categories' files, where a new one is a function under `@rule` and nothing else.

A rule names its inputs; where one is missing the rule abstains by name instead of guessing from the rest. A risk is no
finding: it has no cost, no share and no rank among the losses.
"""

from __future__ import annotations

from stepscope.diagnose import (
    compiled_run,
    compute,
    host,
    input,
    launch,
    machine,
    memory,
    needless_work,
    ranks,
    transfer,
)
from stepscope.diagnose.rule import Rule

_FILES = (input, host, machine, compiled_run, launch, transfer, compute, memory, ranks, needless_work)

# The order in which rules stand in `docs/findings.md` and abstain; those that are not listed follow, as in their files.
_ORDER = (
    input.loader_bound,
    host.per_item_loop,
    host.python_on_critical_path,
    host.blocking_in_step,
    input.prefetch_waves,
    input.first_batch,
    host.step_drift,
    machine.garbage_collection,
    machine.threads_beyond_cores,
    machine.cpu_throttled,
    machine.children_hold_cores,
    machine.other_processes,
    machine.swapping_or_faults,
    machine.profiler_overhead,
    compiled_run.limit_hit,
    compiled_run.close_to_limit,
    compiled_run.same_cause,
    compiled_run.recompiles,
    compiled_run.too_frequent,
    compiled_run.storm,
    compiled_run.late_compilations,
    compiled_run.share,
    compiled_run.slow,
    compiled_run.graph_break,
    compiled_run.unlowered_operators,
    compiled_run.device_to_host,
    compiled_run.slow_executions,
    transfer.host_waits,
    memory.allocator_in_steps,
    launch.short_kernels,
    launch.device_idle,
    transfer.host_to_device,
    compute.no_tensor_cores,
    compute.attention_unfused,
    compute.layout_conversions,
    compute.unfused_pointwise,
    compute.cpu_only,
    ranks.straggler,
    ranks.unbalanced_work,
    ranks.many_small_collectives,
    ranks.exposed,
    ranks.gloo_on_gpu,
    memory.allocator_retries,
    memory.page_faults,
    transfer.device_to_device,
    launch.unfused_optimizer,
    launch.zeroing_gradients,
    launch.compiled_kernels,
    launch.small_batch,
    compute.sizes_off_tiles,
    compute.serial_linalg,
    ranks.data_parallel,
    needless_work.evaluation_in_step,
    needless_work.model_copied_in_step,
    needless_work.double_precision,
    needless_work.recompute,
    needless_work.short_lived_gradients,
    machine.gpu_clocks,
)
_others = (value for file in _FILES for value in vars(file).values() if isinstance(value, Rule))
RULES: tuple[Rule, ...] = tuple({rule.name: rule for rule in (*_ORDER, *_others)}.values())
RISKS = memory.RISKS
