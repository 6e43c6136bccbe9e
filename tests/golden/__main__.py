"""`make golden`: keep what every surface says now, and name what has changed since it was last kept.

A change is a mended figure, with its reason in CHANGELOG.md, or a defect. `python -m tests.golden FOLDER` does the same
with the recordings in FOLDER, kept beside them in FOLDER/kept: real ones are too large for a repository.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.golden import inputs, kept
from tests.golden.documents import digests, parts_of


def main() -> None:
    others = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
    where = kept.FOLDER if others is None else others / kept.FOLDER.name
    before, after, wholes = kept.load(where), {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve() if others is None else others
        os.chdir(name)  # no source file of whoever calls this is quoted
        chosen = (*inputs.made_up(folder), *inputs.real(folder)) if others is None else inputs.recordings(folder)
        for given in chosen:
            parts = parts_of(given, folder)
            after[given.name] = digests(parts)
            if given.whole:
                wholes[given.name] = parts
            old = before.get(given.name, {})
            changed = [part for part in {**old, **parts} if old.get(part) != after[given.name].get(part)]
            print(f"{given.name}: {len(parts)} parts, {len(changed)} changed {' '.join(changed[:8])}", flush=True)
        os.chdir("/")
    kept.save(after, wholes, where)
    missing = sorted(set(before) - set(after))
    if missing:
        print(f"kept as they were, not here: {', '.join(missing)}", file=sys.stderr)


main()
