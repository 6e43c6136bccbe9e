"""What the quality of the traces does to a finding that stands on them: less confidence, and a word why."""

from __future__ import annotations

from dataclasses import replace

from stepscope.diagnose.thresholds import TRACE
from stepscope.model import Analysis, Finding

_LEVELS = ("low", "medium", "high")


def tempered(finding: Finding, analysis: Analysis) -> Finding:
    """`finding` with its confidence one level lower for each thing that is wrong with the traces, and a caveat."""
    reading = analysis.reading
    if reading is None:
        return finding
    said = []
    all_events = reading.events + reading.lost
    if all_events and reading.lost / all_events > TRACE.lost:
        said.append(f"{reading.lost / all_events:.0%} of the trace's events could not be read.")
    if reading.link_rate is not None and reading.link_rate < TRACE.linked:
        said.append(f"Only {reading.link_rate:.0%} of the device time could be linked to operators.")
    if not said:
        return finding
    level = max(0, _LEVELS.index(finding.confidence) - len(said))
    return replace(finding, confidence=_LEVELS[level], caveat=" ".join([*said, finding.caveat]).strip())
