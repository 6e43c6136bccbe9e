"""The table of rules. A new rule is a function in its category's file and a line here.

A rule names its inputs; where one is missing the rule abstains by name instead of guessing from the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from stepscope.diagnose import (
    compile,
    compiled_run,
    compute,
    device_idle,
    host,
    input,
    machine,
    memory,
    needless_work,
    ranks,
)
from stepscope.diagnose.common import train_steps
from stepscope.diagnose.compile import TORCH, XLA, basis
from stepscope.diagnose.compiled_run import of_rule
from stepscope.diagnose.input import profiled
from stepscope.diagnose.thresholds import PYTHON
from stepscope.model import Analysis, Finding
from stepscope.model.compilers import CompilerFacts
from stepscope.model.device_losses import PassFacts
from stepscope.model.machine import MachineFacts


class Need(Struct, frozen=True):
    """An input of rules: how the report calls it, and whether an analysis has it.

    `quiet`: the run did not use what the rule is about. Then nothing is missing and nobody wants to read of it.
    """

    name: str
    present: Callable[[Analysis], bool]
    quiet: bool = False


class Rule(Struct, frozen=True):
    """`judge` is only called when every need is present.

    Without one of `helps` the rule sees a part only: where it then finds nothing, it abstains by name as well.
    """

    name: str
    category: str
    needs: tuple[Need, ...]
    judge: Callable[[Analysis], list[Finding]]
    helps: tuple[Need, ...] = ()

    def traced(self, analysis: Analysis) -> bool:
        """Whether what the rule says stands on traces."""
        if DATA_WAIT in self.needs:
            return analysis.loader is None
        traces = (WINDOW, COLLECTIVES, DEVICE_WORK, TRAINED)
        return any(need in traces for need in self.needs) or (IO_SEEN in self.needs and analysis.stacks is None)


STEPS = Need("training steps", lambda analysis: train_steps(analysis) is not None)
DATA_WAIT = Need("the data wait of the steps", lambda analysis: analysis.loader is not None or bool(profiled(analysis)))
# Without a DataLoader the data wait is the gap before the first operator: whatever fills it is Python work or file I/O,
# and the rules for those name its lines.
LOADER = Need("a torch DataLoader in the training process", lambda analysis: _has_loader(analysis))
STACKS = Need("sampled stacks of steady steps", lambda analysis: analysis.python is not None)
WINDOW = Need("a profiler window with complete steps and Python stacks", lambda analysis: analysis.loops is not None)
PYTHON_TOLD = Need(
    "a profiler window, to tell Python from operators at lines that call no library in Python",
    lambda analysis: analysis.loops is not None or _on_top(analysis) < PYTHON.floor,
)
IO_SEEN = Need("sampled stacks or a profiler window with Python stacks", lambda analysis: analysis.io is not None)


def _on_top(analysis: Analysis) -> float:
    """The part of the samples with a line of the user's on top, where the sampler shows nothing of what it calls."""
    lines = analysis.stacks.hot_lines if analysis.stacks is not None else ()
    return sum(
        line.share for line in lines if line.role == "rank" and line.phase != "data_wait" and line.library_leaf is None
    )


def _has_loader(analysis: Analysis) -> bool:
    loader = analysis.loader
    if loader is not None:
        return loader.num_workers is not None or loader.site is not None
    return not profiled(analysis) or (analysis.machine is not None and bool(analysis.machine.trace_loaders))


def _machine(has: Callable[[MachineFacts], bool]) -> Callable[[Analysis], bool]:
    return lambda analysis: analysis.machine is not None and has(analysis.machine)


