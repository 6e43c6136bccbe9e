"""Definitions of the figures of compilers: what they did, by backend, cause, step and report."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

_WHERE = "`views.compilers`"
_CAUSE_TABLES = ("compiles", "graph-breaks", "transfers")

SECTIONS = (
    Section(
        "CompilerFacts",
        "Compilers: each backend",
        f"{_WHERE}, `backends`",
        metrics(
            ranks=("count", "Ranks that used this backend."),
            compiles=(
                "count",
                "Compilations, recompilations included, summed over ranks. torch.compile: compiled frames; a backward pass compiled later counts in time only. torch_xla: samples of CompileTime and EagerOpCompileTime, or the events where these are more (counters can be cleared).",
            ),
            recompiles=(
                "count",
                "Compilations of a frame that had a compiled version already; missing where no source tells them from first ones, as in reports of torch_xla.",
            ),
            limit_hits=("count", "Recompilations refused because the frame had as many versions as the limit allows."),
            failures=("count", "Compilations that ended without compiled code, limit hits left out."),
            graph_breaks=(
                "count",
                "Graph breaks as told while compiling: one per break and compilation of the frame around it, so recompilations tell a break again. Missing where they were not watched.",
            ),
            transfers=("count", "Transfers from device to host; missing where no source counts them."),
            fallbacks=("count", "Calls of operators that ran on the CPU for want of a lowering."),
            compile_ms=(
                "ms",
                "Time spent on compiling, failed and refused attempts included: per process the union of the spans, so that what lies in one another counts once, summed over processes. Where spans are not known, the sum of durations. Missing without durations.",
            ),
            in_steps_ms=(
                "ms",
                "Of compile_ms what lies inside steps of any kind, windows included; where no step has a wall time, what names the step it happened in.",
            ),
            longest_ms=(
                "ms",
                "The longest single compilation; of torch_xla also the highest percentile of CompileTime, which stands on the last samples.",
            ),
            marked_steps=("count", "Steps as torch_xla counts them (MarkStep), of the process with the most."),
            step_estimate_ms=(
                "ms",
                "Mean step estimated from the rates of reports: the longest time any metric covers by samples / rate, at least the compile time, by MarkStep. Missing where steps were measured.",
            ),
            unknown=("count", "Events whose wording is not known to us, and messages that could not be read."),
        ),
    ),
    Section(
        "CompilerCause",
        "Compilers: each cause",
        f"{_WHERE}, `causes`",
        metrics(
            count=(
                "count",
                "Events of this cause, summed over ranks; a backward pass compiled later counts in time only.",
            ),
            total_ms=(
                "ms",
                "Time of its events: of compilations the union of their spans per process (backward passes compiled later included), of transfers the sum; summed over processes. Causes may overlap one another. Missing where no event has a duration.",
            ),
            longest_ms=("ms", "The longest of the events that were told one by one."),
            in_main_steps_ms=("ms", "Of total_ms what lies inside steps of any kind."),
            steps=("count", "Numbers of the steps it happened in, the first 64."),
            step_count=("count", "Different steps it happened in."),
            first_step=("count", "Number of the first of these steps."),
            last_step=("count", "Number of the last of these steps."),
            changes=(
                "count",
                "What the compiled version expected (old) and what came (new), in order of steps, the first 64; what several ranks saw alike is one.",
            ),
            cache_entries=("count", "Compiled versions of the function before an event, at most."),
            limit=("count", "Versions a function may have, as the compiler was configured."),
            ranks=("count", "Ranks it happened on."),
        ),
        _CAUSE_TABLES,
    ),
    Section(
        "Change",
        "Compilers: what changed",
        f"{_WHERE}, `causes`, `changes`",
        metrics(
            step=("count", "The step in which the new value came."),
        ),
        about="`old` is what the compiled version expected, `new` what came, as the compiler writes them.",
    ),
    Section(
        "causes as a table",
        "Compilers: causes as a table",
        "columns of tables only",
        metrics(
            definition_line=("count", "Line where the compiled function begins."),
            call_line=("count", "Line of your code that called it."),
        ),
        _CAUSE_TABLES,
    ),
    Section(
        "CompilerSteps",
        "Compilers: steps by kind",
        f"{_WHERE}, `steps`",
        metrics(
            steps=(
                "count",
                "Steps of this kind of the processes that used the backend, all ranks; steps in profiler windows left out unless all are. Where nothing measured steps: MarkStep.",
            ),
            compiling_steps=(
                "count",
                "Of these, steps in which something was compiled or tried to be; missing of a report that says nothing of single steps.",
            ),
            compile_ms=(
                "ms",
                "Time compiling took of these steps: the union of compile spans cut at the step's edges, at most the step; missing where no source gives durations.",
            ),
            wall_ms=(
                "ms",
                "Wall time of these steps, summed over ranks; estimated from the rates of a report where `estimated` says so.",
            ),
            share=("share", "compile_ms by wall_ms, between 0 and 1."),
            late_compile_ms=(
                "ms",
                "compile_ms of the steps after warm-up: after the first ten steps of the kind in each process.",
            ),
            late_wall_ms=("ms", "wall_ms of the steps after warm-up."),
            late_share=("share", "late_compile_ms by late_wall_ms."),
            compiles=("count", "Compilations in these steps, recompilations included."),
            recompiles=("count", "Recompilations in these steps; missing, as the next two, where no source tells."),
            transfers=("count", "Transfers from device to host in these steps."),
            breaks=("count", "Graph breaks told in these steps."),
            mean_compiling_ms=("ms", "Mean wall time of the compiling steps."),
            mean_quiet_ms=(
                "ms",
                "Mean wall time of the steady steps that did not compile (no warm-up, window or first batch).",
            ),
        ),
        ("compile-steps",),
    ),
    Section(
        "CompilerPoint",
        "Compilers: each step",
        f"{_WHERE}, `points`",
        metrics(
            step=("count", "Number of the step."),
            wall_ms=("ms", "Its wall time; missing where nothing measured it."),
            compile_ms=(
                "ms",
                "What compiling took of it: union of spans; missing where no event of it has a duration and nothing measured it.",
            ),
            compiles=("count", "Compilations in it, of all backends, on the lead rank."),
            recompiles=("count", "Recompilations among them that were told as such."),
            breaks=("count", "Graph breaks told in it."),
            transfers=("count", "Transfers from device to host in it."),
        ),
        ("compile-steps",),
    ),
    Section(
        "CompilerMetric",
        "Compilers: metrics of torch_xla",
        f"{_WHERE}, `metrics`",
        metrics(
            samples=("count", "Samples of the whole run; missing of a counter."),
            total=("as `unit`", "Sum of all samples in `unit` (ms, bytes or count), or the counter's value."),
            per_second=("1/s", "Samples per second over the last samples (1,024 by default)."),
            value_per_second=("`unit`/s", "Sum of values per second in `unit`, over the same samples."),
            percentiles=("as `unit`", "Pairs of percent and value in `unit`, over the same samples."),
            rank=("count", "Number of the rank."),
        ),
        ("xla-metrics",),
    ),
    Section(
        "metrics as a table",
        "Compilers: percentiles as a table",
        "columns of tables only",
        metrics(
            **{
                f"p{percent}": ("as `unit`", f"{percent} percent of the last samples are at most this.")
                for percent in (1, 5, 10, 20, 50, 80, 90, 95, 99)
            }
        ),
        ("xla-metrics",),
    ),
    Section(
        "CompilerWarning",
        "Compilers: warnings in torch_xla's words",
        f"{_WHERE}, `warnings`",
        metrics(
            count=("count", "Counts as the line states them; of operators without lowering, their calls."),
            steps=("count", "Steps as the line states them."),
            repeats=("count", "How often a log holds a line of this kind."),
        ),
    ),
    Section(
        "CompileStorm",
        "Compilers: how often",
        f"{_WHERE}, `storms`",
        metrics(
            compiles=(
                "count",
                "Compilations of the rank that compiled most, warm-up included: samples of CompileTime of torch_xla, compiled frames of torch.compile.",
            ),
            steps=("count", "Steps of that rank, of all kinds, warm-up included: MarkStep of torch_xla."),
            windows=(
                "count",
                "Steps after warm-up (ten) at whose end at least 3 of the last 10 steps had compiled, of the rank and kind of step where there are most; missing where nothing tells single steps.",
            ),
            first_window_step=("count", "Number of the first of these steps."),
            late_step=(
                "count",
                "Number of the first step that compiled after at least 50 steps of its kind without a compilation.",
            ),
            quiet_before=("count", "Steps without a compilation before it."),
            late_steps=("count", "Steps after warm-up that compiled."),
            late_ms=("ms", "late_compile_ms of all kinds together."),
            late_share=("share", "late_ms by the wall time of all steps after warm-up."),
        ),
    ),
    Section(
        "EagerAfterLimit",
        "Compilers: after the limit",
        f"{_WHERE}, `limits`",
        metrics(
            step=("count", "Number of the step in which the limit was first hit."),
            before_ms=(
                "ms",
                "Median over the steps before the first limit hit, of its kind and process, of wall time less compile time; windows and first batches left out, ranks pooled. Missing with fewer than 3 steps.",
            ),
            before_steps=("count", "Steps before_ms stands on."),
            after_ms=("ms", "The same of the steps after it."),
            after_steps=("count", "Steps after_ms stands on."),
        ),
    ),
)
