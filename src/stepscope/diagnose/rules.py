"""The table of rules. A new rule is a function in its category's file and a line here.

A rule names its inputs; where one is missing the rule abstains by name instead of guessing from the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepscope.diagnose import host, input, io
from stepscope.diagnose.common import train_steps
from stepscope.model import Analysis, Finding


@dataclass(frozen=True)
class Need:
    """An input of rules: how the report calls it, and whether an analysis has it."""

    name: str
    present: Callable[[Analysis], bool]


@dataclass(frozen=True)
class Rule:
    """`judge` is only called when every need is present."""

    name: str
    category: str
    needs: tuple[Need, ...]
    judge: Callable[[Analysis], list[Finding]]

    def traced(self, analysis: Analysis) -> bool:
        """Whether what the rule says stands on traces."""
        return WINDOW in self.needs or (IO_SEEN in self.needs and analysis.stacks is None)


STEPS = Need("training steps", lambda analysis: train_steps(analysis) is not None)
DATA_WAIT = Need("the data wait of the steps", lambda analysis: analysis.loader is not None)
# Without a DataLoader the data wait is the gap before the first operator: whatever fills it is Python work or file I/O,
# and the rules for those name its lines.
LOADER = Need(
    "a torch DataLoader in the training process",
    lambda analysis: (
        analysis.loader is None or (analysis.loader.num_workers is not None or analysis.loader.site is not None)
    ),
)
STACKS = Need("sampled stacks of steady steps", lambda analysis: analysis.python is not None)
WINDOW = Need("a profiler window with complete steps and Python stacks", lambda analysis: analysis.loops is not None)
IO_SEEN = Need("sampled stacks or a profiler window with Python stacks", lambda analysis: analysis.io is not None)

RULES: tuple[Rule, ...] = (
    Rule(input.RULE, "input", (STEPS, DATA_WAIT, LOADER), input.loader_bound),
    Rule(host.LOOP_RULE, "host", (STEPS, WINDOW), host.per_item_loop),
    Rule(host.PYTHON_RULE, "host", (STEPS, STACKS), host.python_on_critical_path),
    Rule(io.RULE, "io", (STEPS, IO_SEEN), io.blocking_in_step),
)
