"""When a command that has made its steps is interrupted, and when again."""

from __future__ import annotations

from pathlib import Path

from stepscope.record.host.signals import AGAIN_SECONDS, MAX_STEPS_MARKER, MOST, StepLimit


class Command:
    """A run whose journal grows as the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.signals, self.now = folder, 0, 100.0
        self.limit = StepLimit(folder, lambda: [folder], self.interrupt, lambda: self.now)

    def interrupt(self) -> None:
        self.signals += 1

    def train(self) -> None:
        with (self.folder / "steps.jsonl").open("a") as file:
            file.write("[1]\n")

    def reach(self) -> None:
        (self.folder / MAX_STEPS_MARKER).write_text("{}\n")

    def look_after(self, seconds: float) -> int:
        self.now += seconds
        self.limit.look()
        return self.signals


def test_nothing_before_the_limit_and_once_at_it(tmp_path: Path) -> None:
    command = Command(tmp_path)
    command.train()
    assert command.look_after(60) == 0
    assert command.limit.pending
    command.reach()
    assert command.look_after(0.1) == 1
    assert not command.limit.pending


def test_a_command_that_ends_in_its_own_time_is_not_told_again(tmp_path: Path) -> None:
    command = Command(tmp_path)
    command.reach()
    command.train()
    assert command.look_after(0) == 1
    command.train()  # the steps that were on their way
    for _ in range(20):
        assert command.look_after(AGAIN_SECONDS) == 1


def test_one_that_trains_on_is_told_again_but_not_for_ever(tmp_path: Path) -> None:
    command = Command(tmp_path)
    command.reach()
    assert command.look_after(0) == 1
    counts = []
    for _ in range(4 * MOST):
        command.train()
        counts.append(command.look_after(AGAIN_SECONDS))
    assert counts[0] == 1  # the first look afterwards only sees how far it is
    assert counts[1] == 2
    assert counts[-1] == MOST
