"""Rows to typed columns: `build` makes the tables of a run, `schema` defines them."""

from __future__ import annotations

from stepscope.files import default_folder
from stepscope.tables.build import build
from stepscope.tables.cache import BuildOptions
from stepscope.tables.schema import SCHEMAS, Tables

__all__ = ["SCHEMAS", "BuildOptions", "Tables", "build", "default_folder"]
