"""Copies that hold a device up: each way to copy from the host has its own words, and hidden copies cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Finding
from tests.analyze.device_scenes import (
    BETWEEN,
    PAGEABLE_IN,
    PINNED_IN,
    SGEMM,
    V100,
    Scene,
    batch_copies,
    copies_within,
    repeated,
)

Fill = Callable[[Scene], Any]


def findings(fill: Fill) -> dict[str, Finding]:
    return {one.rule: one for one in diagnose(analyze(repeated(4, 1000, fill).tables(V100))).findings}


def pinned_by_hand(scene: Scene) -> None:
    scene.op("aten::pin_memory", 5, 300)
    scene.kernel(SGEMM, 320, 600)


@pytest.mark.parametrize(
    ("fill", "title", "fix", "knobs"),
    [
        (batch_copies, "Copies from pageable memory", "pin_memory=True", ["loader.pin_memory"]),
        (
            lambda scene: batch_copies(scene, PAGEABLE_IN, wait=False),
            "non_blocking=True has no effect",
            "pin_memory=True",
            ["loader.pin_memory"],
        ),
        (lambda scene: batch_copies(scene, PINNED_IN), "Copies from pinned memory block", "non_blocking=True", []),
        (
            lambda scene: batch_copies(scene, PINNED_IN, wait=False),
            "Nothing hides copies",
            "Copy the next batch while",
            [],
        ),
        (
            lambda scene: batch_copies(scene, "Memcpy HtoD (Host -> Device)"),
            "Copies from the host",
            "does not tell whether",
            ["loader.pin_memory"],
        ),
        (pinned_by_hand, "Pinning memory on the training thread", "thread of its own", ["loader.pin_memory"]),
    ],
    ids=["pageable", "non_blocking without pinning", "pinned but blocking", "pinned, not hidden", "untold", "pinning"],
)
def test_each_way_to_copy_from_the_host_is_told_apart(fill: Fill, title: str, fix: str, knobs: list[str]) -> None:
    found = findings(fill)
    finding = found["transfer.host_to_device"]
    assert finding.title.startswith(title)
    assert fix in finding.fix
    assert [item.knob for item in finding.try_] == knobs
    assert 0.27 <= finding.share <= 0.33
    assert "sync.host_waits" not in found


def test_the_rate_of_copies_stands_in_title_and_evidence() -> None:
    finding = findings(batch_copies)["transfer.host_to_device"]
    assert "at 10.0 GB/s" in finding.title
    assert {item.metric: item.value for item in finding.evidence}["rate of these copies"] == pytest.approx(10)


def test_copies_on_a_device_are_told_by_where_they_go() -> None:
    within = findings(copies_within)["transfer.device_to_device"]
    assert within.title.startswith("Copies within the device take 0.3 ms")
    assert "aten::clone" in within.title
    between = findings(lambda scene: copies_within(scene, BETWEEN))["transfer.device_to_device"]
    assert between.title.startswith("Copies between devices")
    assert between.fix != within.fix


def test_a_copy_on_a_device_beside_work_costs_nothing() -> None:
    def fill(scene: Scene) -> None:
        copies_within(scene)
        scene.work(SGEMM, 505, 400, launch=scene.call("cudaLaunchKernel", 1, 1), stream=8)

    assert "transfer.device_to_device" not in findings(fill)