JOURNAL = Need("the journal of events", _machine(lambda facts: facts.journaled))
WAVES = Need(
    "a DataLoader with two workers or more, and enough steps", _machine(lambda f: f.waves is not None), quiet=True
)
EPOCHS = Need(
    "a DataLoader with workers, iterated again while training", _machine(lambda f: f.epochs is not None), quiet=True
)
CORES = Need("telemetry of the main thread's wait for a core", _machine(lambda facts: facts.cpu is not None))
CHILDREN = Need(
    "processes that the script started",
    _machine(lambda f: f.children is not None and bool(f.children.groups)),
    quiet=True,
)
THREADS = Need("the number of torch's threads", _machine(lambda f: f.cpu is not None and f.cpu.threads is not None))
QUOTA = Need(
    "the throttled time of the cgroup", _machine(lambda f: f.cpu is not None and f.cpu.throttled_share is not None)
)
MEMORY = Need(
    "telemetry of page faults and memory pressure",
    _machine(lambda facts: facts.memory is not None and facts.memory.stalled_pct is not None),
)
PAGE_FAULTS = Need("page faults of steady steps", _machine(lambda facts: facts.page_faults is not None))
FAULT_COST = Need(
    "what a page fault costs on the machine, measured when the run ended",
    _machine(lambda f: f.page_faults is not None and f.page_faults.cost_ms_per_step is not None),
)
GPU_READINGS = Need("telemetry of the GPU's clocks", _machine(lambda facts: bool(facts.gpus)))
MANY_STEPS = Need("60 steady training steps", _machine(lambda facts: facts.drift is not None))
OWN_PROFILER = Need(
    "training steps inside and outside the script's own profiler",
    _machine(lambda facts: facts.profiler is not None and facts.journaled),  # whose windows they are stands there
    quiet=True,
)


def _backend(name: str) -> Callable[[Analysis], bool]:
    return lambda analysis: any(facts.backend == name for facts in _backends(analysis))


def _backends(analysis: Analysis) -> tuple[CompilerFacts, ...]:
    return analysis.compilers.backends if analysis.compilers is not None else ()


def _has_basis(analysis: Analysis) -> bool:
    view = analysis.compilers
    return view is not None and any(basis(view, facts) is not None for facts in view.backends)


ON_DEVICE = Need(
    "training on a device", lambda a: bool(a.device_losses) or any(d != "cpu" for d in a.devices), quiet=True
)
DEVICE_WORK = Need("a profiler trace with device work", lambda a: bool(a.device_losses))
NAMED_STEPS = Need("steps named in the trace", lambda a: any(one.has_steps for one in a.device_losses))
CAPABILITY = Need(
    "the compute capability of the GPU",
    lambda a: any(gpu.capability for one in a.device_losses for gpu in one.gpus),
)
SHAPES = Need("shapes of operators in the trace", lambda a: any(one.has_shapes for one in a.device_losses))
BATCH = Need(
    "the batch by shapes of layers' inputs, and the blocks of kernels",
    lambda a: any(one.batch_size is not None and one.filling_share is not None for one in a.device_losses),
)
GPU_THERE = Need("a GPU in the machine", lambda a: bool(compute.gpu_names(a)), quiet=True)
COMMUNICATES = Need(
    "several ranks",
    lambda a: (
        len(a.run.ranks) > 1 or (a.run.world_size or 1) > 1 or (a.views is not None and bool(a.views.communication))
    ),
    quiet=True,
)
SEVERAL_RANKS = Need("several ranks", lambda a: len(a.run.ranks) > 1, quiet=True)
RANK_STEPS = Need("steady steps of every rank, with their phases", lambda a: a.ranks is not None)
RANK_SAMPLES = Need(
    "the samples of every rank's steps",
    lambda a: a.ranks is not None and all(work.samples is not None for work in a.ranks.ranks),
)
COLLECTIVES = Need(
    "a profiler window or trace with collectives", lambda a: a.views is not None and bool(a.views.communication)
)
EXPOSURE = Need(  # what hides communication: work of devices, or operators where ranks train on processors
    "a profiler trace with device work", lambda a: DEVICE_WORK.present(a) or not ON_DEVICE.present(a)
)
COMPILED = Need("compilation events of torch.compile or torch_xla", lambda a: a.compilers is not None, quiet=True)
TORCH_COMPILE = Need("compilation events of torch.compile", _backend(TORCH), quiet=True)
TORCH_XLA = Need("events or a report of torch_xla", _backend(XLA), quiet=True)
TRANSFERRED = Need(
    "transfers from the device", lambda a: any(facts.transfers is not None for facts in _backends(a)), quiet=True
)
STEP_TIMES = Need("training steps, or rates of a torch_xla report", _has_basis)
COMPILE_TIMES = Need("durations of compilations", lambda a: any(facts.compile_ms is not None for facts in _backends(a)))
AGAIN = Need(
    "recompilations told from first compilations",
    lambda a: any(facts.recompiles is not None for facts in _backends(a) if facts.backend == TORCH),
)
BREAKS = Need("graph breaks", lambda a: any(facts.graph_breaks is not None for facts in _backends(a)))

