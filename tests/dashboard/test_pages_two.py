"""The pages on work as documents: what all of them have in common, operators, kernels and modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from stepscope import api
from stepscope.errors import UsageError
from stepscope.report.escape import plain as plain_text
from tests.dashboard import served_runs
from tests.dashboard.page_shapes import is_empty, page, part, parts
from tests.dashboard.worker_traces import two_workers
from tests.run_folders import make_run_folder

KEYS = ("operators", "kernels", "modules", "memory", "compiles", "gpu", "flame")


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    return two_workers(tmp_path_factory.mktemp("gpus"))


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    path = served_runs.cpu_trace(tmp_path_factory.mktemp("cpu") / "cpu.pt.trace.json")
    return api.open_run(path, options=api.ReadOptions(cache=False))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A recorded run without windows, stacks or compilers."""
    manifest = {"command": ["python", "my train.py"]}
    return api.open_run(make_run_folder(tmp_path_factory.mktemp("plain"), manifest=manifest))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A recording in which everything that has a name has a hostile one."""
    return api.open_run(served_runs.fuzzed(tmp_path_factory.mktemp("fuzzed") / "runs"))


# ------------------------------------------------------------------------------------------------------- every page


@pytest.mark.parametrize("key", KEYS)
def test_every_page_says_why_it_is_empty_and_what_to_record(plain: api.Run, key: str):
    assert is_empty(plain, key)
    document = page(plain, key)
    (said,) = parts(document, "empty")
    assert said["why"].endswith(".")
    assert said["record"]
    assert said["command"].startswith("stepscope run ")
    assert said["command"].endswith("-- python 'my train.py'")


@pytest.mark.parametrize("key", ["operators", "kernels", "modules", "memory", "gpu"])
def test_a_trace_fills_the_pages_on_it(gpus: api.Run, key: str):
    assert not is_empty(gpus, key)
    document = page(gpus, key)
    assert not parts(document, "empty")
    assert parts(document, "table")
    assert parts(document, "chart")


@pytest.mark.parametrize("key", ["operators", "kernels", "modules", "memory", "gpu"])
def test_a_worker_without_a_trace_is_said(gpus: api.Run, key: str):
    (said,) = parts(page(gpus, key, worker="rank-7"), "empty")
    assert "all" in said["why"]


@pytest.mark.parametrize("key", ["kernels", "gpu"])
def test_a_trace_of_the_host_has_no_device(cpu: api.Run, key: str):
    assert is_empty(cpu, key)
    document = page(cpu, key)
    (said,) = parts(document, "empty")
    assert "device" in said["why"] or "GPU" in said["why"]


@pytest.mark.parametrize("key", KEYS)
def test_the_single_file_asks_nothing_that_nobody_answers(gpus: api.Run, key: str):
    document = page(gpus, key, embedded=True, limit=100)
    assert not parts(document, "choice")
    columns = [column for table in parts(document, "table") for column in table["columns"]]
    assert all(column["link"] is None for column in columns)


@pytest.mark.parametrize("key", KEYS)
def test_hostile_names_are_harmless_text(fuzzed: api.Run, key: str):
    document = page(fuzzed, key)
    assert all(plain_text(text, len(text) + 1) == text for text in texts(document))


def texts(value: Any) -> Iterator[str]:
    """Every text in a document, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts(item)


def test_steps_without_a_trace_name_those_that_have_one(gpus: api.Run):
    few = api.open_run(gpus.folder, options=api.ReadOptions(cache=False, steps=(50, 60)))
    for key in ("operators", "kernels", "modules", "memory", "gpu"):
        (said,) = parts(page(few, key, base=gpus, steps=(50, 60)), "empty")
        assert "steps 50 to 60" in said["why"]
        assert "between 1 and 2" in said["why"]


def test_one_step_of_two(gpus: api.Run):
    one = api.open_run(gpus.folder, options=api.ReadOptions(cache=False, steps=(2, 2)))
    rows = part(page(one, "operators", base=gpus, steps=(2, 2)), "operators")["rows"]
    assert [row["calls"] for row in rows if row["name"] == "aten::mm"] == [2]


def test_a_span_that_is_none_is_refused(gpus: api.Run):
    with pytest.raises(UsageError, match="not a span"):
        page(gpus, "operators", span="../../etc")


# ------------------------------------------------------------------------------------------------------- operators


def test_operators_are_those_of_the_command_line(gpus: api.Run):
    table = part(page(gpus, "operators"), "operators")
    want = {row.name: (row.calls, row.device_self_ns, row.host_self_ns) for row in gpus.table("operators").rows}
    found = {row["name"]: (row["calls"], row["device_self_ns"], row["host_self_ns"]) for row in table["rows"]}
    assert found["aten::mm"] == want["aten::mm"] == (4, 900_000, want["aten::mm"][2])
    assert table["total"] == len(want)
    assert table["sorted_by"] == "device_self_ns"
    helps = {column["key"]: column["help"] for column in table["columns"]}
    assert "union" in helps["device_self_ns"]["text"]


def test_operators_of_one_worker(gpus: api.Run):
    for worker, ns in (("worker0", 600_000), ("worker1", 300_000)):
        table = part(page(gpus, "operators", worker=worker), "operators")
        (row,) = [row for row in table["rows"] if row["name"] == "aten::mm"]
        assert (row["calls"], row["device_self_ns"]) == (2, ns)


