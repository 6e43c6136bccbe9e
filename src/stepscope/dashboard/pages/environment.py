"""The page of the environment: what ran where, what the recording could see and what was lost of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext
from stepscope.model import Report
from stepscope.report import sentences, words
from stepscope.report.sentences import refused, trial_line

MAX_NESTED = 6  # values of a list or mapping that are shown in a fact
TOPOLOGIES = 8  # nodes whose place in the network is shown


def build(context: PageContext) -> list[Block]:
    """The blocks of the page; of the whole run, whatever is chosen."""
    report = context.base.report(source=context.source)
    run = report.run
    # what was lost, repaired or not seen: before any figure
    told = [(text, "warning") for text in sentences.warnings(report)]
    told += [(note["text"], "note") for note in report.quality.get("notes") or () if note["level"] != "warning"]
    nothing = ("Nothing that the recording should have seen is known to be missing.", "good")
    made = [blocks.text(blocks.sentence(text), tone) for text, tone in told or [nothing]]
    if facts := report.quality.get("reading"):
        made.append(blocks.figures(blocks.measures(facts, "reading", of="ReadingFacts"), "Quality of the traces"))
        if facts.get("link_rate") is None and (linked := sentences.links(report)):  # else a figure says it
            made.append(blocks.text(blocks.sentence(linked), "note"))
    made.append(blocks.facts("The run", _run(context, report)))
    made += _job(context, run.get("job"))
    for title in ("Versions", "Hardware", "Noise", "Git"):
        rows = list(_flat(run.get(title.lower()) or {}))
        if rows:
            made.append(blocks.facts(title, rows))
    made += _counts(report)
    for name, found in (
        ("windows", report.views.get("windows")),
        ("traces", report.quality.get("traces")),
        ("environment/processes", report.views.get("processes")),
        ("sites", report.views.get("sites")),
    ):
        say = {"arguments": lambda row: ", ".join(f"{key}={value}" for key, value in row["arguments"].items())}
        made += blocks.rows_table(context, name, found, say=say)
    return made


def _run(context: PageContext, report: Report) -> Iterator[dict[str, Any]]:
    run = report.run
    if run.get("command"):
        import shlex

        yield blocks.fact("Command", shlex.join(str(word) for word in run["command"])[: words.MAX_COMMAND])
    yield blocks.fact("Folder", str(context.base.folder))
    for label, key in (("Working directory", "cwd"), ("Name", "name"), ("Tags", "tags"), ("Hosts", "hosts")):
        if run.get(key):
            yield blocks.fact(label, _text(run[key]))
    if run.get("ranks"):
        world = f" of {run['world_size']}" if run.get("world_size") else ""
        yield blocks.fact("Ranks", f"{_text(run['ranks'])}{world}")
    started, ended = run.get("started_ns"), run.get("ended_ns")
    if started is not None:
        yield blocks.fact("Started", _date(started))
        yield blocks.fact("Ended", _date(ended) if ended is not None else None, None if ended else "no end was written")
    if run.get("exit_status") is not None:
        yield blocks.fact("Exit status", str(run["exit_status"]), sentences.ended(run["exit_status"]))
    if trial := trial_line(report, context.shorten):
        yield blocks.fact("Knobs", trial, "not all were applied" if refused(report) else None)
    if devices := report.views.get("devices"):
        yield blocks.fact("Trained on", _text(devices))
    if stacks := report.views.get("stacks"):
        yield blocks.fact(
            "Sampled stacks", f"{stacks['samples']:,} by {stacks['source']}, {stacks['rate_hz']:g} a second"
        )


def _job(context: PageContext, job: Mapping[str, Any] | None) -> Iterator[Block]:
    if not job:
        return
    step = f", step {job['step']}" if job["step"] else ""
    rows = [blocks.fact("Started by", job["kind"])]
    if job["id"]:
        rows.append(blocks.fact("Job", f"{job['id']}{step}", f"attempt {job['attempt'] + 1}"))
    for label, key in (("Tasks", "members"), ("Cluster", "cluster"), ("Partition", "partition"), ("Nodes", "nodes")):
        if job[key]:
            rows.append(blocks.fact(label, _text(job[key])))
    if job["topology"]:
        places = [f"{host}: {place}" for host, place in list(job["topology"].items())[:TOPOLOGIES]]
        left = len(job["topology"]) - len(places)
        more = f"; and {left} more" if left else ""
        pattern = f"as {job['topology_pattern']}" if job["topology_pattern"] else None
        rows.append(blocks.fact("Place in the network", "; ".join(places) + more, pattern))
    if job["absent"]:
        rows.append(blocks.fact("Accounting", None, job["absent"]))
    else:
        rows.append(blocks.fact("Started again", _text(job["requeues"]) if job["requeues"] is not None else None))
        rows.append(blocks.fact("Attempts ended by a failing node", _text(job["node_failures"])))
    yield blocks.facts("The job", rows)
    yield from blocks.rows_table(context, "accounting", job["steps"])


def _counts(report: Report) -> Iterator[Block]:
    help_ = blocks.meaning("Quality", "counts")
    counts = report.quality.get("counts") or {}
    known = {key: value for key, value in counts.items() if isinstance(value, (int, float))}
    items = [
        blocks.figure(_counted(key), value, blocks.unit_of(key) or "count", help=help_)
        for key, value in known.items()
        if value
    ]
    if items:
        yield blocks.figures(items, "What was read")
    none = [_counted(key) for key, value in known.items() if not value]
    if none:
        yield blocks.text(f"None of these: {', '.join(none)}.", "note")


def _counted(key: str) -> str:
    return words.term(f"{key.removesuffix('_ns')}_time" if key.endswith("_ns") else key)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[dict[str, Any]]:
    for key, value in values.items():
        label = f"{before}{words.term(key)}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{label}: ")
        else:
            yield blocks.fact(label, None if value is None or value == [] else _text(value, str(key)))


def _text(value: Any, key: str | None = None) -> str:
    """A fact in words; figures that have a name with the unit that it carries."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) and key is not None:
        return words.size(value) if key.endswith("bytes") else words.count(value)
    if isinstance(value, Mapping):
        return ", ".join(
            f"{words.term(key)} {_text(item, str(key))}" for key, item in value.items() if item is not None
        )
    if isinstance(value, (list, tuple)):
        shown = [_text(item) for item in value[:MAX_NESTED]]
        more = f" and {len(value) - MAX_NESTED} more" if len(value) > MAX_NESTED else ""
        return ("; " if any("," in text for text in shown) else ", ").join(shown) + more
    return str(value)


def _date(ns: int) -> str:
    from datetime import datetime, timezone

    try:
        return datetime.fromtimestamp(ns / 1e9, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return str(ns)
