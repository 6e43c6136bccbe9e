"""Where the user constructed what findings speak of: loaders, optimizers, DDP, GradScaler."""

from __future__ import annotations

from stepscope.analyze.windows import event_data
from stepscope.model import Place, Site
from stepscope.tables.schema import Tables


def facts(tables: Tables) -> tuple[Site, ...]:
    """One per construction, in order of time."""
    found = []
    for row, data in event_data(tables, "site"):
        file, line = data.get("file"), data.get("line")
        arguments = data.get("arguments")
        place = (
            Place(file, line if isinstance(line, int) else None, data.get("function"))
            if isinstance(file, str)
            else None
        )
        found.append(
            Site(
                what=str(data.get("what") or "?"),
                place=place,
                arguments=dict(arguments) if isinstance(arguments, dict) else {},
                rank=row["rank"] if row["rank"] is not None else 0,
            )
        )
    return tuple(found)
