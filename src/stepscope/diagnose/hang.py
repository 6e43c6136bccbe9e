"""A job that hangs: no loss of a step, so no finding with a cost, but the first thing to know of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.diagnose.rule import Need, advice, at, figure, figures, lowest, risk_rule
from stepscope.model import Analysis, Finding, Risk
from stepscope.model.counted import things
from stepscope.model.hangs import CROSSED, ENDED, MISMATCH, MISSING, NO_DUMP, STUCK

LEARN = "https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"
NAMED = 4  # ranks in a title
HANG = Need(
    "dumps of flight recorders or a report of NCCL RAS",
    lambda a: a.hang if a.hang is not None and a.hang.causes else None,
    quiet=True,
)
_HEADS = {
    MISSING: "{who} did not come to a call that others wait in",
    MISMATCH: "{who} made another call than the others",
    CROSSED: "Groups are entered in different orders and wait for each other",
    NO_DUMP: "Ranks wait for others of which there is no dump",
    ENDED: "{who} ended while others wait",
    STUCK: "A call that all ranks made alike had not ended",
}


@risk_rule("communication.hang", HANG)
def hang(analysis: Analysis, _findings: Sequence[Finding]) -> Iterator[Risk]:
    """One risk for each thing that the others wait for."""
    verdict = HANG.of(analysis)
    calls = {call.number: call for call in verdict.calls}
    for cause in verdict.causes:
        call = calls.get(cause.call or 0)
        source = f"dumps of {things(verdict.dumps, 'rank')}" if verdict.dumps else "NCCL RAS"
        names = ", ".join(map(str, cause.ranks[:NAMED])) + (" …" if len(cause.ranks) > NAMED else "")
        sure = "low" if cause.kind in (STUCK, NO_DUMP) or cause.call is None else "high"
        doubts = ("medium",) if verdict.disagreements or (verdict.absent and cause.kind != MISMATCH) else ()
        head = _HEADS[cause.kind].format(who=f"Rank{'s' if len(cause.ranks) > 1 else ''} {names}")
        waiting = call.waiting if call is not None else None
        yield hang.risk(
            f"{cause.kind} {cause.call} {names}",
            learn=LEARN,
            title=f"{head}{at(cause.place)}",
            severity="warning" if cause.kind == STUCK else "critical",
            confidence=lowest((sure, *doubts)),
            where=(cause.place,) if cause.place is not None else (),
            ranks=cause.ranks,
            evidence=(
                *figures(
                    source,
                    ("ranks that wait in the call", waiting, "count", 0),
                    ("ranks of its group without a dump", (call.no_dump or None) if call else None, "count", 0),
                ),
                figure("open calls that wait for this one or others", len(verdict.calls) or None, "count", source, 0),
            ),
            fix=advice("hang", cause.kind),
            caveat=cause.sentence,
            falsified_by="With dumps of all ranks written later, the same ranks have come to that call",
        )


RISKS = (hang,)
