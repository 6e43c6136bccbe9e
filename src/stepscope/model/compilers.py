"""What compilers did to a run: compiles, recompiles, graph breaks, fallbacks and transfers, by step and by cause.

Times are in milliseconds with the unit in the name; a figure that no source gives is None, never 0.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place


class Change(Struct, frozen=True):
    """What a compiled version expected and what came, as the compiler writes them; at which step.

    step: The step in which the new value came.
    """

    step: int | None
    old: str | None
    new: str | None
    subject: str | None = None


class CompilerCause(Struct, frozen=True):
    """Events that have one cause, counted: same backend, kind, function, line, cause and operator.

    `kind`: compile (the first of a frame), recompile, limit_hit, failure, graph_break, fallback, transfer. `cause` is a
    word of `tables.compile_reasons`; "unknown" where the compiler's wording is not known to us, "" of the first compile
    of a function. `place` is the user's line that caused it, or None; `definition` where the compiled function begins;
    `call` the user's line that called it.

    count: Events of this cause, summed over ranks; a backward pass compiled later counts in time only.
    total_ms: Time of its events: of compilations the union of their spans per process (backward passes compiled later
        included), of transfers the sum; summed over processes. Causes may overlap one another. Missing where no event
        has a duration.
    longest_ms: The longest of the events that were told one by one.
    in_main_steps_ms: Of total_ms what lies inside steps of any kind.
    steps: Numbers of the steps it happened in, the first 64.
    step_count: Different steps it happened in.
    first_step: Number of the first of these steps.
    last_step: Number of the last of these steps.
    changes: What the compiled version expected (old) and what came (new), in order of steps, the first 64; what several
        ranks saw alike is one.
    cache_entries: Compiled versions of the function before an event, at most.
    limit: Versions a function may have, as the compiler was configured.
    ranks: Ranks it happened on.
    """

    id: str  # stable over runs of the same code
    backend: str
    kind: str
    cause: str
    text: str  # the compiler's reason of the last event: its first line, without graph id, quoted source and advice
    function: str | None
    place: Place | None
    definition: Place | None
    call: Place | None
    hint: str | None  # the compiler's own advice
    operator: str | None  # of fallbacks, transfers and some graph breaks
    subject: str | None  # what changed, most often: tensor and dimension, attribute, argument: "x.size(0)", "s.calls"
    count: int
    total_ms: float | None
    longest_ms: float | None
    steps: tuple[int, ...]
    step_count: int
    first_step: int | None
    last_step: int | None
    changes: tuple[Change, ...]
    cache_entries: int | None
    limit: int | None
    ranks: tuple[int, ...]
    kinds: tuple[str, ...] = ()  # kinds of steps it happened in: train, eval
    in_main_steps_ms: float | None = None
    source: str = ""
    counted: bool = True  # False: the source tells that it happened and not how often; `count` is at least that


class CompilerSteps(Struct, frozen=True):
    """Steps of one kind of one backend, and what compiling took of them. Partly compiling steps count whole in wall.

    Counts and times are sums over ranks, shares are of the pooled wall time. A report with rates of steps alone knows
    no kinds: all is said of "train".

    steps: Steps of this kind of the processes that used the backend, all ranks; steps in profiler windows left out
        unless all are. Where nothing measured steps: MarkStep.
    compiling_steps: Of these, steps in which something was compiled or tried to be; missing of a report that says
        nothing of single steps.
    compile_ms: Time compiling took of these steps: the union of compile spans cut at the step's edges, at most the
        step; missing where no source gives durations.
    wall_ms: Wall time of these steps, summed over ranks; estimated from the rates of a report where `estimated` says
        so.
    share: compile_ms by wall_ms, between 0 and 1.
    late_compile_ms: compile_ms of the steps after warm-up: after the first ten steps of the kind in each process.
    late_wall_ms: wall_ms of the steps after warm-up.
    late_share: late_compile_ms by late_wall_ms.
    compiles: Compilations in these steps, recompilations included.
    recompiles: Recompilations in these steps; missing, as the next two, where no source tells.
    transfers: Transfers from device to host in these steps.
    breaks: Graph breaks told in these steps.
    mean_compiling_ms: Mean wall time of the compiling steps.
    mean_quiet_ms: Mean wall time of the steady steps that did not compile (no warm-up, window or first batch).
    """

    backend: str
    kind: str  # train | eval
    steps: int
    compiling_steps: int | None
    compile_ms: float | None
    wall_ms: float | None
    share: float | None
    late_compile_ms: float | None
    late_wall_ms: float | None
    late_share: float | None
    compiles: int
    recompiles: int | None
    transfers: int | None
    breaks: int | None
    mean_compiling_ms: float | None
    mean_quiet_ms: float | None
    estimated: bool = False


class CompilerPoint(Struct, frozen=True):
    """A step of the lead rank in which something was compiled, transferred or broken. Thinned where there are many.

    step: Number of the step.
    wall_ms: Its wall time; missing where nothing measured it.
    compile_ms: What compiling took of it: union of spans; missing where no event of it has a duration and nothing
        measured it.
    compiles: Compilations in it, of all backends, on the lead rank.
    recompiles: Recompilations among them that were told as such.
    breaks: Graph breaks told in it.
    transfers: Transfers from device to host in it.
    """

    step: int
    kind: str
    wall_ms: float | None
    compile_ms: float | None
    compiles: int
    recompiles: int
    breaks: int
    transfers: int


class CompilerMetric(Struct, frozen=True):
    """A metric or counter of a torch_xla report, whole-run. `unit` of total and percentiles: "ms", "bytes" or "count".

    Percentiles and rates stand on the last samples only (1,024 by default), which is how torch_xla keeps them.

    samples: Samples of the whole run; missing of a counter.
    total (as `unit`): Sum of all samples in `unit` (ms, bytes or count), or the counter's value.
    per_second: Samples per second over the last samples (1,024 by default).
    value_per_second (`unit`/s): Sum of values per second in `unit`, over the same samples.
    percentiles (as `unit`): Pairs of percent and value in `unit`, over the same samples.
    rank: Number of the rank.
    """

    name: str
    kind: str  # metric | counter
    unit: str
    samples: int | None
    total: float
    per_second: float | None
    value_per_second: float | None
    percentiles: tuple[tuple[float, float], ...]
    rank: int | None = None


class CompilerWarning(Struct, frozen=True):
    """A line as torch_xla's debug profiler words it. `rule`: too_frequent, too_slow, not_lowered.

    `verbatim`: the log holds this very line, the last of its kind. A line of unknown form has the rule "other".

    count: Counts as the line states them; of operators without lowering, their calls.
    steps: Steps as the line states them.
    repeats: How often a log holds a line of this kind.
    """

    rule: str
    text: str
    backend: str
    metric: str
    count: int | None
    steps: int | None
    verbatim: bool
    repeats: int
    source: str


class EagerAfterLimit(Struct, frozen=True):
    """Steps before and after a function ran into its limit of versions.

    step: Number of the step in which the limit was first hit.
    before_ms: Median over the steps before the first limit hit, of its kind and process, of wall time less compile
        time; windows and first batches left out, ranks pooled. Missing with fewer than 3 steps.
    before_steps: Steps before_ms stands on.
    after_ms: The same of the steps after it.
    after_steps: Steps after_ms stands on.
    """

    cause: str  # id of the limit's CompilerCause
    step: int | None
    before_ms: float | None
    before_steps: int
    after_ms: float | None
    after_steps: int
    before_compiling: bool = False  # before_ms stands on steps that compiled: what surrounds compiling is still in it


class CompilerFacts(Struct, frozen=True):
    """One backend of a run ("torch.compile", "torch_xla"), all ranks together.

    ranks: Ranks that used this backend.
    compiles: Compilations, recompilations included, summed over ranks. torch.compile: compiled frames; a backward pass
        compiled later counts in time only. torch_xla: samples of CompileTime and EagerOpCompileTime, or the events
        where these are more (counters can be cleared).
    recompiles: Compilations of a frame that had a compiled version already; missing where no source tells them from
        first ones, as in reports of torch_xla.
    limit_hits: Recompilations refused because the frame had as many versions as the limit allows.
    failures: Compilations that ended without compiled code, limit hits left out.
    graph_breaks: Graph breaks as told while compiling: one per break and compilation of the frame around it, so
        recompilations tell a break again. Missing where they were not watched.
    transfers: Transfers from device to host; missing where no source counts them.
    fallbacks: Calls of operators that ran on the CPU for want of a lowering.
    compile_ms: Time spent on compiling, failed and refused attempts included: per process the union of the spans, so
        that what lies in one another counts once, summed over processes. Where spans are not known, the sum of
        durations. Missing without durations.
    in_steps_ms: Of compile_ms what lies inside steps of any kind, windows included; where no step has a wall time, what
        names the step it happened in.
    longest_ms: The longest single compilation; of torch_xla also the highest percentile of CompileTime, which stands on
        the last samples.
    marked_steps: Steps as torch_xla counts them (MarkStep), of the process with the most.
    step_estimate_ms: Mean step estimated from the rates of reports: the longest time any metric covers by samples /
        rate, at least the compile time, by MarkStep. Missing where steps were measured.
    unknown: Events whose wording is not known to us, and messages that could not be read.
    """

    backend: str
    versions: tuple[str, ...]
    ranks: tuple[int, ...]
    source: str  # what the figures stand on
    compiles: int
    recompiles: int | None
    limit_hits: int
    failures: int
    graph_breaks: int | None
    transfers: int | None
    fallbacks: int
    compile_ms: float | None
    in_steps_ms: float | None
    longest_ms: float | None
    marked_steps: int | None
    step_estimate_ms: float | None
    unknown: int


class CompilersView(Struct, frozen=True):
    """All of it. `notes` say what was not seen and why; `traced` when spans come from profiler traces."""

    backends: tuple[CompilerFacts, ...]
    causes: tuple[CompilerCause, ...]  # most expensive first; those without time behind, by count
    steps: tuple[CompilerSteps, ...]
    points: tuple[CompilerPoint, ...]
    metrics: tuple[CompilerMetric, ...]
    warnings: tuple[CompilerWarning, ...]
    limits: tuple[EagerAfterLimit, ...] = ()
    storms: tuple[CompileStorm, ...] = ()
    notes: tuple[str, ...] = ()


class CompileStorm(Struct, frozen=True):
    """What the rules on a whole backend ask: how often it compiled per step, recently, and after a quiet time.

    `windows`, `late_step` and what belongs to them are of the one rank and kind of steps (`kind`) where they are worst.

    compiles: Compilations of the rank that compiled most, warm-up included: samples of CompileTime of torch_xla,
        compiled frames of torch.compile.
    steps: Steps of that rank, of all kinds, warm-up included: MarkStep of torch_xla.
    windows: Steps after warm-up (ten) at whose end at least 3 of the last 10 steps had compiled, of the rank and kind
        of step where there are most; missing where nothing tells single steps.
    first_window_step: Number of the first of these steps.
    late_step: Number of the first step that compiled after at least 50 steps of its kind without a compilation.
    quiet_before: Steps without a compilation before it.
    late_steps: Steps after warm-up that compiled.
    late_ms: late_compile_ms of all kinds together.
    late_share: late_ms by the wall time of all steps after warm-up.
    """

    backend: str
    compiles: int
    steps: int
    whole_run: bool  # more than the article's rate over all steps
    windows: int | None
    first_window_step: int | None
    late_step: int | None
    quiet_before: int | None
    late_ms: float | None
    late_share: float | None
    kind: str | None = None
    late_steps: int | None = None


class CompilerCheck(Struct, frozen=True):
    """What a check asked for by name found. `judged`: a source could tell; only what is judged can have failed."""

    name: str  # recompile | graph-break
    failed: bool
    judged: bool
    text: str  # one line
    place: Place | None
