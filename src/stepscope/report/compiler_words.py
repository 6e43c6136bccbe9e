"""What compilers did to a run in words, the same on the terminal and on the page. Plain text, not escaped.

Rows are those of the view `compilers` in the document (`model.compilers` as plain values).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.diagnose.compile import CAUSE_WORDS
from stepscope.model import Report
from stepscope.model.counted import things
from stepscope.report import words

Row = Mapping[str, Any]

SMALLEST_SHARE = 0.01  # of the time of steps: less compiling is not worth words in a headline
SHOWN_VALUES = 3  # of a value that changes again and again
MAX_VALUE = 40  # characters of such a value
MAX_OPERATORS = 6  # named in one sentence
RULES = ("compile.", "transfer.", "sync.")  # beginnings of the names of rules that can tell a cause

NAMED = ("limit_hit", "failure", "graph_break")  # kinds that the words of a cause begin with
CAUSES = {cause: said.shown for cause, said in CAUSE_WORDS.items()}  # why, where nothing says what changed


def view_of(report: Report) -> Mapping[str, Any] | None:
    """The view, None where no compiler was seen."""
    view = report.views.get("compilers")
    return view if view and (view["backends"] or view["warnings"]) else None


def warns(report: Report) -> bool:
    view = view_of(report)
    return bool(view and view["warnings"])


def counted(number: int, kind: str) -> str:
    """ "1 recompile", "12 recompiles"."""
    return things(number, words.COMPILER_EVENTS.get(kind, kind))


def backend(facts: Row) -> str:
    versions = f" ({', '.join(facts['versions'][:2])})" if facts["versions"] else ""
    name = facts["backend"] + versions
    recompiles = f" ({words.count(facts['recompiles'])} of them recompiles)" if facts["recompiles"] else ""
    said = [counted(facts["compiles"], "compile") + recompiles] if facts["compiles"] else []
    hits = facts["limit_hits"]
    if hits:
        said.append(f"{words.count(hits)} {'time' if hits == 1 else 'times'} at the limit of versions")
    said += [
        counted(facts[key], kind)
        for key, kind in (("failures", "failure"), ("graph_breaks", "graph_break"), ("transfers", "transfer"))
        if facts[key]
    ]
    if facts["fallbacks"]:
        said.append(f"{counted(facts['fallbacks'], 'fallback')} of operators it has no code for")
    spent = ""
    if facts["compile_ms"]:
        longest = facts["longest_ms"]
        single = f", the longest {words.milliseconds(longest)}" if longest and facts["compiles"] > 1 else ""
        spent = f"; compiling took {words.milliseconds(facts['compile_ms'])}{single}"
    return f"{name}: {', '.join(said) or 'no compile is counted'}{spent}"


def kind_note(report: Report, kind: str) -> str | None:
    """How much of the time of steps of one kind compiling was, for the headline; None where it was little."""
    view = view_of(report)
    rows = [row for row in view["steps"] if row["kind"] == kind] if view else []
    rows = [row for row in rows if (row["share"] or 0) >= SMALLEST_SHARE]
    if not rows:
        return None
    row = max(rows, key=lambda row: row["share"])
    share = f"{'about ' if row['estimated'] else ''}{words.percent(row['share'])}"
    text = f"compiling was {share} of the time of all {things(row['steps'], f'{words.term(kind)} step')}"
    if row["compiling_steps"] and row["mean_compiling_ms"] is not None:
        each = "each " if row["compiling_steps"] > 1 else ""
        text += (
            f"; {words.count(row['compiling_steps'])} compiled, {each}{words.milliseconds(row['mean_compiling_ms'])}"
        )
    return text


def after_warmup(row: Row) -> str | None:
    """Compiling after warm-up, which a run that goes on keeps paying."""
    if not row["late_compile_ms"]:
        return None
    share = f", {words.percent(row['late_share'])} of the time there" if row["late_share"] is not None else ""
    return f"{row['kind']} steps after warm-up: {words.milliseconds(row['late_compile_ms'])} of compiling{share}"


def without_steps(report: Report) -> str | None:
    """The headline of a compiler's own report, which counts steps but times none; None for anything else."""
    view = view_of(report)
    for facts in view["backends"] if view else ():
        if facts["marked_steps"]:
            said = f"{things(facts['marked_steps'], 'step')} by {facts['backend']}'s own count"
            if facts["step_estimate_ms"] is None:
                return said
            about = words.milliseconds(facts["step_estimate_ms"])
            return f"{said}, about {about} a step by the rates of its report (estimated)"
    return None


def values(changes: Sequence[Row], *, more: bool = False) -> str:
    """What a value went through: "8 -> 16 -> 24 …"; empty where the compiler does not say."""
    told = [change["old"] for change in changes[:1]] + [change["new"] for change in changes]
    if not any(change["new"] is not None for change in changes):
        told = [change["old"] for change in changes]
    chain: list[str] = []
    for value in told:
        if value is not None and (not chain or chain[-1] != value):
            chain.append(value)
    cut = [value if len(value) <= MAX_VALUE else value[: MAX_VALUE - 1] + "…" for value in chain[:SHOWN_VALUES]]
    if len(chain) == 1 and changes[0]["new"] is None:
        return f"(expected {cut[0]})"
    more = len(chain) > SHOWN_VALUES or (more and len(chain) > 1)
    return " -> ".join(cut) + (" …" if more else "")


def changed(cause: Row) -> str:
    """What changed and how: "x.size(0) 8 -> 16 …"; of several subjects the first; empty where nothing says."""
    changes = cause["changes"]
    subject = cause["subject"] or next((change["subject"] for change in changes if change["subject"]), None)
    of_it = [change for change in changes if change["subject"] in (None, subject)]
    name = subject or CAUSES.get(cause["cause"], "")
    return f"{name} {values(of_it, more=cause['count'] > len(changes))}".strip()


