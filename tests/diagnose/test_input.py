"""The loader: in traces without a journal, beside an accelerator, in waves, started anew for every epoch, of many
files; what workers would gain, and replays of a step without one loss, which bound all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope import api
from stepscope.analyze import analyze
from stepscope.diagnose import gains
from stepscope.diagnose.gains import PIPELINE
from stepscope.model import Analysis, Diagnosis, Finding
from stepscope.model.device_losses import DeviceLosses
from stepscope.tables.schema import Tables
from tests.analyze.scenes import ITEM, LOADER_FRAMES, TORCH, TRAIN, Trace, loader_tables, stack
from tests.analyze.test_machine import epochs_tables, wave_tables
from tests.analyze.test_ranks import rank_rows, sites
from tests.builders import MS, T0, make_tables, rank_info, step_rows
from tests.diagnose.judged import judged, needs, only, told, values
from tests.gpu_traces import STEP_US, host, write
from tests.records import blank, replace, some

RULE = "input.loader_bound"


def input_findings(diagnosis: Diagnosis) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.category == "input"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace of four steps, in each of which the device idles for the loader."""
    return write(tmp_path / "worker0.pt.trace.json", steps=4)


def opened(path: Path, *renamed: str) -> api.Run:
    if renamed:
        path.write_text(path.read_text().replace(*renamed))
    return api.open_run(path, options=api.ReadOptions(cache=False))


def part_of(run: api.Run, part: str) -> tuple[float, float]:
    """(mean step in ms, share of a part) of the one span."""
    (overview,) = (span.overview for span in some(run.analysis.views).spans)
    return some(overview).wall.mean_ns / 1e6, some(overview).parts[part].share


def test_a_trace_without_a_journal_names_its_loader(path: Path) -> None:
    run = opened(path)
    (finding,) = input_findings(run.diagnosis)
    assert finding.rule == RULE
    assert finding.share == pytest.approx(finding.cost_ms_per_step / part_of(run, "idle_data")[0])
    assert finding.gain_ceiling == finding.share
    assert finding.title.startswith("The training process loads every batch itself: the device idles for it")
    assert [(Path(place.file).name, place.line) for place in finding.where] == [("train.py", 7)]
    assert "num_workers=2" in finding.fix
    figures = values(finding)
    assert figures["device idle while the host loads, per step"] == pytest.approx(0.2, abs=0.01)
    assert figures["num_workers"] == "0"


@pytest.mark.parametrize(("workers", "told"), [(0, True), (1, True), (2, False)])
def test_workers_of_a_data_set_that_gives_no_shares_are_left_to_a_person(workers: int, told: bool) -> None:
    """Every worker would read all of it; with several somebody has divided it already."""
    finding = only(loader_tables(workers=workers, iterable=True), RULE)
    assert ("get_worker_info" in finding.fix, finding.try_ == ()) == (told, told)


def test_a_loader_behind_a_busy_device_costs_nothing(path: Path) -> None:
    """The kernels of a step run until the next batch is there."""
    busy = opened(write(path, steps=4, gemm_us=STEP_US - 1))
    loading = part_of(busy, "idle_data")[1]
    assert loading < 0.1
    assert all(finding.share == pytest.approx(loading) for finding in input_findings(busy.diagnosis))


def test_a_trace_without_a_loader_abstains(path: Path) -> None:
    run = opened(path, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "prepare")
    assert input_findings(run.diagnosis) == []
    assert "DataLoader" in needs(run.diagnosis)[RULE][0]


def test_the_name_of_the_iterator_tells_of_workers(path: Path) -> None:
    (finding,) = input_findings(opened(path, "_SingleProcess", "_MultiProcessing").diagnosis)
    assert "workers do not keep up" in finding.title
    assert finding.try_ == ()


def test_the_users_lines_below_the_loader_come_first(path: Path) -> None:
    below = [
        host(f"/app/data.py({line}): {name}", number * STEP_US + at, took, "python_function")
        for number in range(1, 5)
        for line, name, at, took in ((30, "__getitem__", 5, 150), (12, "decode", 9, 90))
    ]
    (finding,) = input_findings(opened(write(path, steps=4, more=below)).diagnosis)
    first = finding.where[0]
    assert (Path(first.file).name, first.share) == ("data.py", pytest.approx(0.75))
    assert [place.function for place in finding.where] == ["__getitem__", "train"]


