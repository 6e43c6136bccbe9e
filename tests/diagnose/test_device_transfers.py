"""Copies that hold a device up: each way to copy from the host has its own words, and hidden copies cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Diagnosis, Finding, Place
from tests.analyze.device_scenes import (
    BETWEEN,
    FILE,
    PAGEABLE_IN,
    PINNED_IN,
    SGEMM,
    V100,
    Scene,
    batch_copies,
    copies_within,
    repeated,
)
from tests.analyze.scenes import loader_tables
from tests.records import replace

Fill = Callable[[Scene], Any]
PINNING_OFF = "transfer.pinning_off"


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
    assert "at 10.0 GB/s" in finding.title or fill is pinned_by_hand
    assert fix in finding.fix
    assert [item.knob for item in finding.try_] == knobs
    assert 0.27 <= finding.share <= 0.33
    assert "sync.host_waits" not in found


def fed(fill: Fill, device: str = "cuda:0", **arguments: str) -> Diagnosis:
    """A run on the device whose DataLoader was constructed with these arguments."""
    loader = analyze(loader_tables()).loader
    assert loader is not None
    analysis = analyze(repeated(4, 1000, fill).tables(V100))
    loader = replace(loader, site=Place(FILE, 7), arguments=arguments)
    return diagnose(replace(analysis, devices=(device,), loader=loader))


def copies_in(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {one.rule: one for one in diagnosis.findings if one.rule in (PINNING_OFF, "transfer.host_to_device")}


@pytest.mark.parametrize("arguments", [{}, {"pin_memory": "False"}], ids=["by default", "by the script"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_loader_that_does_not_pin_is_told_once(arguments: dict[str, str], wait: bool) -> None:
    found = copies_in(fed(lambda scene: batch_copies(scene, wait=wait), **arguments))
    assert list(found) == [PINNING_OFF]
    assert found[PINNING_OFF].share == pytest.approx(findings(batch_copies)["transfer.host_to_device"].share, abs=0.01)
    assert "pin_memory=True" in found[PINNING_OFF].fix
    assert [item.knob for item in found[PINNING_OFF].try_] == ["loader.pin_memory"]


def test_what_pinning_would_not_change_is_told_beside_it() -> None:
    def fill(scene: Scene) -> None:
        to = scene.op("aten::to", 5, 312)
        call = scene.call("cudaMemcpyAsync", 10, 302, to)
        scene.work(PAGEABLE_IN, 12, 300, launch=call, op=to, category="gpu_memcpy", bytes=3_000_000)
        scene.call("cudaStreamSynchronize", 313, 3, to)
        scene.op("aten::pin_memory", 320, 340)
        scene.kernel(SGEMM, 680, 250, launched=670)

    both = copies_in(fed(fill))
    alone = findings(fill)["transfer.host_to_device"]
    assert sorted(both) == ["transfer.host_to_device", PINNING_OFF]
    assert both["transfer.host_to_device"].title.startswith("Pinning memory on the training thread")
    assert sum(one.share for one in both.values()) == pytest.approx(alone.share)


def test_a_loader_that_pins_leaves_copies_to_the_other_rule() -> None:
    assert list(copies_in(fed(batch_copies, pin_memory="True"))) == ["transfer.host_to_device"]
    assert not copies_in(fed(lambda scene: scene.kernel(SGEMM, 10, 900)))


def test_it_abstains_where_pinning_is_not_known_or_no_cuda_device_is_fed() -> None:
    def missing(diagnosis: Diagnosis) -> tuple[str, bool]:
        return next((one.needs, one.quiet) for one in diagnosis.abstained if one.rule == PINNING_OFF)

    needs, quiet = missing(fed(batch_copies, pin_memory="on_gpu"))
    assert "says whether it pins" in needs
    assert not quiet
    assert missing(fed(batch_copies, device="cpu")) == ("training on a CUDA device", True)
    assert list(copies_in(fed(batch_copies, device="xpu:0"))) == ["transfer.host_to_device"]


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
