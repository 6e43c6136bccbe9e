"""Where the user constructed what findings speak of: loaders, optimizers, DDP, GradScaler, a framework's settings.

A loader is told by its identity. Where a framework makes one of its own, its line merely runs the framework and is
nobody's subject: spoken of is the user's own construction over the same data set, else the line of the settings that
the framework makes loaders from, else none.
"""

from __future__ import annotations

import re
from typing import Any

from stepscope.analyze.windows import event_data
from stepscope.model import FrameworkFacts, Place, Settings, Site
from stepscope.tables.schema import Tables

# First folder of an installed package -> the framework whose words an advice takes.
PACKAGES = {
    "transformers": "transformers",
    "trl": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "lightning_fabric": "fabric",
    "fastai": "fastai",
    "skorch": "skorch",
    "ignite": "ignite",
    "composer": "composer",
    "deepspeed": "deepspeed",
    "ultralytics": "ultralytics",
    "keras": "keras",
}
# Of several that a script uses the one in front runs the loop: Trainer on Accelerate, Fabric below Lightning.
FRAMEWORKS = (
    *("transformers", "ultralytics", "composer", "lightning", "fabric", "fastai", "skorch", "ignite", "keras"),
    *("deepspeed", "accelerate"),
)
BUILDERS = frozenset(["transformers", "ultralytics", "skorch", "fastai"])  # of loaders, from settings of their own

_Data = dict[str, Any]


def facts(tables: Tables) -> tuple[Site, ...]:
    """One per construction, in order of time."""
    return tuple(
        Site(
            what=str(data.get("what") or "?"),
            place=place_of(data),
            arguments=_arguments(data),
            rank=row["rank"] if row["rank"] is not None else 0,
            via=data["via"] if isinstance(data.get("via"), str) else None,
        )
        for row, data in event_data(tables, "site")
    )


def settings(tables: Tables, event: _Data | None, trained_by: FrameworkFacts | None = None) -> Settings | None:
    """Of the framework that runs the loop: the one that was seen training.

    In recordings that know none, it is told by who made the loader of `event`, else by who was told its settings. Of
    several such lines the last before the loader was made; None where no framework was seen.
    """
    built, unseen = _framework(_made(tables, event)), event is None
    before = event.get("_time") if event is not None else None
    told: dict[str, list[_Data]] = {}
    for row, data in event_data(tables, "site"):
        own = _told(data)
        if own is not None and not (own in told and before is not None and row["time_ns"] > before):
            told.setdefault(own, []).append(data)
    seen = None
    if trained_by is not None:
        seen = "fabric" if trained_by.name == "Fabric" else PACKAGES.get(trained_by.package)
    guessed = built if built in BUILDERS else next((name for name in FRAMEWORKS if name in told), None)
    name = guessed if seen is None else seen
    if name is None:
        return None
    place = place_of(told[name][-1]) if name in told else None
    # fastai's loaders are none of torch's: nobody saw them made
    return Settings(name, place, loaders=name == built or (name == "fastai" and unseen))


def site_of(tables: Tables, event: _Data | None) -> _Data | None:
    """What to speak of where that loader's arguments are meant; without a `file` where no line says them.

    In recordings whose sites know no loader it is guessed: the same arguments, else the only or first one.
    """
    sites = [data for _, data in event_data(tables, "site") if data.get("what") == "DataLoader"]
    if not any("id" in data for data in sites):
        return _most_alike(sites, event)
    made = _made(tables, event)
    framework = _framework(made)
    if made is None or framework is None or framework == "fastai":
        return made
    own = [data for data in sites if data.get("dataset") is not None and data["dataset"] == made.get("dataset")]
    places = {place_of(data) for data in own if _framework(data) is None}
    found = settings(tables, event)
    of_settings = found.place if found is not None and found.loaders else None
    place = places.pop() if len(places) == 1 else of_settings
    file, line, function = (place.file, place.line, place.function) if place is not None else (None, None, None)
    return {**made, "file": file, "line": line, "function": function}


def _made(tables: Tables, event: _Data | None) -> _Data | None:
    """The construction of the loader that an event tells of; one over the same data set where it was not written."""
    if event is None:
        return None
    sites = [
        data
        for row, data in event_data(tables, "site")
        if data.get("what") == "DataLoader" and event.get("_process", row["process"]) == row["process"]
    ]
    for name in ("id", "dataset"):
        same = [data for data in sites if data.get(name) is not None and data.get(name) == event.get(name)]
        if same and (name == "id" or len({place_of(data) for data in same}) == 1):
            return same[-1]
    return sites[0] if len({place_of(data) for data in sites}) == 1 else None


def _framework(site: _Data | None) -> str | None:
    """Whose code called the constructor at the user's line; None of the user's own and of other libraries'."""
    via = site.get("via") if site is not None else None
    if not isinstance(via, str):
        return None
    if via.startswith("lightning/fabric/"):
        return "fabric"
    return PACKAGES.get(via.split("/", 1)[0].split("\\", 1)[0])


def _told(site: _Data) -> str | None:
    """The framework that this construction is the settings of, unless another framework made it."""
    package, _, name = str(site.get("what") or "").partition(".")
    framework = "fabric" if name == "Fabric" else PACKAGES.get(package) if name else None
    return framework if _framework(site) in (None, framework) else None


def _most_alike(sites: list[_Data], event: _Data | None) -> _Data | None:
    if not sites or event is None:
        return sites[0] if sites else None

    def likeness(data: _Data) -> int:
        arguments = _arguments(data)
        same = 0
        for name in ("num_workers", "batch_size"):
            default = 0 if name == "num_workers" else 1
            same += first_int(arguments.get(name), default) == first_int(event.get(name), default)
        return same

    return max(sites, key=likeness)


def place_of(site: _Data | None) -> Place | None:
    """The line of the user's that a `site` event names."""
    if not site or not isinstance(site.get("file"), str):
        return None
    line = site.get("line")
    return Place(site["file"], line if isinstance(line, int) else None, site.get("function"))


def first_int(*values: object) -> int | None:
    """The first that is a whole number, or a text of one."""
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and re.fullmatch(r"\d+", value):
            return int(value)
    return None


def _arguments(data: _Data) -> dict[str, Any]:
    arguments = data.get("arguments")
    return dict(arguments) if isinstance(arguments, dict) else {}
