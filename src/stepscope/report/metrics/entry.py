"""The shape of a definition."""

from __future__ import annotations

from msgspec import Struct, field


class Metric(Struct, frozen=True):
    """`unit` in words ("ns", "bytes", "percent", "share", "count"); `definition` in whole sentences."""

    unit: str
    definition: str


class Section(Struct, frozen=True):
    """The figures of one record. `where` is its place in report.json, `tables` those of `analyze --table` that hold it."""

    record: str  # name of the dataclass, with its module where two have one name; or of a mapping's kind
    title: str
    where: str
    metrics: dict[str, Metric]
    tables: tuple[str, ...] = field(default=())
    about: str = ""


def metrics(**definitions: tuple[str, str]) -> dict[str, Metric]:
    """name=(unit, definition) as a mapping."""
    return {name: Metric(unit, text) for name, (unit, text) in definitions.items()}
