"""`make golden`: keep what every surface says now, and name what has changed since it was last kept.

A change is a mended figure, with its reason in CHANGELOG.md, or a defect.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.golden import inputs, kept
from tests.golden.documents import digests, parts_of


def main() -> None:
    before, after, wholes = kept.load(), {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        os.chdir(folder)  # no source file of whoever calls this is quoted
        for given in (*inputs.made_up(folder), *inputs.real(folder)):
            parts = parts_of(given, folder)
            after[given.name] = digests(parts)
            if given.whole:
                wholes[given.name] = parts
            old = before.get(given.name, {})
            changed = [part for part in {**old, **parts} if old.get(part) != after[given.name].get(part)]
            print(f"{given.name}: {len(parts)} parts, {len(changed)} changed {' '.join(changed[:8])}", flush=True)
        os.chdir("/")
    kept.save(after, wholes)
    missing = sorted(set(before) - set(after))
    if missing:
        print(f"kept as they were, not here: {', '.join(missing)}", file=sys.stderr)


main()