def test_beside_an_accelerator_only_its_idle_time_counts_where_a_window_tells_it(path: Path) -> None:
    recorded = analyze(loader_tables(ranks=[rank_info(device="cuda")]))
    (finding,) = input_findings(judged(recorded))
    assert finding.confidence == "low"
    assert "cuda may be working" in finding.caveat
    assert finding.cost_ms_per_step == pytest.approx(60)
    (finding,) = input_findings(judged(replace(recorded, views=opened(path).analysis.views)))
    idle = values(finding)["device idle while the host loads"]
    assert isinstance(idle, float)
    assert 0.15 < idle < 0.25
    assert finding.cost_ms_per_step == pytest.approx(idle * 100, rel=1e-3)  # of a steady step of 100 ms
    assert finding.share == finding.gain_ceiling == pytest.approx(idle, rel=1e-3)
    assert "may be working" not in finding.caveat


def test_waves_are_told_as_waves_and_only_once() -> None:
    (finding,) = input_findings(judged(wave_tables()))
    assert finding.rule == "input.prefetch_waves"
    assert finding.title.startswith("One step in 4 waits 100 ms")
    (slow,) = input_findings(judged(wave_tables(7)))
    assert slow.rule == RULE


def test_workers_started_anew_for_every_epoch() -> None:
    (finding,) = input_findings(judged(epochs_tables()))
    assert finding.rule == "input.first_batch"
    total_ms = (5 * 9 * 10 + 5 * 30 + 4 * 50) / 50
    assert finding.cost_ms_per_step == pytest.approx(4)
    assert finding.share == pytest.approx(4 / total_ms)
    assert finding.gain_ceiling == pytest.approx((4 + 4 * 20 / 50) / total_ms)  # the first steps take 20 ms longer
    assert [(place.file, place.line) for place in finding.where] == [(TRAIN, 75)]
    assert "persistent_workers=True" in finding.fix
    assert [(each.knob, each.value) for each in finding.try_] == [("loader.persistent_workers", "true")]
    # a loader made anew for every epoch starts its own, persistent or not
    again = only(epochs_tables(remade=True), "input.first_batch")
    assert (again.cost_ms_per_step, again.where) == (finding.cost_ms_per_step, finding.where)
    assert again.fix.startswith("Make the DataLoader once")


def small_files(*, window: bool = False) -> Tables:
    """Three quarters of the loading read files; a window sees one file opened for 64 items."""
    read = f"Folder.__getitem__ ({TRAIN}:30)"
    stacks: list[dict[str, Any]] = [
        stack([*LOADER_FRAMES, *inside], samples, phase="data_wait")
        for inside, samples in (
            ([read, "load (/venv/lib/python3.11/site-packages/numpy/lib/_npyio_impl.py:4)"], 90),
            ([f"Folder.__getitem__ ({TRAIN}:31)"], 30),
        )
    ]
    stacks.append(stack([f"train ({TRAIN}:82)", f"Module._call_impl ({TORCH}/nn/modules/module.py:1)"], 80))
    base, trace = loader_tables(), Trace()
    steps = base.steps.to_dicts()
    for row in steps[10:12] if window else ():
        row["in_window"] = True
        for name, took_ms in (
            ("train.py(80): train", 100),
            ("torch/utils/data/dataloader.py(733): __next__", 60),
            ("train.py(29): __getitem__", 60),
            ("<built-in function open>", 5),
        ):
            trace.add(name, row["start_ns"], took_ms * MS, step=row["step"])
    rest = {"journal": base.journal.to_dicts(), "manifests": base.manifests}
    return make_tables(steps=steps, stacks=stacks, events=trace.rows, **rest)


def test_many_small_files_are_named_and_packing_is_the_advice() -> None:
    finding = only(small_files(), RULE)
    assert values(finding)["loading time in opening and reading files"] == pytest.approx(0.75)
    assert "WebDataset" in finding.fix
    assert "shards" in finding.caveat
    packed = only(small_files(window=True), RULE)
    assert values(packed)["files opened per item"] == pytest.approx(1 / 64, abs=0.001)
    assert "WebDataset" not in packed.fix