MEMORY_READINGS = Need(
    "readings of the device's memory in the journal",
    lambda a: a.memory_losses is not None and a.memory_losses.device_readings,
)


def _trained(has: Callable[[PassFacts], bool]) -> Callable[[Analysis], bool]:
    return lambda analysis: analysis.passes is not None and any(has(run) for run in analysis.passes.runs)


TRAINED = Need("a profiler trace of training steps", _trained(lambda run: run.steps > 0))
COPYING = Need(
    "sampled stacks of steady steps, or a profiler trace of training steps with Python functions",
    lambda a: a.passes is not None and (a.passes.copies is not None or any(run.functions for run in a.passes.runs)),
)
MODULE_CALLS = Need("calls of modules in the trace", _trained(lambda run: run.modules))
INPUT_TYPES = Need("types of operators' inputs in the trace", _trained(lambda run: run.types))
INPUT_SHAPES = Need("shapes of operators' inputs in the trace", _trained(lambda run: run.shapes))
NODES = Need("numbers of autograd nodes in the trace", _trained(lambda run: run.numbered))

_CAUSES = (TORCH_COMPILE, STEP_TIMES, COMPILE_TIMES, AGAIN)
_RUN = (COMPILED, STEP_TIMES, COMPILE_TIMES)
_TRACED = (ON_DEVICE, DEVICE_WORK)
_RANKS = (SEVERAL_RANKS, STEPS, RANK_STEPS)