def test_operators_by_shapes_of_one_worker(gpus: api.Run):
    document = page(gpus, "operators", worker="worker1", group="shapes")
    table = part(document, "operators")
    assert {row["shapes"] for row in table["rows"] if row["name"] == "aten::mm"} == {"[[64,32],[32,8]]"}
    (choice,) = parts(document, "choice")
    assert choice["value"] == "shapes"
    link = next(column["link"] for column in table["columns"] if column["key"] == "name")
    assert (link["page"], link["param"], link["params"]) == ("operators", "operator", {"group": "shapes"})


def test_a_group_that_is_none_is_the_first(gpus: api.Run):
    document = page(gpus, "operators", group="'; drop table")
    assert parts(document, "choice")[0]["value"] == "name"


def test_one_operator_shows_what_lies_behind_it(gpus: api.Run):
    document = page(gpus, "operators", operator="aten::mm")
    (stack,) = part(document, "stacks")["rows"]
    assert "train.py:7" in stack["stack"]
    (launched,) = part(document, "launched")["rows"]
    assert (launched["calls"], launched["total_ns"]) == (4, 900_000)


def test_the_operator_that_a_click_names_is_found_though_its_name_was_made_harmless(gpus: api.Run):
    rows = part(page(gpus, "operators"), "operators")["rows"]
    (shown,) = [row["name"] for row in rows if row["name"].startswith("aten::\\x1b")]
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    document = page(gpus, "operators", operator=shown)
    assert part(document, "stacks")["rows"]


def test_an_operator_of_another_trace_is_no_error(gpus: api.Run):
    document = page(gpus, "operators", operator="aten::nothing")
    assert any("aten::nothing" in block["text"] for block in parts(document, "text"))


def test_operators_without_a_device_are_ordered_by_the_host(cpu: api.Run):
    document = page(cpu, "operators")
    table = part(document, "operators")
    assert table["sorted_by"] == "host_self_ns"
    assert "device_self_ns" not in [column["key"] for column in table["columns"]]
    assert [series["name"] for series in part(document, "operators-top")["series"]] == ["host self time"]
    assert is_empty(cpu, "operators") is False


def test_rows_are_cut_and_counted(gpus: api.Run):
    table = part(page(gpus, "operators", limit=2), "operators")
    assert len(table["rows"]) == 2
    assert table["total"] > 2


# ------------------------------------------------------------------------------------------------------- kernels


def test_kernels_and_their_tensor_cores(gpus: api.Run):
    document = page(gpus, "kernels")
    table = part(document, "kernels")
    assert sum(row["total_ns"] for row in table["rows"]) == sum(row.total_ns for row in gpus.table("kernels").rows)
    chart = part(document, "kernels-top")
    cores, others = chart["series"]
    assert cores["values"] == [900_000, None]
    assert others["values"] == [None, 400_000]


def test_kernels_of_one_operator(gpus: api.Run):
    rows = part(page(gpus, "kernels", operator="aten::sum"), "kernels")["rows"]
    assert [row["total_ns"] for row in rows] == [400_000]
    document = page(gpus, "kernels", operator="aten::none")
    assert not [block for block in document["blocks"] if block.get("id") == "kernels"]


def test_kernels_by_launch(gpus: api.Run):
    rows = part(page(gpus, "kernels", group="launch", worker="worker0"), "kernels")["rows"]
    assert {(row["operator"], row["grid"], row["block"], row["registers"]) for row in rows} == {
        ("aten::mm", 50, 256, 32),
        ("aten::sum", 50, 256, 32),
    }


def test_lines_by_the_time_of_operators_where_there_is_no_device(cpu: api.Run):
    table = part(page(cpu, "operators"), "device-lines")
    assert table["rows"][0]["place"]["shown"].endswith("train.py:7")


def test_lines_by_the_device_time_they_cause(gpus: api.Run):
    table = part(page(gpus, "kernels"), "device-lines")
    assert sum(row["share"] for row in table["rows"]) <= 1.001
    assert table["rows"][0]["place"]["shown"].endswith("train.py:7")


# ------------------------------------------------------------------------------------------------------- modules


def test_modules_are_a_tree(gpus: api.Run):
    table = part(page(gpus, "modules"), "modules")
    assert [(row["name"], row["depth"]) for row in table["rows"]] == [("Net_0", 0), ("Linear_0", 1)]
    assert table["tree"] is True
    net, linear = table["rows"]
    assert (net["calls"], linear["device_total_ns"]) == (4, 900_000)
    assert net["device_total_ns"] >= linear["device_total_ns"]


def test_modules_of_one_worker(gpus: api.Run):
    rows = part(page(gpus, "modules", worker="worker0"), "modules")["rows"]
    assert [row["calls"] for row in rows] == [2, 2]


def test_a_tree_is_cut_by_whole_levels(gpus: api.Run):
    table = part(page(gpus, "modules", limit=1), "modules")
    assert [row["name"] for row in table["rows"]] == ["Net_0"]
    assert table["total"] == 2
    assert "level" in table["notes"][-1]
