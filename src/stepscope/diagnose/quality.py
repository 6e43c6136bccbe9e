"""What the quality of the traces does to a finding that stands on them: less confidence, and a word why."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.diagnose import input, input_extra
from stepscope.diagnose.common import lower
from stepscope.diagnose.input_trace import idle_share
from stepscope.diagnose.rules import Rule
from stepscope.diagnose.thresholds import TRACE
from stepscope.model import Analysis, Finding


def tempered(finding: Finding, rule: Rule, analysis: Analysis) -> Finding:
    """`finding` with its confidence one level lower for each thing that is wrong with the traces, and a caveat."""
    reading = analysis.reading
    traced = rule.traced(analysis) or _by_idle_time(rule, analysis)
    if reading is None or not (traced or _compiled(rule, analysis)):
        return finding
    said = []
    all_events = reading.events + reading.lost
    if all_events and reading.lost / all_events > TRACE.lost:
        said.append(f"{reading.lost / all_events:.0%} of the trace's events could not be read.")
    if traced and reading.link_rate is not None and reading.link_rate < TRACE.linked:
        said.append(f"Only {reading.link_rate:.0%} of the device time could be linked to operators.")
    if not said:
        return finding
    caveat = " ".join([*said, finding.caveat]).strip()
    return replace(finding, confidence=lower(finding.confidence, len(said)), caveat=caveat)


def _by_idle_time(rule: Rule, analysis: Analysis) -> bool:
    """Whether it counts a wait of the journal only as far as windows saw the device idle."""
    on_device = any(device != "cpu" for device in analysis.devices)
    return rule.name in (input.RULE, input_extra.WAVES_RULE) and on_device and idle_share(analysis) is not None


def _compiled(rule: Rule, analysis: Analysis) -> bool:
    """Whether it is about compilers, and their spans in traces are all that tells of one of them."""
    if rule.category != "compile" or analysis.compilers is None:
        return False
    return any(facts.source.startswith("trace:") for facts in analysis.compilers.backends)