RULES: tuple[Rule, ...] = (
    Rule(input.LOADER_RULE, "input", (STEPS, DATA_WAIT, LOADER), input.loader_bound),
    Rule(host.LOOP_RULE, "host", (STEPS, WINDOW), host.per_item_loop),
    Rule(host.PYTHON_RULE, "host", (STEPS, STACKS), host.python_on_critical_path, helps=(PYTHON_TOLD,)),
    Rule(host.IO_RULE, "io", (STEPS, IO_SEEN), host.blocking_in_step),
    Rule(input.WAVES_RULE, "input", (STEPS, WAVES), input.prefetch_waves),
    Rule(input.FIRST_RULE, "input", (STEPS, EPOCHS), input.first_batch),
    Rule(host.DRIFT_RULE, "host", (STEPS, MANY_STEPS), host.step_drift),
    Rule(machine.GC_RULE, "system", (STEPS, JOURNAL), machine.garbage_collection),
    Rule(machine.THREADS_RULE, "system", (STEPS, CORES, THREADS), machine.threads_beyond_cores),
    Rule(machine.THROTTLED_RULE, "system", (STEPS, CORES, QUOTA), machine.cpu_throttled),
    Rule(machine.CHILDREN_RULE, "system", (STEPS, CORES, CHILDREN), machine.children_hold_cores),
    Rule(machine.OTHERS_RULE, "system", (STEPS, CORES), machine.other_processes),
    Rule(machine.MEMORY_RULE, "system", (STEPS, MEMORY), machine.swapping_or_faults),
    Rule(machine.PROFILER_RULE, "system", (STEPS, OWN_PROFILER), machine.profiler_overhead),
    *(
        Rule(name, "compile", _CAUSES, of_rule(name))
        for name in (compile.LIMIT_RULE, compile.CLOSE_RULE, compile.SAME_RULE, compile.ONCE_RULE)
    ),
    *(
        Rule(name, "compile", _RUN, of_rule(name))
        for name in (
            compiled_run.FREQUENT_RULE,
            compiled_run.STORM_RULE,
            compiled_run.LATE_RULE,
            compiled_run.SHARE_RULE,
            compiled_run.SLOW_RULE,
        )
    ),
    Rule(
        compile.BREAK_RULE, "compile", (TORCH_COMPILE, STEP_TIMES, COMPILE_TIMES, BREAKS), of_rule(compile.BREAK_RULE)
    ),
    Rule(compiled_run.UNLOWERED_RULE, "compile", (TORCH_XLA, STEP_TIMES), of_rule(compiled_run.UNLOWERED_RULE)),
    Rule(compiled_run.TRANSFER_RULE, "transfer", (TRANSFERRED, STEP_TIMES), of_rule(compiled_run.TRANSFER_RULE)),
    Rule(compiled_run.EXECUTION_RULE, "compute", (TORCH_XLA, STEP_TIMES), of_rule(compiled_run.EXECUTION_RULE)),
    Rule(device_idle.SYNC_RULE, "sync", _TRACED, device_idle.host_waits),
    Rule(device_idle.ALLOCATOR_RULE, "memory", (*_TRACED, NAMED_STEPS), device_idle.allocator_in_steps),
    Rule(device_idle.LAUNCH_RULE, "launch", _TRACED, device_idle.short_kernels),
    Rule(device_idle.HOST_RULE, "host", _TRACED, device_idle.device_idle),
    Rule(device_idle.TO_DEVICE_RULE, "transfer", _TRACED, device_idle.host_to_device),
    Rule(compute.MATRIX_RULE, "compute", (*_TRACED, CAPABILITY), compute.no_tensor_cores),
    Rule(compute.ATTENTION_RULE, "compute", _TRACED, compute.attention_unfused),
    Rule(compute.LAYOUT_RULE, "compute", _TRACED, compute.layout_conversions),
    Rule(compute.POINTWISE_RULE, "compute", _TRACED, compute.unfused_pointwise),
    Rule(compute.CPU_RULE, "compute", (STEPS, GPU_THERE), compute.cpu_only),
    Rule(ranks.STRAGGLER_RULE, "communication", _RANKS, ranks.straggler),
    Rule(ranks.UNBALANCED_RULE, "communication", (*_RANKS, RANK_SAMPLES), ranks.unbalanced_work),
    Rule(ranks.SMALL_RULE, "communication", (COMMUNICATES, COLLECTIVES), ranks.many_small_collectives),
    Rule(ranks.EXPOSED_RULE, "communication", (COMMUNICATES, EXPOSURE, COLLECTIVES), ranks.exposed),
    Rule(ranks.GLOO_RULE, "communication", (COMMUNICATES, *_TRACED, COLLECTIVES), ranks.gloo_on_gpu),
    Rule(memory.RETRIES_RULE, "memory", (STEPS, ON_DEVICE, MEMORY_READINGS), memory.allocator_retries),
    Rule(memory.FAULTS_RULE, "memory", (STEPS, PAGE_FAULTS, FAULT_COST), memory.page_faults),
    Rule(device_idle.ON_DEVICE_RULE, "transfer", _TRACED, device_idle.device_to_device),
    Rule(device_idle.OPTIMIZER_RULE, "launch", _TRACED, device_idle.unfused_optimizer),
    Rule(device_idle.ZERO_RULE, "launch", _TRACED, device_idle.zeroing_gradients),
    Rule(device_idle.COMPILED_RULE, "launch", _TRACED, device_idle.compiled_kernels),
    Rule(device_idle.BATCH_RULE, "compute", (*_TRACED, BATCH), device_idle.small_batch),
    Rule(compute.TILES_RULE, "compute", (*_TRACED, SHAPES), compute.sizes_off_tiles),
    Rule(compute.LINALG_RULE, "compute", _TRACED, compute.serial_linalg),
    Rule(ranks.DATA_PARALLEL_RULE, "communication", _TRACED, ranks.data_parallel),
    Rule(needless_work.EVALUATION_RULE, "host", (TRAINED, MODULE_CALLS), needless_work.evaluation_in_step),
    Rule(needless_work.COPY_RULE, "host", (COPYING,), needless_work.model_copied_in_step),
    Rule(needless_work.DOUBLE_RULE, "compute", (TRAINED, INPUT_TYPES), needless_work.double_precision),
    Rule(needless_work.RECOMPUTE_RULE, "compute", (TRAINED, NODES), needless_work.recompute),
    Rule(needless_work.GRADIENTS_RULE, "memory", (TRAINED, INPUT_SHAPES), needless_work.short_lived_gradients),
    Rule(machine.CLOCKS_RULE, "system", (STEPS, ON_DEVICE, GPU_READINGS), machine.gpu_clocks),
)
