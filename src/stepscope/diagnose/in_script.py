"""What to write into a script for each change, in plain PyTorch and in the words of the framework that runs its loop.

One table for both readers, `in_script.json`: findings say it in their fix, an experiment beside a knob that won. A
change is a knob's name, or one that no knob turns (`batch_size`). Where a framework has no setting of its own the plain
one holds: a Lightning user's DataLoader is a DataLoader; TRL's configurations inherit all of the Trainer's. What is
`unsettable` the framework decides itself, as it builds its loaders: nothing is said of it. Names were read in
transformers 5.23, accelerate 1.15, lightning 2.6, fastai 2.8, skorch 1.4, ignite 0.5, keras 3.15, and the sources of
Composer, DeepSpeed and Ultralytics.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.diagnose.rule import at_place
from stepscope.model import Analysis, Finding, Place, Risk, Settings

Told = TypeVar("Told", Finding, Risk)

TRUE = ("true", "1", "yes", "on")
FALSE = ("false", "0", "no", "off", "none")
LOADER = "loader."
FREE = "N"  # a value that the user has to choose


class Edit(Struct, frozen=True):
    """What one change comes to: an argument of `call`, which changes may share, or all there is to write.

    `by_value` has the values that are written in a way of their own, "true" and "false" for all words of these.
    """

    write: str
    call: str | None = None
    by_value: dict[str, str] = field(default_factory=dict)

    def argument(self, value: str) -> str:
        word = value.lower()
        switch = "true" if word in TRUE else "false" if word in FALSE else ""
        template = self.by_value.get(word) or self.by_value.get(switch) or self.write
        return template.format(value=value, literal=literal(value), repr=repr(value), quoted=shlex.quote(value))

    def text(self, value: str) -> str:
        argument = self.argument(value)
        return argument if self.call is None else f"{self.call}(..., {argument})"


class Framework(Struct, frozen=True):
    """How a training framework is called, and the changes for which it has a setting of its own, or none at all."""

    title: str
    edits: dict[str, Edit]
    unsettable: frozenset[str] = frozenset()


class Edits(Struct, frozen=True):
    """`plain`: every knob of the table, and no other change. `frameworks`: by the names of `analyze.sites`."""

    plain: dict[str, Edit]
    frameworks: dict[str, Framework]


def literal(value: str) -> str:
    text = value.strip()
    if text == FREE:
        return text
    if text.lower() in ("true", "false"):
        return text.capitalize()
    try:
        return str(int(text))
    except ValueError:
        return repr(text)


EDITS = msgspec.json.decode(Path(__file__).with_name("in_script.json").read_bytes(), type=Edits)
# Changes that findings of these rules propose and that no knob turns.
_LESS_MEMORY = (("batch_size", FREE), ("accumulation", FREE), ("checkpointing", "true"))
_MORE: Mapping[str, tuple[tuple[str, str], ...]] = {
    "compute.small_batch": (("batch_size", FREE),),
    "host.evaluation_between_steps": (("evaluation.every", FREE),),
    "compute.recompute": (("checkpointing", "false"),),
    "memory.allocator_retries": _LESS_MEMORY,
    "memory.near_limit": _LESS_MEMORY,
}
# The same of findings whose title also has this word. A loss that decides a branch is what a filter of NaN does.
_MORE_OF_TITLES = {
    ("io.blocking_in_step", "save"): (("saving.every", FREE),),
    ("sync.host_waits", "is_nonzero"): (("nan_filter", "false"),),
}


def edit_of(change: str, settings: Settings | None) -> tuple[Edit | None, bool]:
    """(how a change is written, whether that is a setting of the framework); None where it cannot be written."""
    framework = settings.framework if settings is not None else None
    if settings is not None and change.startswith(LOADER) and not settings.loaders:
        framework = None  # the user's own DataLoader
    words = EDITS.frameworks.get(framework) if framework is not None else None
    if words is not None and change in {*words.unsettable, *words.edits}:
        edit = words.edits.get(change)
        if edit is not None and settings is not None:
            edit = replace(edit, call=settings.called.get(edit.call or "", edit.call))
        return edit, True
    return EDITS.plain.get(change), False


def of_loader(site: Place | None, settings: Settings | None, via: str | None = None, **values: object) -> str:
    """Arguments of the loader and where they stand: "num_workers=2 in the DataLoader at train.py:77".

    Args:
        via: the installed file that the line called and that made the loader, where one did.
    """
    arguments, call = [], f"the DataLoader that {_package(via)} makes" if via else "the DataLoader"
    for name, value in values.items():
        edit, own = edit_of(LOADER + name, settings)
        if edit is not None:
            arguments.append(edit.argument(str(value)))
            if own and settings is not None:
                call, site = f"{edit.call}(...)", settings.place or site
    return f"{', '.join(arguments)} in {call}{at_place(site)}"


def _package(file: str) -> str:
    """`lightning` of `lightning/pytorch/trainer.py`."""
    return file.replace("\\", "/").partition("/")[0].removesuffix(".py")


def in_framework(finding: Told, analysis: Analysis) -> Told:
    """The finding or risk with its fix in the framework's words first, where it has a setting for what is tried."""
    settings = analysis.settings
    if settings is None or finding.category == "input":  # the loader's rules speak by `of_loader`
        return finding
    calls: dict[str, list[str]] = {}
    alone: list[str] = []
    # its knobs, and what no knob turns
    titled = [more for (rule, word), more in _MORE_OF_TITLES.items() if finding.rule == rule and word in finding.title]
    others: tuple[tuple[str, str], ...] = titled[0] if titled else _MORE.get(finding.rule, ())
    for change, value in [*((each.knob, each.value) for each in finding.try_), *others]:
        edit, own = edit_of(change, settings)
        if edit is None or not own:
            continue
        if edit.call is not None:
            calls.setdefault(edit.call, []).append(edit.argument(value))
        else:
            alone.append(edit.text(value))
    told = [f"{call}(..., {', '.join(dict.fromkeys(arguments))})" for call, arguments in calls.items()] + alone
    if not told:
        return finding
    title, where = EDITS.frameworks[settings.framework].title, at_place(settings.place)
    return replace(finding, fix=f"With {title}: {' and '.join(told)}{where}. In plain PyTorch: {finding.fix}")
