"""Frameworks of the shape the table describes, made of plain modules; what they train with is told to the agent."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from stepscope.record.agent.probes.frameworks import EVALUATION, TRAIN, Framework, Seam

FAKE = Framework(
    "Fake",
    "fakeframe",
    ("1.2",),
    (
        Seam(TRAIN, "fakeframe.trainer", "Trainer", "train", "callbacks"),
        Seam(EVALUATION, "fakeframe.trainer", "Trainer", "evaluate"),
        Seam("logging", "fakeframe.loggers", "Logger", "log"),
    ),
    counter="state.step",
)


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    for key, value in members.items():
        if isinstance(value, type):
            value.__module__ = name
        setattr(made, key, value)
    sys.modules[name] = made
    return made


def classes() -> tuple[type, type, type]:
    """(Trainer, Callback, Logger), made anew."""

    class Callback:
        def on_step(self, trainer: Any) -> None:
            """Does nothing."""

    class Trainer:
        def __init__(self, step: Any, callbacks: list[Any]) -> None:
            self.step = step
            self.callbacks = callbacks
            self.state: Any = None

        def train(self, steps: int, evaluate_every: int = 0) -> str:
            self.state = type("State", (), {"step": 0})()
            for number in range(steps):
                self.step(number)
                self.state.step += 1
                for callback in self.callbacks:
                    callback.on_step(self)
                if evaluate_every and number % evaluate_every == 0:
                    self.evaluate()
            return "trained"

        def evaluate(self) -> str:
            return "evaluated"

    class Logger:
        def log(self, text: str) -> str:
            return text

    return Trainer, Callback, Logger


def install(version: str = "1.2.3", without: tuple[str, ...] = ()) -> tuple[type, type, type]:
    """Put the framework into `sys.modules`, lacking the classes or methods in `without`."""
    trainer, callback, logger = classes()
    for name in without:
        if name in vars(trainer):
            delattr(trainer, name)
    package = module("fakeframe", __version__=version)
    package.__path__ = []
    module("fakeframe.trainer", Trainer=trainer, Callback=callback)
    if "Logger" not in without:
        module("fakeframe.loggers", Logger=logger)
    return trainer, callback, logger


def remove() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fakeframe"]:
        del sys.modules[name]