def what(cause: Row) -> str:
    """What happened because of what, without where and how often."""
    why = changed(cause) or (cause["text"] if cause["cause"] == "unknown" else words.term(cause["cause"]))
    kind, function = cause["kind"], cause["function"]
    if kind == "limit_hit":
        limit = f" of {words.count(cause['limit'])} versions" if cause["limit"] is not None else " of versions"
        return f"limit{limit} reached{f' by {function}' if function else ''}: {why}"
    if kind == "graph_break":
        operator = f" ({cause['operator']})" if cause["operator"] not in (None, why) else ""
        return f"graph break: {why}{operator}"
    if kind == "failure":
        return f"compile failed: {cause['text'] or why}"
    if kind in ("transfer", "fallback"):
        name = cause["operator"] or why
        where = "to the host" if kind == "transfer" else "run on the host"
        return f"{where}: {name}" if name else where
    if kind == "compile" and cause["cause"] not in CAUSES:
        return f"compile of {function}" if function else "compile"
    return why


def often(cause: Row) -> str:
    if cause["kind"] in NAMED:
        parts = [f"{words.count(cause['count'])} times"] if cause["count"] > 1 else []
    else:
        parts = [counted(cause["count"], cause["kind"])]
    if cause["total_ms"] is not None:
        parts.append(words.milliseconds(cause["total_ms"]))
    steps = when(cause)
    if steps:
        parts.append(steps)
    return ", ".join(parts)


def when(cause: Row) -> str | None:
    first, last, number = cause["first_step"], cause["last_step"], cause["step_count"]
    if first is None:
        return None
    if last is None or first == last:
        return f"step {first}"
    if number == last - first + 1:
        return f"steps {first}-{last}"
    return f"{things(number, 'step')} from {first} to {last}"


def of_ranks(cause: Row, view: Mapping[str, Any]) -> str | None:
    """The ranks of a cause, where it is not of all."""
    everywhere = {rank for facts in view["backends"] if facts["backend"] == cause["backend"] for rank in facts["ranks"]}
    if len(everywhere) < 2 or set(cause["ranks"]) >= everywhere:
        return None
    shown = ", ".join(str(rank) for rank in cause["ranks"][:8])
    return f"rank {shown}" if len(cause["ranks"]) == 1 else f"ranks {shown}"


def eager(limit: Row) -> str:
    since = f"since step {limit['step']} " if limit["step"] is not None else ""
    text = f"{since}inputs of it that match no version run eagerly"
    if limit["before_ms"] is None or limit["after_ms"] is None:
        return text
    before, after = words.milliseconds(limit["before_ms"]), words.milliseconds(limit["after_ms"])
    return f"{text}; steps took {before} before, compiling left out, and {after} after"


def warning(row: Row) -> tuple[str, str]:
    """A line in the words of torch_xla's debug profiler, and where it is from."""
    if row["verbatim"]:
        times = f", {words.count(row['repeats'])} lines of it" if row["repeats"] > 1 else ""
        return row["text"], f"in the log{times}"
    if row["backend"] == "torch_xla":
        return row["text"], "by torch_xla's own rule, warm-up included"
    return row["text"], "by the rule of torch_xla's debug profiler, warm-up included"


def storm(row: Row) -> list[str]:
    said = []
    if row["windows"]:
        first = f", first at step {row['first_window_step']}" if row["first_window_step"] is not None else ""
        said.append(f"{row['backend']} kept compiling after warm-up, at {things(row['windows'], 'step')}{first}")
    if row["late_step"] is not None:
        quiet = f" after {things(row['quiet_before'], 'step')} without" if row["quiet_before"] else ""
        said.append(f"{row['backend']} compiled again in step {row['late_step']}{quiet}")
    return said


def operators(causes: Sequence[Row]) -> Iterator[str]:
    """Operators without code of the backend, and those whose result has a shape that only data tells; a line each."""
    for cause, text in (
        ("unlowered", "no lowering, so run on the host"),
        ("data_dependent_shape", "shape known only from data, so compiled again and again"),
    ):
        found = [row for row in causes if row["kind"] == "fallback" and row["cause"] == cause]
        named = [_operator(row) for row in found[:MAX_OPERATORS]]
        if named:
            more = f" and {len(found) - MAX_OPERATORS} more" if len(found) > MAX_OPERATORS else ""
            yield f"{text}: {', '.join(named)}{more}"


def _operator(cause: Row) -> str:
    often = words.count(cause["count"]) if cause["counted"] else "how often is not told"
    return f"{cause['operator'] or 'an operator'} ({often})"


def says_nothing(cause: Row) -> bool:
    """Whether a cause holds no more than the counts of its backend: a compile of nobody knows what and where."""
    return cause["kind"] == "compile" and cause["cause"] not in CAUSES and not (cause["function"] or cause["place"])


def told(cause: Row, findings: Sequence[Row]) -> bool:
    """Whether one of `findings` is about the cause: it bears its id, names its operator or its line."""
    if any(cause["id"] and cause["id"] in finding["id"] for finding in findings):
        return True
    ours = [finding for finding in findings if finding["rule"].startswith(RULES)]
    if cause["kind"] == "fallback" and any((cause["operator"] or "?") in finding["title"] for finding in ours):
        return True
    place = cause["place"]
    lines = [(item["file"], item["line"]) for finding in ours for item in finding["where"]]
    return bool(place) and (place["file"], place["line"]) in lines
