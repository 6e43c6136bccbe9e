"""The tables as Parquet files (zstd) in RUN/tables: derived, safe to delete, readable by anything.

`tables.json` beside them holds the version and what is no table. It is removed first and written last, so an
interrupted write never looks whole.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepscope.schema import TABLES_SCHEMA
from stepscope.tables.parts import write_parquet
from stepscope.tables.schema import SCHEMAS, Tables

FOLDER = "tables"
INDEX = "tables.json"


def write(tables: Tables, folder: Path) -> Path:
    """Write every table to `folder`/tables and return that folder; raises OSError."""
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    (target / INDEX).unlink(missing_ok=True)
    for name in SCHEMAS:
        write_parquet(getattr(tables, name), target / f"{name}.parquet")
    index = {
        "schema": TABLES_SCHEMA,
        **{name: getattr(tables, name) for name in ("run", "quality", "ranks", "manifests")},
    }
    part = target / f"{INDEX}.part"
    part.write_bytes(msgspec.json.encode(index))
    part.replace(target / INDEX)
    return target
