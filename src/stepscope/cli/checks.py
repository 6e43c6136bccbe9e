"""`--fail-on`: checks of a run for use in CI, as lines on stderr and an exit status.

1 says that the run holds what it must not hold. A check that could not be judged is not passed either: that is 4, so
that a recording that saw nothing does not turn a build green. 0 is left for what was looked for and not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepscope.cli import say
from stepscope.errors import EnvironmentRefusal, StepscopeError

if TYPE_CHECKING:
    from stepscope.api import Run

PASSED = 0
FAILED = StepscopeError.exit_code
NOT_JUDGED = EnvironmentRefusal.exit_code
OUTCOMES = {FAILED: "check failed", NOT_JUDGED: "check not judged", PASSED: "check passed"}  # the first one decides


def judge(run: Run, names: Sequence[str], *, quiet: bool = False, source: bool = True) -> int:
    """Check `run`, say one line for each of `names`, and return the exit status; `source` False quotes no line."""
    if not names:
        return PASSED
    from stepscope.analyze.compilers import checks
    from stepscope.report.document import without_quotes
    from stepscope.report.values import plain_mapping
    from stepscope.report.words import Shortener

    facts = run.analysis
    # without steps, the recorder did not get into the process, and there was nobody to see a compilation
    found = checks(facts.compilers, names, recorded=run.recorded and bool(facts.steps))
    shorten = Shortener(plain_mapping(facts.run))
    states = set()
    for check in found:
        state = NOT_JUDGED if not check.judged else FAILED if check.failed else PASSED
        states.add(state)
        where = f" ({shorten(check.place.file, check.place.line)})" if check.place else ""
        if not quiet:
            say(f"{OUTCOMES[state]}: {check.name}: {check.text if source else without_quotes(check.text)}{where}")
    return next(state for state in OUTCOMES if state in states)