PACKAGES = "/venv/lib/python3.11/site-packages"
CALL = [
    f"Module._wrapped_call_impl ({TORCH}/nn/modules/module.py:1)",
    f"Module._call_impl ({TORCH}/nn/modules/module.py:2)",
]
COMPOSE = f"Compose.forward ({PACKAGES}/vision/transforms.py:96)"
LIST, AGAIN = f"apply.<locals>.<listcomp> ({PACKAGES}/other/apply.py:3)", f"apply ({PACKAGES}/other/apply.py:7)"


@pytest.mark.parametrize(
    ("above", "title"),
    [
        # a library's data set; its loader leads there; a composition may call itself for the next part
        (
            [f"ImageFolder.__getitem__ ({PACKAGES}/vision/folder.py:9)", COMPOSE],
            "mostly in Blur.forward (vision/blur.py)",
        ),
        ([AGAIN, LIST, AGAIN], "mostly in Blur.forward (vision/blur.py)"),
        (
            [ITEM, COMPOSE],
            "mostly in PngFolder.__getitem__ (hottest: train.py:30)",
        ),  # a line of the user's that calls it
    ],
)
def test_the_transform_of_a_library_that_takes_the_time_is_named(above: list[str], title: str) -> None:
    parts = {f"Blur.forward ({PACKAGES}/vision/blur.py:{line})": 40 for line in (5, 6)}
    parts |= {f"Crop.forward ({PACKAGES}/vision/crop.py:8)": 40}
    leaf = f"conv ({PACKAGES}/vision/functional.py:8)"
    loading = [stack([*LOADER_FRAMES, *above, *CALL, part, leaf], n, phase="data_wait") for part, n in parts.items()]
    base = loader_tables()
    others = [row for row in base.stacks.to_dicts() if row["phase"] != "data_wait"]
    forward = stack([f"train ({TRAIN}:82)"], sum(row["samples"] for row in others), phase="forward")
    steps, journal = base.steps.to_dicts(), base.journal.to_dicts()
    tables = make_tables(steps=steps, stacks=[*loading, forward], journal=journal, manifests=base.manifests)
    finding = only(tables, RULE)
    assert finding.title.endswith(title)
    assert values(finding)["loading time in Blur.forward (vision/blur.py)"] == pytest.approx(2 / 3, abs=1e-4)
    assert values(finding)["loading time in Crop.forward (vision/crop.py)"] == pytest.approx(1 / 3, abs=1e-4)


def test_workers_are_promised_what_real_cores_can_do() -> None:
    """60 of 100 ms loading, 40 computing on all threads: 16 logical cores are 8 at least, of two nothing is sure."""
    many, two = (only(loader_tables(affinity=cores), RULE).expected_gain for cores in (16, 2))
    assert some(many).low == pytest.approx(1 - ((40 * 16 + 60) / 8 + 6 + 1) / 100)
    assert two is None  # a gain from nothing on is no prediction; what is most stands in the ceiling


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("length", "steps"), [(1, 40), (625, 40), (625, 2)])
def test_an_iterator_for_each_batch_is_what_is_told(workers: int, length: int, steps: int) -> None:
    """But for epochs of a single batch, and runs of hardly a step."""
    tables = loader_tables(workers=workers, count=steps)
    made = tables.journal.with_columns(data=pl.col("data").str.replace("{", f'{{"length": {length}, ', literal=True))
    anew = replace(tables, steps=tables.steps.with_columns(first_batch=True), journal=made)
    finding = only(anew, RULE)
    assert ("next(batches)" in finding.fix) == (length > 1 and steps > 2)
    assert ("workers" in finding.title or bool(finding.try_)) == (length == 1 or steps == 2)


SMALL = {"tensors": 2, "bytes": 8448, "objects": 1}


