"""What each figure means, by record: the list behind docs/definitions.md, columns of tables, their legends and tooltips.

A figure is declared where its field is: in the last paragraph of the docstring of its record (`stepscope.model`), a
line for each, as `name: What it is.`, or `name (unit): What it is.` where the name does not say the unit (`UNITS`);
without either it is a count. `python -m stepscope.report.definitions` prints docs/definitions.md; a test keeps page and records equal, and the
declarations complete.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path

import msgspec
from msgspec import Struct

from stepscope.model import views

UNITS = {  # by a word of a figure's name
    **{word: word for word in ("ns", "us", "ms", "s", "ppm", "bytes", "share", "cores", "ratio")},
    "seconds": "s",
    "pct": "percent",
    "shares": "share",
    "fraction": "share",
    "mhz": "MHz",
    "w": "W",
    "c": "C",
}
_FIGURE = re.compile(r"(\w+)(?: \(([^)]+)\))?: (.+)")


class Definition(Struct, frozen=True):
    """`unit` in words ("ns", "bytes", "percent", "share", "count"); `definition` in whole sentences."""

    unit: str
    definition: str


class Section(Struct, frozen=True, dict=True):
    """The figures of `described`: a record of the model, or a text that names and declares them as its docstring does.

    `where` is their place in report.json, `tables` those of `analyze --table` that hold them.
    """

    described: type | str
    title: str
    where: str
    tables: tuple[str, ...] = ()
    about: str = ""

    @property
    def record(self) -> str:
        return self.described.partition("\n")[0] if isinstance(self.described, str) else self.described.__name__

    @cached_property
    def definitions(self) -> Mapping[str, Definition]:
        return figures(self.described if isinstance(self.described, str) else self.described.__doc__ or "")


@cache
def figures(text: str) -> Mapping[str, Definition]:
    """The figures that the last paragraph of a docstring declares, if that is what it does."""
    last = inspect.cleandoc(text).rpartition("\n\n")[2]
    found = [_FIGURE.fullmatch(line) for line in re.sub(r"\n +", " ", last).split("\n")]
    if not all(found):
        return {}
    ending = ((match[1], match[2], match[3]) for match in found if match)
    return {name: Definition(unit or _unit(name), definition) for name, unit, definition in ending}


def _unit(name: str) -> str:
    if name.endswith(("per_s", "per_second")):
        return "bytes/s" if "bytes" in name else "1/s"
    return next((UNITS[word] for word in name.split("_") if word in UNITS), "count")


def definition(table: str, key: str) -> Definition | None:
    """The meaning of a column of a table of `analyze --table`; None for names and texts."""
    return _first(key, (section for section in SECTIONS if table in section.tables))


def definition_of(record: str, key: str) -> Definition | None:
    """The meaning of a figure of a record by the record's name ("StepFacts"), None of what is no figure."""
    return _first(key, (section for section in SECTIONS if section.record == record))


def _first(key: str, sections: Iterable[Section]) -> Definition | None:
    return next((section.definitions[key] for section in sections if key in section.definitions), None)


class _Texts(Struct, frozen=True):
    """`declared`: figures that are no field of a record, as a docstring declares them. `about`: by title.

    `sections`: the record, or the name of a text; its title; its place in report.json; the tables that hold it.
    """

    head: tuple[str, ...]
    declared: dict[str, tuple[str, ...]]
    about: dict[str, str]
    sections: tuple[str, ...]


_TEXTS = msgspec.json.decode(Path(__file__).with_name("definitions.json").read_bytes(), type=_Texts)
_METRICS_AS_A_TABLE = "metrics as a table\n\n" + "\n".join(
    f"p{percent} (as `unit`): {percent} percent of the last samples are at most this."
    for percent in (1, 5, 10, 20, 50, 80, 90, 95, 99)
)
_STEP_PARTS = "StepParts\n\n" + "\n".join(
    (
        *(f"{name}_ns: Time in the step: {text}." for name, text in views.PARTS.items()),
        *(
            f"tensorboard_{part.lower().replace(' ', '_')}_ns: Time in the step by the plugin's order, first match: {text}."
            for part, text in views.PLUGIN_PARTS.items()
        ),
    )
)


_DECLARED = {
    **{name: "\n".join(text) for name, text in _TEXTS.declared.items()},
    "metrics as a table": _METRICS_AS_A_TABLE,
    "StepParts": _STEP_PARTS,
}


def _section(row: str) -> Section:
    name, title, where, *tables = row.split(" | ")
    module, dot, record = name.rpartition(".")
    described = getattr(import_module(f"stepscope.model.{module}"), record) if dot else _DECLARED[name]
    return Section(described, title, where, tuple(tables[0].split(", ")) if tables else (), _TEXTS.about.get(title, ""))


SECTIONS = tuple(map(_section, _TEXTS.sections))


def page() -> str:
    parts = ["\n".join(_TEXTS.head)]
    for section in SECTIONS:
        tables = ", ".join(f"`--table {name}`" for name in section.tables)
        parts.append(f"\n## {section.title}\n`{section.where}`" + (f"; {tables}\n" if tables else "\n"))
        if section.about:
            parts.append(f"\n{section.about}\n")
        parts.append("\n| figure | unit | meaning |\n|---|---|---|\n")
        for name, found in section.definitions.items():
            definition = found.definition.replace("|", "\\|")
            parts.append(f"| `{name}` | {found.unit} | {definition} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
