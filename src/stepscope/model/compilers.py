"""What compilers did to a run: compiles, recompiles, graph breaks, fallbacks and transfers, by step and by cause.

Times are in milliseconds with the unit in the name; a figure that no source gives is None, never 0.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place


class Change(Struct, frozen=True):
    """What a compiled version expected and what came, as the compiler writes them; at which step."""

    step: int | None
    old: str | None
    new: str | None
    subject: str | None = None


class CompilerCause(Struct, frozen=True):
    """Events that have one cause, counted: same backend, kind, function, line, cause and operator.

    A backward pass that is compiled later counts in the times of the compilation it belongs to, not in `count`.
    `kind`: compile (the first of a frame), recompile, limit_hit, failure, graph_break, fallback, transfer.
    `cause` is a word of `tables.compile_reasons`; "unknown" where the compiler's wording is not known to us, "" of the
    first compile of a function.
    `place` is the user's line that caused it, or None; `definition` where the compiled function begins; `call` the
    user's line that called it.
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
    total_ms: float | None  # union of the spans of each rank, summed over ranks; None where no event has a duration
    longest_ms: float | None  # of the events that were told one by one
    steps: tuple[int, ...]  # the first `STEPS_SHOWN` in which it happened
    step_count: int  # steps in which it happened
    first_step: int | None
    last_step: int | None
    changes: tuple[Change, ...]  # the first `CHANGES_SHOWN`
    cache_entries: int | None  # compiled versions of the function, at most seen
    limit: int | None  # of versions, where the compiler told
    ranks: tuple[int, ...]
    kinds: tuple[str, ...] = ()  # kinds of steps it happened in: train, eval
    in_main_steps_ms: float | None = None  # of total_ms, what was spent inside steps (of any kind)
    source: str = ""
    counted: bool = True  # False: the source tells that it happened and not how often; `count` is at least that


class CompilerSteps(Struct, frozen=True):
    """Steps of one kind of one backend, and what compiling took of them. Partly compiling steps count whole in wall.

    Steps of all ranks are pooled: counts and times are sums over ranks, shares are of the pooled wall time. Steps in
    profiler windows are left out. Where no journal and no trace gives the wall time of steps, `wall_ms` is estimated
    from the rates of a report (`estimated`), or None; such a report knows no kinds, all is said of "train".
    """

    backend: str
    kind: str  # train | eval
    steps: int
    compiling_steps: int | None  # None of a report that says nothing of single steps
    compile_ms: float | None  # union of compile spans inside these steps; None where no source gives durations
    wall_ms: float | None
    share: float | None  # compile_ms of wall_ms
    late_compile_ms: float | None  # in steps after warm-up (the first ten of each kind in each process)
    late_wall_ms: float | None  # wall time after warm-up
    late_share: float | None  # late_compile_ms of late_wall_ms
    compiles: int
    recompiles: int | None  # None, as the next two, where no source of the backend tells
    transfers: int | None
    breaks: int | None
    mean_compiling_ms: float | None  # mean wall time of the steps that compiled
    mean_quiet_ms: float | None  # of the others, warm-up, windows and first batches left out
    estimated: bool = False


class CompilerPoint(Struct, frozen=True):
    """A step of the lead rank in which something was compiled, transferred or broken. Thinned where there are many."""

    step: int
    kind: str
    wall_ms: float | None
    compile_ms: float | None  # union of spans
    compiles: int
    recompiles: int
    breaks: int
    transfers: int


class CompilerMetric(Struct, frozen=True):
    """A metric or counter of a torch_xla report, whole-run. `unit` of total and percentiles: "ms", "bytes" or "count".

    Percentiles and rates stand on the last samples only (1,024 by default), which is how torch_xla keeps them.
    """

    name: str
    kind: str  # metric | counter
    unit: str
    samples: int | None  # None of a counter
    total: float
    per_second: float | None  # samples
    value_per_second: float | None
    percentiles: tuple[tuple[float, float], ...]  # (percent, value)
    rank: int | None = None


class CompilerWarning(Struct, frozen=True):
    """A line as torch_xla's debug profiler words it. `rule`: too_frequent, too_slow, not_lowered.

    `verbatim`: the log holds this very line, the last of its kind; `repeats` is how many of its kind there are. A line
    of a form that is not known has the rule "other".
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

    `before_ms`: median wall time of the steps before the limit that did not compile; where these are fewer than three,
    of all before it, compile time left out of each (`before_compiling`). `after_ms` likewise. None with fewer than
    three steps.
    """

    cause: str  # id of the limit's CompilerCause
    step: int | None
    before_ms: float | None
    before_steps: int
    after_ms: float | None
    after_steps: int
    before_compiling: bool = False  # before_ms stands on steps that compiled: what surrounds compiling is still in it


class CompilerFacts(Struct, frozen=True):
    """One backend of a run ("torch.compile", "torch_xla"), all ranks together."""

    backend: str
    versions: tuple[str, ...]
    ranks: tuple[int, ...]
    source: str  # what the figures stand on
    compiles: int  # all kinds of compilation, recompiles included
    recompiles: int | None  # None where the source does not tell a recompile from a first compile
    limit_hits: int
    failures: int
    graph_breaks: int | None  # None where they were not watched
    transfers: int | None
    fallbacks: int
    compile_ms: float | None  # union over time where spans are known, else the sum
    in_steps_ms: float | None
    longest_ms: float | None
    marked_steps: int | None  # as the backend counts them (MarkStep); None of torch.compile
    step_estimate_ms: float | None  # mean step from the rates of a report, where nothing measured steps
    unknown: int  # events whose wording we do not know


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

    `compiles` and `steps` are of the rank that compiled most, as the article counts: every step, warm-up included, and
    samples of CompileTime by MarkStep of torch_xla, compiled frames (no backward passes) of torch.compile. `windows`,
    `late_step` and what belongs to them are of the one rank and kind of steps (`kind`) where they are worst.
    """

    backend: str
    compiles: int
    steps: int
    whole_run: bool  # more than the article's rate over all steps
    windows: int | None  # steps after warm-up at whose end at least 3 of the last 10 had compiled; None: unknown
    first_window_step: int | None
    late_step: int | None  # the first compile after a long quiet time
    quiet_before: int | None  # steps without a compile before it
    late_ms: float | None  # compile time after warm-up, of all ranks and kinds
    late_share: float | None  # of the wall time after warm-up
    kind: str | None = None
    late_steps: int | None = None  # steps after warm-up that compiled, of that rank and kind


class CompilerCheck(Struct, frozen=True):
    """What a check asked for by name found. `judged`: a source could tell; only what is judged can have failed."""

    name: str  # recompile | graph-break
    failed: bool
    judged: bool
    text: str  # one line
    place: Place | None
