"""`python -m stepscope.record.host [--out DIR] [--max-steps N] -- COMMAND…`: record only, without a report.

Exits as the command did.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.record.host.launch import launch
from stepscope.record.host.options import RecordOptions


def main(arguments: list[str]) -> int:
    out: Path | None = None
    max_steps: int | None = None
    while arguments and arguments[0] in ("--out", "--max-steps"):
        if arguments[0] == "--out":
            out = Path(arguments[1])
        else:
            max_steps = int(arguments[1])
        arguments = arguments[2:]
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    try:
        return launch(RecordOptions(command=tuple(arguments), out=out, max_steps=max_steps)).status
    except StepscopeError as error:
        print(f"stepscope: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
