"""The JSON schema of report.json, from the types of the analysis: `python -m stepscope.report.json_schema`.

docs/report.schema.json is its output. The document has more keys than the schema names, for instance the text of a line
beside its place, so that a reader must ignore what it does not know; what is named is there with that type. A figure
that is not finite is null in JSON, which the type of a float does not say, so that each number may be null.
"""

from __future__ import annotations

import json
from importlib import import_module
from inspect import cleandoc
from pkgutil import iter_modules
from types import GenericAlias
from typing import Any, get_args, get_type_hints

import msgspec

from stepscope import model
from stepscope.model import Abstention, Analysis, Finding, Ignored, Report, Risk, Unexplained
from stepscope.model.replay import OperatorReplay
from stepscope.model.views import Views
from stepscope.report.document import NOT_VIEWS, OF_TRACES
from stepscope.schema import REPORT_SCHEMA

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TITLE = "report.json of stepscope"
OTHERS = ("compilers", "hang")  # views that are bounded, or not always there
OTHER_NAMES = {"fixed": "fixed_costs", "steps": "steps_by_kind"}  # of facts, in the views
TOTALS = ("operators_total", "kernels_total", "communication_total")  # rows there are, of which the view has the first
RENAMED, KEPT_BACK = {"try_": "try"}, ("source_hashes",)
FINITE = ("Finding", "Interval")  # rules claim no cost that is none


def schema() -> dict[str, Any]:
    """The schema, of what `report.document.build` makes."""
    # what the facts name is imported for type checkers alone, so that a command imports only what it needs
    modules = [import_module(each.name) for each in iter_modules(model.__path__, f"{model.__name__}.")]
    known = {name: kind for module in modules for name, kind in vars(module).items()}
    facts, traces = get_type_hints(Analysis, localns=known), get_type_hints(Views)
    span = get_type_hints(get_args(traces["spans"])[0])
    views = {name: kind for name, kind in facts.items() if name not in NOT_VIEWS or name in OTHERS}
    views |= {OTHER_NAMES[name]: facts[name] for name in OTHER_NAMES}
    views |= {name: traces[name] | None for name in OF_TRACES if name in traces}
    views |= {
        "overview": GenericAlias(list, (span["overview"],)) | None,
        "gpus": span["gpus"] | None,
        "absent": traces["absent"],
    }
    views["replayed_operators"] = tuple[OperatorReplay, ...]
    views |= {"floor_share": float, "findings_share": float, "rules_judged": int, **dict.fromkeys(TOTALS, int)}
    quality = {
        **{name: get_type_hints(facts["quality"])[name] for name in ("counts", "notes")},
        **{name: facts[name] for name in ("reading", "traces")},
    }
    document = {
        "run": facts["run"],
        "quality": _struct("ReportQuality", quality),
        "steps": get_args(facts["steps"])[0] | None,
        "findings": tuple[Finding, ...],
        "risks": tuple[Risk, ...],
        "unexplained": Unexplained | None,
        "abstained": tuple[Abstention, ...],
        "ignored": tuple[Ignored, ...],
        "views": _struct("ReportViews", views, msgspec.UNSET),
    }
    made = msgspec.json.schema(_struct("Report", document))
    definitions = {name: _as_written(name, found) for name, found in sorted(made["$defs"].items())}
    definitions["Report"]["properties"]["schema"] = {"const": REPORT_SCHEMA}
    definitions["Report"]["description"] = Report.__doc__
    return {"$schema": DIALECT, "title": TITLE, "$ref": made["$ref"], "$defs": definitions}


def _struct(name: str, fields: dict[str, Any], default: Any = msgspec.NODEFAULT) -> Any:
    given = [(key, kind) if default is msgspec.NODEFAULT else (key, kind, default) for key, kind in fields.items()]
    return msgspec.defstruct(name, given)


def _as_written(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A definition with the keys and the missing figures of the document, its text without indentation."""
    properties = found.pop("properties", {})
    properties = {RENAMED.get(key, key): kind for key, kind in properties.items() if key not in KEPT_BACK}
    if name not in FINITE:
        properties = {key: _or_null(kind) for key, kind in properties.items()}
    about = {"description": cleandoc(found.pop("description"))} if "description" in found else {}
    return {**about, **found, "properties": properties}


def _or_null(kind: Any) -> Any:
    if isinstance(kind, list):
        return [_or_null(each) for each in kind]
    if not isinstance(kind, dict):
        return kind
    if kind.get("type") == "number":
        return {**kind, "type": ["number", "null"]}
    return {key: _or_null(value) for key, value in kind.items()}


def page() -> str:
    """The schema as a file: a line for each definition."""
    found = schema()
    definitions = ",\n".join(f"{json.dumps(name)}: {json.dumps(kind)}" for name, kind in found.pop("$defs").items())
    return f'{json.dumps(found)[:-1]}, "$defs": {{\n{definitions}\n}}}}\n'


if __name__ == "__main__":
    print(page(), end="")
