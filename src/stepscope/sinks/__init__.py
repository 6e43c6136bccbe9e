"""A run for the tools that teams look at: each file here hands one tool what `exported` makes of the run.

Nothing is sent anywhere but where the user's own settings of a tool lead. Libraries are extras, imported when their
sink is asked for. Whatever one of them raises ends as a sentence: a `StepscopeError`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from msgspec import Struct

from stepscope.errors import EnvironmentRefusal, StepscopeError
from stepscope.report.escape import one_line

FOLDERS = "stepscope-exports"  # where folders are put that nobody named
PROJECT = "stepscope"  # of tools that sort runs into projects, where the user names none


class Target(Struct, frozen=True):
    """Where to, as the user gave it: a folder, or for MLflow also a database or an address."""

    out: str | None = None
    project: str | None = None
    resume: str | None = None
    force: bool = False

    def folder(self, sink: str, run: str) -> Path:
        """The folder to write to; absolute, as a name with a colon would mean a remote place to some."""
        return Path(self.out or Path(FOLDERS) / sink / run).absolute()


class Sent(Struct, frozen=True):
    """What an export came to. `points` were added; `remarks` are sentences on what a tool could not hold as it is."""

    where: str
    points: int
    remarks: tuple[str, ...] = ()
    then: str | None = None  # the command that comes next


def library(name: str, extra: str) -> ModuleType:
    """A library of an extra; raises `EnvironmentRefusal` where it is not there or cannot be imported."""
    package = name.partition(".")[0]
    try:
        if getattr(importlib.import_module(package), "__file__", None) is None:  # a folder of that name, as W&B makes
            raise ModuleNotFoundError(name=package)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        raise EnvironmentRefusal(f"{missing} is not installed; pip install 'stepscope[{extra}]'") from None
    except Exception as error:
        raise EnvironmentRefusal(f"{name} cannot be imported ({_said(error)}); install it anew") from error


@contextlib.contextmanager
def speaking_for(tool: str, advice: str) -> Iterator[None]:
    """Within, what a library raises is said in one line: an `EnvironmentRefusal`, with what to do."""
    try:
        yield
    except StepscopeError:
        raise
    except Exception as error:
        raise EnvironmentRefusal(f"{tool}: {_said(error)}; {advice}") from error


def _said(error: Exception) -> str:
    """The first line of what an error says, with its kind."""
    first = next(iter(str(error).strip().splitlines()), "")
    return one_line(f"{type(error).__name__}: {first}" if first else type(error).__name__, 300).rstrip(".;")
