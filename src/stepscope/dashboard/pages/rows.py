"""Tables of a page out of rows of the report: a list of columns, and what each cell says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block, Shorten

Row = Mapping[str, Any]
PLACE = "place"


class TableContext(Protocol):
    """What a table must know of where it stands; a `PageContext` is one."""

    @property
    def limit(self) -> int:
        """Rows that it may have."""
        ...

    @property
    def shorten(self) -> Shorten:
        """How a path and a line are written."""
        ...


class Alone(Struct, frozen=True):
    """The `TableContext` of a document without a run around it: paths stand as they are."""

    limit: int = 200

    def shorten(self, file: str, line: int | None) -> str:
        """`file:line`."""
        return file if line is None else f"{file}:{line}"


class Col(Struct, frozen=True):
    """A column: `say` makes the cell of a row, by default its value under `key`. The key "place" is a line of code.

    `help` is the definition where the table's record has none under that key; `code` shortens the path in a text;
    `signed` is for differences; `quiet` leaves the column out where all of it is 0.
    """

    label: str
    key: str
    unit: str = "text"
    bar: bool = False
    say: Callable[[Row], Any] | None = None
    help: str | None = None
    code: bool = False
    signed: bool = False
    quiet: bool = False


def rows_table(
    context: TableContext,
    id: str,
    title: str,
    record: str,
    columns: Sequence[Col],
    rows: Iterable[Row] | None,
    *,
    notes: Iterable[str] = (),
    total: int | None = None,
    sorted_by: str | None = None,
) -> list[Block]:
    """The table, with the definitions that `record` has of its figures; nothing where there is no row.

    Columns in which no row says anything are left out.
    """
    given = list(rows or ())
    if not given:
        return []
    made = [{column.key: _cell(column, row, context) for column in columns} for row in given]
    used = [column for column in columns if any(_says(column, row[column.key]) for row in made)]
    heads = [
        blocks.column(
            column.key,
            column.label,
            column.unit,
            help=blocks.help_(column.help) if column.help else blocks.meaning(record, column.key),
            bar=column.bar,
            signed=column.signed,
            place=column.key == PLACE,
        )
        for column in used
    ]
    return [
        blocks.table(id, title, heads, made, limit=context.limit, total=total, sorted_by=sorted_by, notes=notes),
    ]


def _says(column: Col, value: Any) -> bool:
    return value is not None and not (column.quiet and value == 0)


def _cell(column: Col, row: Row, context: TableContext) -> Any:
    if column.say is not None:
        return column.say(row)
    if column.key != PLACE:
        value = row.get(column.key)
        return context.shorten(str(value), None) if column.code and value else value
    found = row.get(PLACE) if PLACE in row else row
    if not found or not found.get("file"):
        return None
    return blocks.place_of({**found, "place_exact": row.get("place_exact", True)}, context.shorten, row.get("code"))
