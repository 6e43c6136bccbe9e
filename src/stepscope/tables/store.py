"""The tables as Parquet files (zstd) in RUN/tables: derived, safe to delete, readable by anything.

`tables.json` beside them holds the version and what is no table. It is removed first and written last, so an
interrupted write never looks whole.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl

from stepscope.errors import UnreadableInputError
from stepscope.files import open_regular, read_small
from stepscope.model import Quality, RunFacts
from stepscope.schema import TABLES_SCHEMA
from stepscope.tables.parts import write_parquet
from stepscope.tables.schema import SCHEMAS, RankInfo, Tables

FOLDER = "tables"
INDEX = "tables.json"


class _Index(msgspec.Struct):
    schema: str
    run: RunFacts
    quality: Quality
    ranks: tuple[RankInfo, ...]
    manifests: tuple[dict[str, object], ...]


MAX_INDEX_BYTES = 2**28


def write(tables: Tables, folder: Path) -> Path:
    """Write every table to `folder`/tables and return that folder; raises OSError."""
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    (target / INDEX).unlink(missing_ok=True)
    for name in SCHEMAS:
        write_parquet(getattr(tables, name), target / f"{name}.parquet")
    index = _Index(TABLES_SCHEMA, tables.run, tables.quality, tables.ranks, tables.manifests)
    part = target / f"{INDEX}.part"
    part.write_bytes(msgspec.json.encode(index))
    part.replace(target / INDEX)
    return target


def read(folder: Path) -> Tables:
    """Read what `write` wrote; raises UnreadableInputError when it is missing, damaged or of another version."""
    target = folder / FOLDER
    remedy = "delete it and analyze the run again"
    try:
        index = msgspec.json.decode(read_small(target / INDEX, MAX_INDEX_BYTES), type=_Index)
        for name in SCHEMAS:
            open_regular(target / f"{name}.parquet").close()
        frames = {name: pl.read_parquet(target / f"{name}.parquet") for name in SCHEMAS}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, pl.exceptions.PolarsError) as error:
        raise UnreadableInputError(f"{target}: no complete set of tables; {remedy}") from error
    if index.schema != TABLES_SCHEMA or any(frame.schema != SCHEMAS[name] for name, frame in frames.items()):
        raise UnreadableInputError(f"{target}: tables of another version ({index.schema[:80]}); {remedy}")
    return Tables(run=index.run, quality=index.quality, ranks=index.ranks, manifests=index.manifests, **frames)
