"""report.json: the document, key for key.

`loads(dumps(report)) == report`. A file of another schema is refused by name, so that a reader never shows figures
whose meaning it does not know.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.files import read_small
from stepscope.model import REPORT_SCHEMA, Report

MAX_BYTES = 2**29  # far more than any report of ours

KEY_ORDER = (
    *("schema", "run", "quality", "steps", "findings", "risks", "unexplained"),
    *("abstained", "ignored", "views"),
)


def dumps(report: Report) -> bytes:
    """The document as indented UTF-8 JSON that ends in a line break."""
    document = {key: getattr(report, key) for key in KEY_ORDER}
    document["views"] = dict(report.views)
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def loads(data: bytes) -> Report:
    """Read a document back; raises `UnreadableInputError` for anything that is not one."""
    try:
        report = msgspec.json.decode(data, type=Report)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnreadableInputError(f"not a stepscope report: {error}; make one with `stepscope analyze RUN`") from None
    if report.schema != REPORT_SCHEMA:
        raise UnreadableInputError(
            f"a report of schema {report.schema}, this version reads {REPORT_SCHEMA}; run `stepscope analyze RUN` again"
        )
    return report


def load(path: Path) -> Report:
    """Read a report file; raises `UnreadableInputError`."""
    try:
        return loads(read_small(path, MAX_BYTES, follow=True))
    except OSError as error:
        raise UnreadableInputError(f"{path}: {error.strerror}; name a report.json") from None
