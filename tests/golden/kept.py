"""What was kept: one file of digests for all inputs, and the parts themselves of the made-up ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / "kept"
DIGESTS = "digests.json"


def load(folder: Path = FOLDER) -> dict[str, dict[str, str]]:
    """Digests by input and part; nothing where nothing was kept yet."""
    path = folder / DIGESTS
    found: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def whole(name: str) -> dict[str, str]:
    """The parts of an input that are kept as they are."""
    path = FOLDER / f"{name}.json.gz"
    found: dict[str, str] = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}
    return found


def save(
    digests: Mapping[str, Mapping[str, str]], wholes: Mapping[str, Mapping[str, str]], folder: Path = FOLDER
) -> None:
    """Replace what is kept of these inputs; others stay."""
    folder.mkdir(exist_ok=True)
    both = {**load(folder), **digests}
    (folder / DIGESTS).write_text(json.dumps({name: both[name] for name in sorted(both)}, indent=1) + "\n")
    for name, parts in wholes.items():
        # without a time in its head: the same parts are the same file
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(parts).encode(), mtime=0))