def small_step(
    content: dict[str, int] | None, *, items: bool = False, framework: bool = False, **arguments: str
) -> Finding | None:
    """Of a step of 0.9 ms, a third of it for its batch, which library code makes, or with `items` the user's."""
    steps = step_rows(400, data_wait_ms=0.3, forward_ms=0.6, backward_ms=0, optimizer_ms=0, other_ms=0)
    via = {"via": "skorch/net.py"} if framework else {}
    journal: list[dict[str, Any]] = [
        {"kind": "site", "what": "DataLoader", "file": TRAIN, "line": 75, "id": 1, "dataset": 2, **via}
        | {"arguments": {"dataset": "TensorDataset", "batch_size": "32", **arguments}},
        {"kind": "loader", "id": 1, "dataset": 2, "num_workers": 0, "batch_size": 32, "time_ns": T0 - MS},
    ]
    for at in (1, 2, 3, 64) if content is not None else ():
        looked = {"kind": "batch", "id": 1, "time_ns": steps[at]["start_ns"], "duration_ns": 300_000}
        journal.append({**looked, **(content or {})})
    stacks = [
        stack([*LOADER_FRAMES, ITEM] if items else LOADER_FRAMES, 40, phase="data_wait"),
        stack([f"train ({TRAIN}:82)"], 80, phase="forward"),
    ]
    hardware = {"logical_cores": 64, "affinity": list(range(16))}
    return told(make_tables(steps=steps, stacks=stacks, journal=journal, manifests=[{"hardware": hardware}]), RULE)


@pytest.mark.parametrize(
    ("content", "how", "fix"),
    [
        (
            SMALL,
            {"shuffle": "True"},
            "BatchSampler(RandomSampler(data), 32, drop_last=False), batch_size=None) at train",
        ),
        (SMALL, {}, "SequentialSampler"),
        (None, {}, "num_workers="),  # without a look at its batches nothing is known against workers
        (SMALL, {"items": True}, "Shorten the work at train.py:30"),
        (SMALL, {"framework": True}, None),  # where nothing else can be said the rule is silent
        (SMALL, {"dataset": "Subset"}, None),
    ],
)
def test_small_batches_are_not_sent_through_workers(
    content: dict[str, int] | None, how: dict[str, Any], fix: str | None
) -> None:
    finding = small_step(content, **how)
    assert (finding is None) == (fix is None)
    if finding is not None and fix is not None:
        assert fix in finding.fix
        assert (content is None) == ("workers" in finding.fix) == bool(finding.try_)
    if finding is not None and content is not None:
        evidence = values(finding)
        assert (evidence["tensors of a batch"], evidence["bytes of a batch"]) == (2, 8448)


def big_step(content: dict[str, int] | None) -> Finding | None:
    """Of a step of 100 ms on a GPU that waits 60 ms for what library code makes."""
    journal = [{"kind": "loader", "id": 1, "num_workers": 0, "batch_size": 32, "time_ns": T0 - MS}]
    for at in (1, 2) if content is not None else ():
        journal.append({"kind": "batch", "id": 1, "time_ns": T0 + at * 100 * MS, "duration_ns": MS, **(content or {})})
    steps = step_rows(40, data_wait_ms=60, forward_ms=40, backward_ms=0, optimizer_ms=0, other_ms=0)
    stacks = [stack(LOADER_FRAMES, 60, phase="data_wait"), stack([f"train ({TRAIN}:82)"], 40, phase="forward")]
    rest = {"manifests": [{"hardware": {"logical_cores": 64, "affinity": list(range(64))}}]}
    return told(
        make_tables(steps=steps, stacks=stacks, journal=journal, ranks=[rank_info(device="cuda")], **rest), RULE
    )


def test_what_handing_over_takes_is_no_gain_of_workers() -> None:
    """60 of 100 ms loading: 40 tensors and 40 MB take 14.1 ms to hand over, ten times as many all of the gain."""
    content = {"tensors": 40, "bytes": 40_000_000, "objects": 1}
    heavy, without = (some(big_step(each)) for each in (content, None))
    most = [some(each.expected_gain).high for each in (without, heavy)]
    assert most[0] - most[1] == pytest.approx(0.141)
    assert without.gain_ceiling - heavy.gain_ceiling == pytest.approx(0.141)
    assert "num_workers" in heavy.fix
    assert big_step({name: 10 * count for name, count in content.items()}) is None


def test_a_loader_of_validation_is_none_that_training_waits_for() -> None:
    """Between two steps the recorder works: a fetch that begins with it ends in the step it is for."""
    steps = step_rows(80, data_wait_ms=60, forward_ms=30, backward_ms=0, optimizer_ms=0, other_ms=10)
    made = {"kind": "loader", "num_workers": 0, "batch_size": 32}
    journal: list[dict[str, Any]] = []
    for row in steps:
        validates = row["step"] % 2 == 1
        row["kind"] = "eval" if validates else "train"
        row["start_ns"], row["wall_ns"] = row["start_ns"] + MS, row["wall_ns"] - MS
        fetched = {"kind": "batch", "time_ns": row["start_ns"] - MS, "duration_ns": (1 + validates) * 30 * MS}
        journal.append({**fetched, **SMALL, "id": 1 + validates})
    for number in (1, 2):
        site = {"kind": "site", "what": "DataLoader", "file": TRAIN, "line": 70 + number, "id": number, "dataset": 5}
        journal += [site, {**made, "id": number, "dataset": 5, "time_ns": T0 + (number - 2) * 2 * MS}]
    finding = some(told(make_tables(steps=steps, journal=journal), RULE))
    assert (finding.where[0].line, values(finding)["tensors of a batch"]) == (71, 2)


