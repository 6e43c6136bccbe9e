"""Where to read on, for findings whose rule has no link for the case at hand."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.diagnose import io, transfers
from stepscope.model import Finding

LINKS = {
    io.RULE: "https://docs.python.org/3/library/logging.handlers.html#logging.handlers.QueueHandler",
    transfers.TRANSFER_RULE: transfers.LEARN_TRANSFERS,
    transfers.EXECUTION_RULE: "https://docs.pytorch.org/xla/release/r2.7/learn/troubleshoot.html",
}


def linked(finding: Finding) -> Finding:
    """`finding` with a link, where there is one."""
    return finding if finding.learn else replace(finding, learn=LINKS.get(finding.rule, ""))
