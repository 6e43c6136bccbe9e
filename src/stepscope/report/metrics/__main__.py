"""Print docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.report.metrics import SECTIONS, Section

HEAD = """# What each figure means

Every figure stepscope shows, by where it stands in `report.json`; tables of `stepscope analyze --table NAME` have the same
names (`--define` prints the meaning below a table). Names end in their unit. A `share` is a fraction from 0 to 1, a `pct` a
percentage from 0 to 100. A figure whose source is missing is null, never 0. This page is made by
`python -m stepscope.report.metrics`, and a test keeps it complete.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(f"\n{line}" if line.startswith("#") else line for line in _lines())


def _lines() -> Iterator[str]:
    for section in SECTIONS:
        yield f"## {section.title}\n"
        yield f"{_place(section)}\n"
        if section.about:
            yield f"\n{section.about}\n"
        yield "\n| figure | unit | meaning |\n|---|---|---|\n"
        for name, metric in section.metrics.items():
            yield f"| `{name}` | {metric.unit} | {metric.definition.replace('|', chr(92) + '|')} |\n"


def _place(section: Section) -> str:
    tables = ", ".join(f"`--table {name}`" for name in section.tables)
    return f"`{section.where}`" + (f"; {tables}" if tables else "")


if __name__ == "__main__":
    print(page(), end="")
