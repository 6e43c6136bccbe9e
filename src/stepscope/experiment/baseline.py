"""What proposals need to know of a recorded run: its losses, what is set already, where a step goes, the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from stepscope.diagnose.in_script import FALSE, TRUE
from stepscope.model import Analysis, Diagnosis, Finding, Risk
from stepscope.schema import Knob

# argument of the DataLoader -> knob
LOADER_ARGUMENTS = {name: f"loader.{name}" for name in ("pin_memory", "persistent_workers", "prefetch_factor")}


class Loss(Struct, frozen=True):
    """A finding, as far as an experiment is concerned. `ceiling` is a fraction of the mean step, None of a risk."""

    finding: str
    title: str
    fix: str
    ceiling: float | None
    tries: tuple[Knob, ...]
    file: str | None = None
    line: int | None = None
    explains: tuple[str, ...] = ()


class Baseline(Struct, frozen=True):
    """A run that changes are proposed for.

    `settings` are values in force, by knob; `phases` shares of the mean step, by category. A name that is not in
    them is not known. `devices` is empty where no rank told.
    """

    losses: tuple[Loss, ...]
    risks: tuple[Loss, ...] = ()
    devices: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    cores: float | None = None  # that one rank may use

    @property
    def on_cpu(self) -> bool:
        """Whether all ranks are known to have trained on the CPU."""
        return bool(self.devices) and all(device == "cpu" for device in self.devices)


def same(value: str, other: str) -> bool:
    """Whether two values of a knob mean the same."""
    return _plain(value) == _plain(other)


def _plain(value: str) -> str:
    text = value.strip().lower()
    if text in TRUE:
        return "true"
    return "false" if text in FALSE else text


def of_run(analysis: Analysis, diagnosis: Diagnosis) -> Baseline:
    """From facts and findings."""
    loader, settings = analysis.loader, {}
    if loader is not None:
        settings = _settings(loader.num_workers, loader.in_main_process, loader.arguments, loader.threads)
    trial = getattr(analysis, "trial", None)
    for knob in trial.knobs if trial is not None else ():
        if knob.applied:
            settings[knob.knob] = knob.value
    train = next((facts for facts in analysis.steps if facts.kind == "train"), None)
    return Baseline(
        losses=tuple(_loss(finding, finding.gain_ceiling) for finding in diagnosis.findings),
        risks=tuple(_loss(risk, None) for risk in diagnosis.risks),
        devices=analysis.devices,
        settings=settings,
        phases={part.category: part.share for part in train.partition} if train is not None else {},
        cores=loader.cpu_limit / max(1, loader.ranks_on_host) if loader is not None else None,
    )


def _loss(finding: Finding | Risk, ceiling: float | None) -> Loss:
    place = finding.where[0] if finding.where else None
    return Loss(
        finding=finding.id,
        title=finding.title,
        fix=finding.fix,
        ceiling=ceiling,
        tries=tuple(Knob(each.knob, each.value) for each in finding.try_),
        file=place.file if place is not None else None,
        line=place.line if place is not None else None,
        explains=finding.explains,
    )


def _settings(
    workers: int | None, in_main_process: bool, arguments: Mapping[str, Any], threads: int | None
) -> dict[str, str]:
    settings: dict[str, str] = {}
    if workers is not None or in_main_process:
        settings["loader.num_workers"] = str(workers or 0)
    for argument, knob in LOADER_ARGUMENTS.items():
        if argument in arguments:
            settings[knob] = str(arguments[argument])
    if threads is not None:
        settings["torch.num_threads"] = str(threads)
    return settings
