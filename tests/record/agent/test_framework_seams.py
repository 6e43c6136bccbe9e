"""Seams of frameworks: who trains is written once, its parts are regions, and nothing of it changes what it does."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.record.agent.imports import FRAMEWORK_MODULES
from stepscope.record.agent.probes.frameworks import (
    CALL,
    FRAMEWORKS,
    OPTIMIZER,
    TAPS,
    Framework,
    FrameworkSeamsProbe,
    Seam,
)
from stepscope.record.agent.probes.side_events import SETTINGS
from stepscope.record.agent.probes.training import FSDP
from tests.record.agent import fake_frameworks
from tests.record.agent.fake_agent import WithProbe
from tests.record.agent.fake_frameworks import FAKE
from tests.record.agent.processes import SCRIPTS, run_script

SLOW_S = 0.001  # longer than what is summed up


class Recorded(WithProbe):
    """An agent with the probe of the fake framework alone, and a training step as the probes of torch tell it."""

    def __init__(self, folder: Path, faults: str | None = None, table: tuple[Framework, ...] = (FAKE,)) -> None:
        super().__init__(folder, lambda agent: FrameworkSeamsProbe(agent, table), faults)
        self.agent.probes.add(self.probe)
        self.rows: list[Any] = []
        self.agent.journal.write_steps = self.rows.extend  # type: ignore[method-assign]
        self.evaluating: list[str] = []
        self.agent.steps.evaluation_start = lambda _now: self.evaluating.append("start")  # type: ignore[method-assign]
        self.agent.steps.evaluation_end = lambda _now: self.evaluating.append("end")  # type: ignore[method-assign]
        self.agent.accepts(strong=True)
        self.agent.steps.optimizer_created()
        self.agent.steps.loader_created(1, 1, self.agent.clock.now())

    def step(self, _number: int) -> None:
        steps, now = self.agent.steps, self.agent.clock.now
        moment = now()
        if self.agent.framework_steps is not None:
            self.agent.framework_steps.sample(moment)
        steps.fetch_start(1, moment)
        steps.fetch_end(1, 4, now())
        steps.backward_start(now())
        steps.backward_end(now())
        steps.optimizer_start(5, now())
        self.agent.optimizer_events += 1
        steps.optimizer_end(5, now())

    def regions(self) -> list[str]:
        return [event["name"] for event in self.of("region")]


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Any]:
    made: list[Recorded] = []

    def make(**options: Any) -> Recorded:
        made.append(Recorded(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.leave()
    fake_frameworks.remove()


def test_a_training_is_written_once_with_its_parts(record: Any) -> None:
    trainer_class, callback_class, _ = fake_frameworks.install()
    recorded = record()

    class Slow(callback_class):  # type: ignore[misc, valid-type]
        def on_step(self, _trainer: Any) -> None:
            time.sleep(SLOW_S)

    trainer = trainer_class(recorded.step, [Slow(), callback_class()])
    assert trainer.train(4, evaluate_every=2) == "trained"
    assert trainer.train(2) == "trained"
    recorded.finish()
    (event,) = recorded.of("framework")
    assert event["name"] == "Fake"
    assert (event["version"], event["supported"], event["checked"]) == ("1.2.3", True, ["1.2"])
    assert event["seams"] == ["train: Trainer.train", "evaluation: Trainer.evaluate", "logging: Logger.log"]
    assert event["missing"] == []
    assert event["counter"] == "state.step"
    assert event["trainer"] == "fakeframe.trainer." + trainer_class.__qualname__
    assert recorded.regions().count("callback:Slow") == 6
    assert all(event["source"] == "framework" for event in recorded.of("region"))
    assert [event["count"] for event in recorded.of("region") if event["name"] == "evaluation"] == [2]
    assert "callback:Callback" not in recorded.regions()  # the framework's base does nothing at an event
    assert recorded.evaluating == ["start", "end"] * 2
    assert [row.framework_step for row in recorded.rows] == [1, 2, 3, 4, 1, 2]


def test_an_optimizer_of_the_framework_s_own_is_the_optimizer_of_the_step(record: Any) -> None:
    trainer_class, _, _ = fake_frameworks.install()
    updater = type("Updater", (), {"apply": lambda _self: time.sleep(SLOW_S)})
    sys.modules["fakeframe.trainer"].Updater = updater  # type: ignore[attr-defined]
    own = Seam(OPTIMIZER, "fakeframe.trainer", "Updater", "apply")
    recorded = record(table=(FAKE._replace(seams=(*FAKE.seams, own)),))
    steps, now = recorded.agent.steps, recorded.agent.clock.now

    def step(_number: int) -> None:
        steps.fetch_start(1, now())
        steps.fetch_end(1, 4, now())
        steps.backward_start(now())
        steps.backward_end(now())
        updater().apply()

    updater().apply()  # before the training it is nobody's step
    trainer_class(step, []).train(3)
    recorded.finish()
    assert [row.kind for row in recorded.rows] == ["train"] * 3
    assert all(row.optimizer_ns >= SLOW_S * 1e9 for row in recorded.rows)


def test_what_trains_is_not_kept_alive(record: Any) -> None:
    """An accelerator holds models: who drops it wants the memory back."""
    recorded = record()

    class Accelerator:
        model = None
        callbacks: tuple[Any, ...] = ()
        state = type("State", (), {"step": 3})()

    recorded.probe._training_begins(FAKE, FAKE.seams[0]._replace(meaning=CALL), owner := Accelerator())
    recorded.step(0)
    recorded.step(1)
    gone = weakref.ref(owner)
    del owner
    assert gone() is None
    recorded.step(2)
    recorded.finish()
    assert [row.framework_step for row in recorded.rows] == [3, None, None]


@pytest.mark.parametrize("half", [False, True])
def test_imported_after_the_agent_or_half_when_it_came(record: Any, half: bool) -> None:
    """Its module may be known, half executed, when torch has been imported; the import hook tells when it is whole."""
    if half:
        trainer_class, _, _ = fake_frameworks.install()
        module = sys.modules["fakeframe.trainer"]
        del module.Trainer
        module.__spec__ = type("Spec", (), {"_initializing": True})()
        recorded = record()
        module.Trainer = trainer_class
    else:
        recorded = record()
        trainer_class, _, _ = fake_frameworks.install()
    recorded.agent.probes.add(SimpleNamespace(name="sampler", uninstall=bool))  # stands among them and waits for none
    recorded.agent.probes.module_imported("fakeframe.trainer")
    trainer_class(recorded.step, []).train(2)
    recorded.finish()
    assert len(recorded.of("framework")) == 1


def test_everything_is_left_as_found(record: Any) -> None:
    trainer_class, callback_class, logger_class = fake_frameworks.install()

    class Mine(callback_class):  # type: ignore[misc, valid-type]
        def on_step(self, _trainer: Any) -> None:
            seen.append(dict(vars(Mine)))

    seen: list[dict[str, Any]] = []
    before = [dict(vars(cls)) for cls in (trainer_class, logger_class, Mine)]
    recorded = record()
    trainer_class(recorded.step, [Mine()]).train(2)
    assert seen[0] != before[2]  # wrapped while it trains
    assert dict(vars(Mine)) == before[2]  # and no longer: a class of the user's may be pickled by value
    recorded.probe.uninstall()
    assert [dict(vars(cls)) for cls in (trainer_class, logger_class, Mine)] == before
    recorded.agent.guard.wrap("again", recorded.probe.install)()
    trainer_class(recorded.step, []).train(2)
    recorded.finish()
    assert len(recorded.of("framework")) == 1


def test_out_while_the_users_profiler_runs(record: Any) -> None:
    """Taken out and put back in the middle of a training, whose end and callbacks are seen all the same."""
    trainer_class, callback_class, _ = fake_frameworks.install()
    recorded = record()

    class Slow(callback_class):  # type: ignore[misc, valid-type]
        def on_step(self, _trainer: Any) -> None:
            time.sleep(SLOW_S)

    def step(number: int) -> None:
        if number == 1:
            recorded.probe.uninstall()
        if number == 2:
            recorded.probe.install()
        recorded.step(number)

    trainer_class(step, [Slow()]).train(4)
    recorded.finish()
    assert recorded.regions() == ["callback:Slow"] * 3
    assert [row.framework_step for row in recorded.rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("faults", ["framework_seams", "framework_steps", "*"])
def test_a_seam_that_raises_is_switched_off(record: Any, faults: str) -> None:
    trainer_class, _, logger_class = fake_frameworks.install()
    recorded = record(faults=faults)
    trainer = trainer_class(recorded.step, [])
    assert trainer.train(3, evaluate_every=1) == "trained"
    assert logger_class().log("text") == "text"
    recorded.finish()
    if faults != "*":  # which takes the journal as well
        assert [event["probe"] for event in recorded.of("probe_error")] == [faults]
        assert [row.framework_step for row in recorded.rows] == [None, None, None]


def test_the_import_hook_knows_every_module_of_the_table() -> None:
    """`imports.py` is executed on its own and cannot read the tables."""
    seams = {seam.module for framework in FRAMEWORKS for seam in framework.seams}
    known = seams | {tap.module for tap in TAPS} | {setting[0] for setting in SETTINGS}
    assert known | {FSDP} == FRAMEWORK_MODULES


def test_the_table_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "frameworks.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "(`" in line]
    assert [row[0].strip("| ") for row in rows] == [f"{each.name} (`{each.package}`)" for each in FRAMEWORKS]
    for row, framework in zip(rows, FRAMEWORKS, strict=True):
        assert row[1] == ", ".join(framework.checked)
        assert row[2] == (f"`{framework.counter}`" if framework.counter else "none")
        assert row[3] == (framework.counts if framework.counter else "–")
        for seam in framework.seams:
            assert f"`{seam.owner}.{seam.name}`" in row[4]


@pytest.mark.torch
@pytest.mark.parametrize("order", [["skorch.net"], ["torch"]])
def test_a_framework_is_found_whenever_it_is_imported(tmp_path: Path, order: list[str]) -> None:
    pytest.importorskip("torch")
    outcome = run_script(tmp_path, "framework_order.py", *order, path=(SCRIPTS / "fake_skorch",))
    assert (outcome.status, outcome.stdout) == (0, "NeuralNet.fit_loop\n"), outcome.stderr
    (event,) = outcome.events("framework")
    assert (event["name"], event["version"], event["supported"]) == ("skorch", "0.0.1", False)
    assert event["seams"] == ["train: NeuralNet.fit_loop", "evaluation: NeuralNet.run_single_epoch"]
    assert event["missing"] == ["checkpoint: NeuralNet.save_params"]
    assert [row["kind"] for row in outcome.steps()] == [*["train"] * 6, *["eval"] * 6] * 2
    assert outcome.events("probe_error") == []
