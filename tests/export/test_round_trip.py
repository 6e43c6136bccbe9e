"""What `export` wrote, `analyze` reads: whatever was exported, merged or cut, from whole traces and damaged ones."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.api import ReadOptions, open_run
from stepscope.errors import StepscopeError
from stepscope.export import Cut, export
from tests import gpu_traces
from tests.dashboard import served_runs
from tests.export.traces import save, trace
from tests.fuzz import damage

OPTIONS = ReadOptions(cache=False, keep=False, workers=1)
QUARTER_NS = 250_000  # of a millisecond
CATEGORIES = ("kernel", "cpu_op", "user_annotation", "python_function", "nothing")

cuts = st.one_of(
    st.just(Cut()),
    st.tuples(st.integers(0, 9), st.integers(0, 5)).map(lambda at: Cut(steps=(at[0], sum(at)))),
    st.tuples(st.integers(0, 20), st.integers(1, 30)).map(
        lambda at: Cut(range_ns=(at[0] * QUARTER_NS, sum(at) * QUARTER_NS))
    ),
    st.sampled_from(CATEGORIES).map(lambda name: Cut(categories=(name,))),
)


def write(kind: str, path: Path) -> None:
    if kind == "gpu":
        gpu_traces.write(path, steps=3)
    elif kind == "cpu":
        served_runs.cpu_trace(path)
    else:
        save(path, trace(rank=int(kind)))


@given(
    kinds=st.lists(st.sampled_from(["gpu", "cpu", "0", "0", "1"]), min_size=1, max_size=3),
    seed=st.one_of(st.none(), st.integers(min_value=0, max_value=10**6)),
    cut=cuts,
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_analyze_reads_every_export(kinds: list[str], seed: int | None, cut: Cut) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), Path(name) / "out.json"
        paths = [folder / f"{number}.json" for number in range(len(kinds))]
        for kind, path in zip(kinds, paths, strict=True):
            write(kind, path)
            if seed is not None:
                rng = random.Random(seed)
                path.write_bytes(damage.dumped(damage.of_value(json.loads(path.read_bytes()), rng), rng))
        try:
            done = export(paths, out, cut)
        except StepscopeError:
            assert seed is not None or not cut.whole  # nothing is left of a cut, or of what was damaged
            return
        try:
            report = open_run(out, options=OPTIONS).report()
        except StepscopeError:
            assert done.slices == 0
            return
        if seed is None and cut.whole and len(paths) == 1:
            before = open_run(paths[0], options=OPTIONS).report()
            assert report.steps is not None
            assert before.steps is not None
            for key in ("count", "mean_ms", "partition"):
                assert report.steps[key] == before.steps[key]
