"""Documents as bytes, and which status an error has."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from stepscope.errors import EnvironmentRefusal, StepscopeError, UnreadableInputError, UsageError
from stepscope.report.escape import one_line

ERROR_SCHEMA = "stepscope.error/1"
PREPARING_SCHEMA = "stepscope.preparing/1"


class NotThere(UsageError):
    """A run, a page or a slice that there is not, or no longer."""


class NotReady(UsageError):
    """Something that cannot be had before the run has been read."""


class StillPreparing(StepscopeError):
    """The tables of a run are being made: not an error to show, but a document of its own."""

    def __init__(self, text: str, share: float | None) -> None:
        super().__init__(text)
        self.share = share

    @property
    def document(self) -> dict[str, Any]:
        return preparing(str(self), self.share)


# the first class that fits decides
_STATUS: tuple[tuple[type[StepscopeError], int], ...] = (
    (NotThere, 404),
    (NotReady, 409),
    (UsageError, 400),
    (UnreadableInputError, 422),
    (EnvironmentRefusal, 500),
)


def status_of(error: StepscopeError) -> int:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def failure(text: str) -> dict[str, Any]:
    """A Failure of `web/src/lib/types.ts`."""
    return {"schema": ERROR_SCHEMA, "error": one_line(text)}


def preparing(text: str, share: float | None) -> dict[str, Any]:
    """A Preparing."""
    return {"schema": PREPARING_SCHEMA, "text": one_line(text), "share": share}


def unexpected(error: BaseException) -> str:
    """A mistake of ours in a line."""
    return f"this could not be made ({type(error).__name__}: {one_line(error, 200)}); please report it"


def encoded(document: Any) -> bytes:
    """JSON in UTF-8. Numbers that are not finite become null; texts that no encoder accepts are escaped."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return json.dumps(document, allow_nan=False, default=str).encode("ascii")
