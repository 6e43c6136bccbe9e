"""The table of rules. A new rule is a function in its category's file and a line here.

A rule names its inputs; where one is missing the rule abstains by name instead of guessing from the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepscope.diagnose import compile, compile_run, host, input, io, transfers
from stepscope.diagnose.common import train_steps
from stepscope.diagnose.compile_basis import TORCH, XLA, basis
from stepscope.diagnose.compile_plan import of_rule
from stepscope.model import Analysis, Finding
from stepscope.model.views.compilers import CompilerFacts


@dataclass(frozen=True)
class Need:
    """An input of rules: how the report calls it, and whether an analysis has it.

    `quiet`: the run did not use what the rule is about. Then nothing is missing and nobody wants to read of it.
    """

    name: str
    present: Callable[[Analysis], bool]
    quiet: bool = False


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


def _backend(name: str) -> Callable[[Analysis], bool]:
    return lambda analysis: any(facts.backend == name for facts in _backends(analysis))


def _backends(analysis: Analysis) -> tuple[CompilerFacts, ...]:
    return analysis.compilers.backends if analysis.compilers is not None else ()


def _has_basis(analysis: Analysis) -> bool:
    view = analysis.compilers
    return view is not None and any(basis(view, facts) is not None for facts in view.backends)


COMPILED = Need("compilation events of torch.compile or torch_xla", lambda a: a.compilers is not None, quiet=True)
TORCH_COMPILE = Need("compilation events of torch.compile", _backend(TORCH), quiet=True)
TORCH_XLA = Need("events or a report of torch_xla", _backend(XLA), quiet=True)
TRANSFERRED = Need(
    "transfers from the device", lambda a: any(facts.transfers is not None for facts in _backends(a)), quiet=True
)
STEP_TIMES = Need("training steps, or rates of a torch_xla report", _has_basis)
COMPILE_TIMES = Need("durations of compilations", lambda a: any(facts.compile_ms is not None for facts in _backends(a)))
AGAIN = Need(
    "recompilations told from first compilations",
    lambda a: any(facts.recompiles is not None for facts in _backends(a) if facts.backend == TORCH),
)
BREAKS = Need("graph breaks", lambda a: any(facts.graph_breaks is not None for facts in _backends(a)))

_CAUSES = (TORCH_COMPILE, STEP_TIMES, COMPILE_TIMES, AGAIN)
_RUN = (COMPILED, STEP_TIMES, COMPILE_TIMES)

RULES: tuple[Rule, ...] = (
    Rule(input.RULE, "input", (STEPS, DATA_WAIT, LOADER), input.loader_bound),
    Rule(host.LOOP_RULE, "host", (STEPS, WINDOW), host.per_item_loop),
    Rule(host.PYTHON_RULE, "host", (STEPS, STACKS), host.python_on_critical_path),
    Rule(io.RULE, "io", (STEPS, IO_SEEN), io.blocking_in_step),
    *(
        Rule(name, "compile", _CAUSES, of_rule(name))
        for name in (compile.LIMIT_RULE, compile.CLOSE_RULE, compile.SAME_RULE, compile.ONCE_RULE)
    ),
    *(
        Rule(name, "compile", _RUN, of_rule(name))
        for name in (
            compile_run.FREQUENT_RULE,
            compile_run.STORM_RULE,
            compile_run.LATE_RULE,
            compile_run.SHARE_RULE,
            compile_run.SLOW_RULE,
        )
    ),
    Rule(
        compile.BREAK_RULE, "compile", (TORCH_COMPILE, STEP_TIMES, COMPILE_TIMES, BREAKS), of_rule(compile.BREAK_RULE)
    ),
    Rule(transfers.UNLOWERED_RULE, "compile", (TORCH_XLA, STEP_TIMES), of_rule(transfers.UNLOWERED_RULE)),
    Rule(transfers.TRANSFER_RULE, "transfer", (TRANSFERRED, STEP_TIMES), of_rule(transfers.TRANSFER_RULE)),
    Rule(transfers.EXECUTION_RULE, "compute", (TORCH_XLA, STEP_TIMES), of_rule(transfers.EXECUTION_RULE)),
)
