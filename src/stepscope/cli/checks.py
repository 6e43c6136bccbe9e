"""`--fail-on`: checks of a run for use in CI, as lines on stderr and an exit status.

1 says that the run holds what it must not hold. A check that could not be judged is not passed either: that is 4, so
that a recording that saw nothing does not turn a build green. 0 is left for what was looked for and not found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import EnvironmentRefusal, StepscopeError

if TYPE_CHECKING:
    from stepscope.api import Run
    from stepscope.model.compilers import CompilerCheck

PASSED = 0
FAILED = StepscopeError.exit_code
NOT_JUDGED = EnvironmentRefusal.exit_code


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
    for check in found if not quiet else ():
        where = f" ({shorten(check.place.file, check.place.line)})" if check.place else ""
        text = check.text if source else without_quotes(check.text)
        say(f"{_outcome(check)}: {check.name}: {text}{where}")
    return _status(found)


def say(text: str) -> None:
    """One line of ours on stderr."""
    from stepscope.report.escape import one_line

    print(f"stepscope: {one_line(text)}", file=sys.stderr)


def again(names: Iterable[str], folder: Path) -> str:
    """The command that checks a recording later."""
    import shlex

    return f"stepscope analyze {shlex.quote(str(folder))} --fail-on {','.join(names)}"


def _outcome(check: CompilerCheck) -> str:
    if not check.judged:
        return "check not judged"
    return "check failed" if check.failed else "check passed"


def _status(found: Iterable[CompilerCheck]) -> int:
    states = {FAILED if check.judged and check.failed else PASSED if check.judged else NOT_JUDGED for check in found}
    return next((status for status in (FAILED, NOT_JUDGED) if status in states), PASSED)
