"""Proposals: what the findings name, the most promising first, and for everything else a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.experiment import propose
from stepscope.experiment.plan import candidates_of
from stepscope.experiment.propose import Baseline, Proposals, baseline_of
from stepscope.model import Diagnosis, Finding, Place, Risk, Try
from stepscope.schema import Knob
from tests.records import replace
from tests.report.fabricate import analysis, diagnosis, finding, step_facts, write_script

WORKERS, PERSISTENT = Knob("loader.num_workers", "4"), Knob("loader.persistent_workers", "true")
THREADS = Knob("torch.num_threads", "2")


def loss(*tries: Knob, ceiling: float = 0.4, **changes: Any) -> Finding:
    known = {"id": "rule:0", "title": "the step waits", "fix": "do less", "gain_ceiling": ceiling}
    tried = tuple(Try(knob.knob, knob.value) for knob in tries)
    return finding("/home/me/train.py", try_=tried, where=(Place("/home/me/train.py", 7),), **{**known, **changes})


def of(*losses: Finding, root: Path = Path("/"), **changes: Any) -> Proposals:
    base = Baseline(losses=losses, devices=("cpu",), settings={"loader.num_workers": "0"}, cores=4.0)
    return propose.proposals(replace(base, **changes), root=root)


def names(found: Proposals) -> list[str]:
    """Of candidates that a finding names; where there are none, the general knobs are tried."""
    return [candidate.name for candidate in found.candidates if candidate.finding is not None]


def reasons(found: Proposals) -> dict[str, str]:
    return {skipped.name: skipped.reason for skipped in found.skipped}


def test_knobs_of_one_loader_come_together_then_alone_then_other_numbers() -> None:
    found = of(loss(WORKERS, PERSISTENT))

    assert names(found) == [
        "loader.num_workers=4 + loader.persistent_workers=true",
        "loader.num_workers=4",
        "loader.num_workers=2 + loader.persistent_workers=true",
    ]
    assert {candidate.ceiling for candidate in found.candidates} == {0.4}
    assert {candidate.finding for candidate in found.candidates} == {"rule:0"}
    assert "script has none" in reasons(found)["loader.persistent_workers=true"]


@pytest.mark.parametrize(
    ("cores", "wanted", "numbers"),
    [
        (8.0, "4", {"2", "4", "8"}),
        (4.0, "4", {"2", "4"}),
        (2.0, "2", {"1", "2"}),
        (1.0, "1", {"1"}),
        (None, "3", {"1", "3", "6"}),
    ],
)
def test_numbers_of_workers_are_bracketed_up_to_the_cores(cores: float | None, wanted: str, numbers: set[str]) -> None:
    found = of(loss(Knob("loader.num_workers", wanted)), cores=cores)

    assert {candidate.knobs[0].value for candidate in found.candidates} == numbers


@pytest.mark.parametrize(
    ("ceiling", "reason"),
    [
        (0.004, "can gain 0.4 % of the step at most, less than the 1 % that matter"),
        (0.015, "can gain 1.5 % of the step at most, less than an interval of 2 % on either side can tell"),
        (0.02, None),
    ],
)
def test_what_cannot_pay_is_skipped(ceiling: float, reason: str | None) -> None:
    found = of(loss(THREADS, ceiling=ceiling))

    assert reasons(found).get("torch.num_threads=2") == reason
    assert (names(found) == []) == (reason is not None)


def test_a_knob_that_two_findings_name_is_tried_once_for_the_higher_ceiling() -> None:
    found = of(loss(THREADS, ceiling=0.1, id="a"), loss(THREADS, ceiling=0.3, id="b"))

    assert [(candidate.name, candidate.finding) for candidate in found.candidates] == [("torch.num_threads=2", "b")]
    assert reasons(found) == {"torch.num_threads=2": "the same as torch.num_threads=2 of b"}
    assert found.by_hand == (), "both are reached"


def test_what_the_table_lacks_is_skipped_with_its_own_words() -> None:
    found = of(loss(Knob("loader.workers", "4"), Knob("torch.num_threads", "many")))

    assert "is no knob" in reasons(found)["loader.workers=4"]
    assert "takes a whole number" in reasons(found)["torch.num_threads=many"]


@pytest.mark.parametrize("knob", ["loader.pin_memory=true", "env:PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"])
def test_what_needs_a_gpu_is_not_tried_on_a_cpu(knob: str) -> None:
    name, _, value = knob.partition("=")
    on_cpu, on_gpu = of(loss(Knob(name, value))), of(loss(Knob(name, value)), devices=("cuda",))

    assert reasons(on_cpu)[knob] == "needs a GPU, and the run trained on the CPU"
    assert names(on_gpu) == [knob]
    assert names(of(loss(Knob(name, value)), devices=())) == [knob], "not known is not a CPU"


def test_a_loss_in_the_code_is_handed_on_with_its_line() -> None:
    loop = loss(ceiling=0.6, title="A Python loop calls cross_entropy", fix="Call it once.", id="loop")
    below = loss(ceiling=0.3, title="Launches of the loop", id="launches")
    small = loss(ceiling=0.004, id="small")
    found = of(replace(loop, explains=("launches",)), below, small)

    assert [(one.title, one.file, one.line, one.fix) for one in found.by_hand] == [
        ("A Python loop calls cross_entropy", "/home/me/train.py", 7, "Call it once.")
    ]


PHASES = {"data_wait": 0.0, "forward": 0.6, "backward": 0.37, "optimizer": 0.03}


def test_where_the_findings_name_no_knob_the_general_ones_are_tried() -> None:
    found = of(loss(), phases=PHASES, settings={"torch.num_threads": "1"})

    assert {candidate.knobs[0].knob for candidate in found.candidates} >= {"optimizer.fused"}
    assert all(candidate.finding is None for candidate in found.candidates)
    assert found.notes == (
        "No finding names a knob: what it costs has to be changed in the code; the general knobs are tried instead.",
    )
    assert len(found.by_hand) == 1


def test_phases_bound_what_general_knobs_can_gain() -> None:
    found = of(phases={"forward": 0.6, "backward": 0.39, "optimizer": 0.01})
    ceilings = {candidate.knobs[0].knob: candidate.ceiling for candidate in found.candidates}

    assert "optimizer.fused" not in ceilings
    assert "can gain 1 % of the step at most" in reasons(found)["optimizer.fused=true"]
    if "compile" in ceilings:
        assert ceilings["compile"] == pytest.approx(0.99)


@pytest.mark.parametrize(("flags", "emulated"), [("fpu avx512f", True), ("fpu avx512_bf16 sse", False)])
def test_half_precision_says_where_the_processor_does_not_have_it(tmp_path: Path, flags: str, emulated: bool) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    found = of(root=tmp_path, phases=PHASES)

    assert ("emulated" in reasons(found)["amp.dtype=bf16"]) == emulated


def loader_finding(folder: Path) -> Finding:
    tries = (Try("loader.num_workers", "4"), Try("loader.persistent_workers", "true"))
    return finding(str(folder / "train.py"), try_=tries)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_script(tmp_path)
    return tmp_path


def test_a_run_proposes_what_its_findings_name(folder: Path) -> None:
    facts = analysis(folder, devices=("cpu",))
    risk = Risk(
        "r", "r", "memory", "full", "warning", "low", (Place("a.py", 1),), (), "fix", "never", try_=(Try("gc", "off"),)
    )
    found = Diagnosis((loader_finding(folder), *diagnosis(folder).findings[1:]), (), risks=(risk,))
    base = baseline_of(facts, found)

    assert names(propose.proposals(base))[0] == "loader.num_workers=4 + loader.persistent_workers=true"
    assert reasons(propose.proposals(base))["gc=off"] == "of a risk without a measured cost: full"
    assert base.phases["data_wait"] == pytest.approx(step_facts().partition[0].share)


def test_what_the_user_names_comes_first_once_and_with_its_ceiling() -> None:
    pin = loss(Knob("loader.num_workers", "2"), Knob("loader.pin_memory", "true"), ceiling=0.6)
    base = Baseline(losses=(pin,), devices=("cuda",))
    found = propose.proposals(base, candidates_of(["gc=freeze", "loader.num_workers=2"]))
    ceilings = {candidate.name: candidate.ceiling for candidate in found.candidates}
    assert list(ceilings)[:2] == ["gc=freeze", "loader.num_workers=2"]
    assert len(ceilings) == len(found.candidates)
    assert (ceilings["gc=freeze"], ceilings["loader.num_workers=2"]) == (None, 0.6)
    assert "loader.pin_memory=true" in ceilings
    # knobs that no finding names are for when there is nothing else
    healthy = Baseline(losses=(), devices=("cpu",))
    alone = propose.proposals(healthy, candidates_of(["gc=freeze"]))
    assert [candidate.name for candidate in alone.candidates] == ["gc=freeze"]
    assert alone.notes == ()
    assert propose.proposals(healthy).notes == (
        "The diagnosis names no loss worth fixing; the general knobs are tried instead.",
    )
