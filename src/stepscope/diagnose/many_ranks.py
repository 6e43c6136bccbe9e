"""Who holds a thousand ranks up, as reduced tables tell it: one rule over the verdict on all of them."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.diagnose.ranks import LEARN
from stepscope.diagnose.rule import Claim, Need, Thresholds, advice, at, at_place, figure, ms, rule
from stepscope.model import Analysis
from stepscope.model.counted import things
from stepscope.model.ranks import Straggler


class MANY_RANKS(Thresholds):
    persistent: float = 0.8  # of the steps: TraceML names a cause from as much coverage on
    steps_for_high: int = 20  # as TraceML asks for to call a difference critical
    floor: float = 0.04  # of the step: below it Holmes loses the signal (slower by 1.04)
    floor_persistent: float = 0.01  # of one that is late in nearly every step, as the verdict names it
    named: int = 4  # ranks in a title


REDUCED = Need("reduced tables of many ranks", lambda a: a.many_ranks, quiet=True)
JUDGED = Need(
    "enough in the reduced tables to judge by: 20 steps of several ranks, and windows where ranks form a pipeline",
    lambda a: a.many_ranks if a.many_ranks is not None and a.many_ranks.verdict != "not_enough" else None,
)
MEAN_STEP = Need("the mean step", lambda a: a.many_ranks.step_ms if a.many_ranks is not None else None)


@rule("communication.late_ranks", REDUCED, JUDGED, MEAN_STEP, learn=LEARN)
def late_ranks(analysis: Analysis) -> Iterator[Claim]:
    verdict, step_ms = JUDGED.of(analysis), MEAN_STEP.of(analysis)
    source = f"reduced tables of {things(verdict.ranks, 'rank')}, {things(verdict.steps, 'step')}"
    absent = len(verdict.missing or ())
    for late in verdict.stragglers:
        sure = late.share_of_steps >= MANY_RANKS.persistent and verdict.steps >= MANY_RANKS.steps_for_high
        yield Claim(
            title=_title(late),
            step_ms=step_ms,
            cost_ms=late.cost_ms,
            floor=MANY_RANKS.floor_persistent if sure else MANY_RANKS.floor,
            levels=("high" if sure else "medium", *(("medium",) if absent or late.cause == "unknown" else ())),
            where=(late.place,) if late.place is not None else (),
            key=f"{late.kind} {late.cause} {late.ranks[:1]} {late.stage} {late.group}",
            ranks=late.ranks,
            evidence=(
                ms("shorter step without it, the steps played again", late.cost_ms, source),
                figure("steps in which it came last", late.share_of_steps, "fraction", source, 3),
                figure("ranks of the job that were not judged", absent or None, "count", source, 0),
                *late.evidence,
            ),
            fix=advice("late_ranks", late.cause).format(at_place(late.place)),
            caveat=f"The cause is known by {late.cause_source}."
            if late.cause != "unknown"
            else "What it was busy with was not recorded: record stacks and telemetry, and windows on all ranks.",
            falsified_by=_falsified(late),
        )


def _who(late: Straggler) -> str:
    if late.kind == "stage":
        return f"Pipeline stage {late.stage}"
    if late.kind == "host" or (late.kind == "link" and late.hosts):
        return f"Host {late.hosts[0]}"
    if late.kind == "link":
        return f"Group {late.group}"
    ranks = ", ".join(map(str, late.ranks[: MANY_RANKS.named]))
    more = f" and {len(late.ranks) - MANY_RANKS.named} more" if len(late.ranks) > MANY_RANKS.named else ""
    host = f" (host {late.hosts[0]})" if len(late.hosts) == 1 else ""
    return f"Rank{'s' if len(late.ranks) > 1 else ''} {ranks}{more}{host}"


_DOES = {
    "data": "waits for its data",
    "python": "works in Python",
    "gc": "collects garbage",
    "compute": "computes",
    "clock": "computes at a lower clock",
    "memory": "waits for memory",
    "other_processes": "shares its cores or device with other processes and works",
    "sequence_length": "gets longer sequences and computes",
    "stage": "computes",
    "link": "transfers",
    "unknown": "works",
}
_CAUSE = {
    "data": "waiting for data",
    "python": "work in Python",
    "gc": "Python's garbage collections",
    "compute": "slower computing",
    "clock": "lower clocks",
    "memory": "waiting for memory",
    "other_processes": "other processes",
    "checkpoint": "a checkpoint",
    "sequence_length": "longer sequences",
    "stage": "a heavier stage",
    "link": "slower transfers",
    "unknown": "an unknown cause",
}


def _title(late: Straggler) -> str:
    amount, line = f"{late.cost_ms:,.1f} ms a step", at(late.place)
    if late.kind == "rotating":
        return f"Another rank is late in each step, by {_CAUSE[late.cause]}{line}: all wait {amount}"
    if late.kind == "global":
        return f"All ranks are slow together in some steps, by {_CAUSE[late.cause]}{line}: {amount} in the mean"
    if late.kind == "stage":
        return f"{_who(late)} has more work than the others{line}: they wait {amount} for it"
    does = _DOES.get(late.cause, _DOES["unknown"])
    if len(late.ranks) > 1 and late.kind == "rank":
        does = " ".join(_PLURAL.get(word, word) for word in does.split(" "))
    return f"{_who(late)} {does} {late.excess_ms:,.1f} ms longer a step than its peers{line}: all wait {amount} for it"


_PLURAL = {
    "waits": "wait", "its": "their", "works": "work", "collects": "collect", "computes": "compute",
    "shares": "share", "gets": "get", "transfers": "transfer",
}  # fmt: skip


def _falsified(late: Straggler) -> str:
    if late.kind == "stage":
        return "With layers moved from that stage to the others, the mean step does not get shorter"
    if late.kind in ("rotating", "global"):
        return f"Without {_CAUSE[late.cause]}, the mean step does not get shorter"
    if late.kind in ("host", "link"):
        return "With another host in its place, the mean step does not get shorter"
    return "With that work left out, or the rank on another device, the mean step does not get shorter"
