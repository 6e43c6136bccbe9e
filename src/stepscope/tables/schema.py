"""The typed columns every analysis stands on, and the bundle that carries them.

Column names carry units; times are integer nanoseconds on the epoch clock; a missing figure is null, never 0.
`SCHEMAS` (schema.json, with what each column holds) is the single definition: builders cast to it, the Parquet store
writes it, tests check it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from msgspec import Struct

from stepscope.model import Quality, RunFacts

_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (pl.Boolean, pl.Float64, pl.Int32, pl.Int64, pl.String, pl.UInt8, pl.UInt32)},
    **{f"List({kind.__name__})": pl.List(kind) for kind in (pl.String, pl.UInt16, pl.UInt32)},
}


def read_schemas(path: Path) -> dict[str, dict[str, Any]]:
    """Columns and their types by table, of a file that says behind each type what the column holds."""
    told: dict[str, dict[str, str]] = msgspec.json.decode(path.read_bytes())
    return {
        table: {name: _TYPES[text.partition(":")[0]] for name, text in columns.items() if name}
        for table, columns in told.items()
    }


SCHEMAS = read_schemas(Path(__file__).with_name("schema.json"))


class RankInfo(Struct, frozen=True):
    """A training process as its rank.json describes it."""

    rank: int
    process: str
    pid: int
    host: str
    world_size: int | None
    device: str | None
    main_file: str | None
    started_ns: int | None
    versions: dict[str, str]
    threads: int | None = None  # of torch's operators on the CPU, when training began
    hook: str | None = None  # what is called at every call or line of Python


class Tables(Struct, frozen=True):
    """All tables of a run. Every frame has exactly the columns of `SCHEMAS`; an absent source is an empty frame."""

    run: RunFacts
    quality: Quality
    ranks: tuple[RankInfo, ...]
    manifests: tuple[dict[str, Any], ...]  # one per host, as written
    steps: pl.DataFrame
    journal: pl.DataFrame
    events: pl.DataFrame
    links: pl.DataFrame
    traces: pl.DataFrame
    segments: pl.DataFrame
    stacks: pl.DataFrame
    stretches: pl.DataFrame
    nodes: pl.DataFrame
    frames: pl.DataFrame
    system: pl.DataFrame
    processes: pl.DataFrame
    compiles: pl.DataFrame
    counters: pl.DataFrame
    memory: pl.DataFrame
    metrics: pl.DataFrame


def empty(name: str) -> pl.DataFrame:
    """An empty frame with the columns of table `name`."""
    return pl.DataFrame(schema=SCHEMAS[name])
