"""The page of a hang: the verdict, open calls, calls that differ, and every rank with where it stands."""

from __future__ import annotations

from typing import Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext
from stepscope.dashboard.summary import HANG_CALLS, HANG_MISMATCHES, HANG_RANKS, hang_rows
from stepscope.model import Report
from stepscope.report import sentences, words

RECORD = (
    "Set TORCH_FR_BUFFER_SIZE (with NCCL it is 2,000 by itself) and TORCH_FR_DUMP_TEMP_FILE before the job starts, and "
    "give the dumps of all ranks: stepscope analyze DUMPS. docs/hangs.md has more."
)
FACTS = "Ranks with a dump: dumps count; Ranks of the job: world_size count; Reports of NCCL RAS: ras_reports count"
CAUSES = "Kind: kind; Ranks: ranks; In no.: call number; What happened: sentence; Line: place"


def empty(context: PageContext) -> bool:
    """Whether no dump of a flight recorder and no report of RAS was given."""
    return context.base.hang is None


def build(context: PageContext) -> list[Block]:
    """The blocks of the page."""
    report: Report = context.base.report(source=context.source)
    view: Any = report.views.get("hang")
    if not view:
        return [
            blocks.empty(
                "No hang was looked for", "No dump of a flight recorder and no report of NCCL RAS was given.", RECORD
            )
        ]
    tones = {"head": "warning" if view["causes"] else "plain"}
    made = [blocks.text(blocks.sentence(text), tones.get(tone, tone)) for text, tone in sentences.hang(report)]
    made.append(blocks.figures(blocks.measures(view, FACTS, of="HangVerdict")))
    causes = ({**row, "kind": words.term(row["kind"])} for row in view["causes"])
    for id, title, record, columns, rows in (
        ("causes", "What the others wait for", "HangCause", CAUSES, causes),
        ("calls", "Open calls, causes first", "PendingCall", HANG_CALLS, view["calls"]),
        ("mismatches", "Calls that differ", "CallMismatch", HANG_MISMATCHES, view["mismatches"]),
        ("ranks", "Ranks", "HangRank", HANG_RANKS, view["ranks"]),
    ):
        total = view.get(f"{id}_total")
        shown = hang_rows(rows, context.shorten)
        made += blocks.rows_table(context, id, title, record, blocks.columns(columns), shown, total=total)
    return made
