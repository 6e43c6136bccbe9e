"""Pages that every step has mapped anew: the cost from counts and a calibration, the fix, and silence without them."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Diagnosis, Finding
from tests.builders import MS, PID, T0, make_tables, step_rows
from tests.diagnose.judged import values

RULE = "memory.page_faults"
COST = {"page_bytes": 4096, "ns_alone": 1000.0, "threads": 2, "ns_beside": 1400.0, "ns_returned": 200.0}
GLIBC = {"cost": COST, "huge_pages": "madvise", "libc": "glibc 2.36", "installed": []}


def judged(
    faults: int | None = 15_000,
    *,
    told: dict[str, Any] | None = GLIBC,
    environment: dict[str, str] | None = None,
    main: float | None = None,
    resident: float = 0.0,
    **step: Any,
) -> Diagnosis:
    """40 steps of 60 ms, half forward and half backward, with telemetry once a second where `main` gives a share."""
    phases = {"data_wait_ms": 0, "forward_ms": 30, "backward_ms": 30, "optimizer_ms": 0, "other_ms": 0, **step}
    rows = step_rows(200, minor_faults=faults, major_faults=0, **phases)
    system = []
    for second in range(12) if main is not None else ():
        counted = {
            "minor_faults": second * 250_000.0,
            "main_minor_faults": main * second * 250_000.0,
            "rss_bytes": resident * second * 250_000.0 * 4096,
        }
        row = {"host": "a", "time_ns": T0 + second * 1000 * MS, "unit": "count", "pid": PID}
        system += [{**row, "metric": metric, "value": value} for metric, value in counted.items()]
    tables = make_tables(steps=rows, system=system, manifests=[{"page_faults": told, "environment": environment or {}}])
    return diagnose(analyze(tables))


def finding(diagnosis: Diagnosis) -> Finding | None:
    return next((one for one in diagnosis.findings if one.rule == RULE), None)


def test_the_training_thread_pays_its_own_faults_and_all_that_is_given_back():
    alone, shared, unknown = (finding(judged(main=main)) for main in (1.0, 0.5, None))
    assert alone is not None
    assert shared is not None
    assert unknown is not None
    assert alone.cost_ms_per_step == pytest.approx(15_000 * (1000 + 200) / 1e6)
    assert shared.cost_ms_per_step == pytest.approx(15_000 * (1400 / 2 + 200) / 1e6)
    assert unknown.cost_ms_per_step == shared.cost_ms_per_step  # the least it can have been
    assert shared.gain_ceiling == pytest.approx(15_000 * (1400 + 200) / 1e6 / 60)
    assert judged(main=0.5).findings[0].rule == RULE
    told = values(shared)
    assert told["page faults per step"] == 15_000
    assert told["allocator"] == "glibc 2.36"
    assert told["transparent huge pages"] == "madvise"


@pytest.mark.parametrize("faults", [0, 200, 3_000])
def test_silent_where_they_cost_little(faults: int):
    diagnosis = judged(faults)
    assert finding(diagnosis) is None
    assert RULE not in {one.rule for one in diagnosis.abstained}


def test_pages_that_a_run_keeps_are_no_loss():
    assert finding(judged(main=0.5, resident=1.0)) is None
    half = finding(judged(main=0.5, resident=0.5))
    assert half is not None
    assert half.cost_ms_per_step == pytest.approx(7_500 * (1400 / 2 + 200) / 1e6)


@pytest.mark.parametrize(("faults", "told"), [(None, GLIBC), (15_000, None), (15_000, {**GLIBC, "cost": None})])
def test_abstains_without_counts_or_calibration(faults: int | None, told: dict[str, Any] | None):
    diagnosis = judged(faults, told=told)
    assert finding(diagnosis) is None
    assert RULE in {one.rule for one in diagnosis.abstained}


def test_the_fix_is_for_the_allocator_in_use():
    plain = finding(judged())
    assert plain is not None
    assert "MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=4294967296" in plain.fix
    assert [(one.knob, one.value) for one in plain.try_] == [
        ("host.allocator", value) for value in ("keep", "keep_all", "huge_pages")
    ]
    kept = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
    for environment, told, words, tries in (
        (kept, GLIBC, "out=", ["huge_pages"]),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, GLIBC, "dirty_decay_ms", ["huge_pages"]),
        ({}, {**GLIBC, "libc": None, "installed": ["jemalloc"]}, "jemalloc", ["jemalloc"]),
        ({}, {**GLIBC, "huge_pages": "never"}, "MALLOC_MMAP_THRESHOLD_", ["keep", "keep_all"]),
    ):
        found = finding(judged(environment=environment, told=told))
        assert found is not None
        assert words in found.fix
        assert [one.value for one in found.try_] == tries