def one_rank(**more: Any) -> Analysis:
    """Steps of 100 ms whose main thread has a core at any time, with more than it needs; `more` is of the pipeline."""
    analysis = analyze(make_tables(steps=step_rows(40, data_wait_ms=10, forward_ms=90, backward_ms=0)))
    quiet: dict[str, Any] = {"mean_ms": 100.0, "cores": 8.0, "contended_ms": 0.0}
    return replace(analysis, pipeline=replace(some(analysis.pipeline), **{**quiet, **more}))


def ranks(*phases: tuple[float, ...]) -> Analysis:
    rows = [row for rank, each in enumerate(phases) for row in rank_rows(rank, each)]
    return analyze(make_tables(steps=rows, journal=sites(len(phases))))


BUSY = {"workers": 2, "workers_ms": 160.0}  # 80 ms for a batch
COLD = PIPELINE.cold_tensors


@pytest.mark.parametrize(
    ("more", "loss_ms", "behind", "gain_ms"),
    [
        (BUSY, 10.0, 0.0, 10 + PIPELINE.cold_ms),
        (BUSY, 60.0, 0.0, 100 - PIPELINE.certain * 80),  # workers that need as long bound it
        # behind work on tensors a part of the shorter of both: a short call displaces little, a short rest loads little
        ({}, 60.0, COLD, 60 + COLD * 40),
        ({}, 10.0, COLD, 10 + COLD * 10),
        ({}, 0.1, COLD, 0.1 + PIPELINE.cold_ms),
        ({"contended_ms": 20.0}, 40.0, 0.0, 40 + 20 * 0.6),  # of waiting for a core the part outside may go with it
    ],
)
def test_a_step_without_a_loss_of_the_main_thread(
    more: dict[str, Any], loss_ms: float, behind: float, gain_ms: float
) -> None:
    assert gains.without_main(one_rank(**more), loss_ms, behind=behind) == pytest.approx(
        gain_ms, abs=0.5 if "contended_ms" in more else None
    )


def test_a_device_has_caches_of_its_own_and_works_off_what_it_was_given() -> None:
    assert gains.without_main(replace(one_rank(), devices=("cuda",)), 60.0, behind=COLD) == pytest.approx(60)
    losses = blank(DeviceLosses, has_steps=True, compute_ns_per_step=70e6)
    bounded = gains.without_main(replace(one_rank(), device_losses=(losses,)), 50.0)
    assert bounded == pytest.approx(100 - PIPELINE.certain * 70)
    # what launches the device's work takes it along
    assert gains.without_main(replace(one_rank(), device_losses=(losses,)), 50.0, launches=True) >= 50


@pytest.mark.parametrize("more", [{"cores": 2.0}, {"contended_ms": None}, {"contended_ms": 5.0}])
def test_no_bound_where_cores_may_be_short(more: dict[str, Any]) -> None:
    assert gains.without_main(one_rank(**BUSY, **more), 60.0) >= 60


def test_the_slowest_ranks_make_the_step() -> None:
    assert gains.without_wait(ranks((0, 20, 40, 0, 0), (30, 20, 10, 0, 0))) == pytest.approx(30, abs=0.5)
    four = ranks((0, 10, 40, 0, 0), (0, 30, 20, 0, 0), (0, 33, 17, 0, 0), (0, 12, 38, 0, 0))
    assert some(four.ranks).slow == (1, 2)
    assert gains.without_lead(four, some(four.ranks)) == pytest.approx(33 - 12)


def test_without_training_steps_there_is_no_pipeline() -> None:
    analysis = analyze(make_tables())
    assert analysis.pipeline is None
    assert gains.without_main(analysis, 5.0) == 5.0
    assert gains.without_wait(analysis) is None
