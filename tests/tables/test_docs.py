"""docs/tables.md names every table and column with its type, and its Polars example runs on stored tables."""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl
import pytest

from stepscope.schema import TABLES_SCHEMA
from stepscope.tables import SCHEMAS
from stepscope.tables.build import write
from stepscope.tables.links import METHODS, STATES
from tests.builders import MS, make_tables

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tables.md").read_text()


def test_every_table_and_column():
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert set(SCHEMAS) <= set(sections)
    for table, schema in SCHEMAS.items():
        documented = re.findall(r"^\| `(\w+)` \| (\S+) \|", sections[table], re.MULTILINE)
        assert documented == [(name, str(dtype)) for name, dtype in schema.items()], table
    assert TABLES_SCHEMA in PAGE
    assert [word for word in (*METHODS, *STATES) if f"`{word}`" not in PAGE] == []


def test_polars_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = {"category": "kernel", "track": "0/7", "duration_ns": 3 * MS}
    built = make_tables(
        events=[{"name": "aten::mm"}, {"name": "gemm", **kernel}, {"name": "add", **kernel}],
        links=[{"event": 1, "launch": 0, "operator": 0}, {"event": 2}],
    )
    write(built, tmp_path)
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    seen: list[pl.DataFrame] = []
    exec(example, {"print": seen.append})
    (frame,) = seen
    assert set(frame.rows()) == {("linked", "correlation", 1, 3.0), ("before_recording", None, 1, 3.0)}
