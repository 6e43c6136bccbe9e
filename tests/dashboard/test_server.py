"""What `stepscope view` answers: the list of runs, heads, pages, timeline, cut traces, errors; and the command."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.dashboard.pages import PAGES
from stepscope.dashboard.server.catalog import Places
from stepscope.dashboard.server.entries import Catalog
from stepscope.errors import EnvironmentRefusal, UnreadableInputError
from tests import gpu_traces
from tests.builders import MS, T0, step_rows
from tests.dashboard.client import Dashboard
from tests.run_folders import make_run_folder

BLOCKS = {"text", "empty", "figures", "facts", "table", "chart", "findings", "timeline", "flame", "choice"}
Served = Callable[[str], str]
QUICK = ("small", "fuzzed", "growing", "cpu", "gpu")


def names(shown: Dashboard, query: str = "") -> list[str]:
    return [entry["name"] for entry in shown.json(f"api/runs{query}")["runs"]]


def problems(document: Any, where: str = "") -> list[str]:
    """What no document may hold: characters that a screen obeys, numbers that JSON has not."""
    if isinstance(document, dict):
        return [found for key, value in document.items() for found in problems(value, f"{where}.{key}")]
    if isinstance(document, list):
        return [found for place, value in enumerate(document) for found in problems(value, f"{where}[{place}]")]
    if isinstance(document, str) and re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029]", document):
        return [f"{where}: {document[:80]!r}"]
    return []


# ---------------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("name", QUICK)
def test_every_page_of_every_kind_of_run_is_a_document(dashboard: Dashboard, served: Served, name: str) -> None:
    run = served(name)
    for page in PAGES:
        document = dashboard.json(f"api/runs/{run}/pages/{page}")
        assert (document["schema"], document["page"]) == ("stepscope.page/1", page)
        assert document["blocks"], page
        assert {block["kind"] for block in document["blocks"]} <= BLOCKS
        assert document["revision"] >= 1
        assert problems(document) == []


def test_a_head_lists_what_can_be_chosen(dashboard: Dashboard, served: Served) -> None:
    run = served("small")
    dashboard.json(f"api/runs/{run}/pages/findings")
    head = dashboard.json(f"api/runs/{run}")
    assert (head["state"], head["kind"], head["preparing"], head["error"]) == ("finished", "run", None, None)
    assert [page["key"] for page in head["pages"]] == list(PAGES)
    empty = {page["key"] for page in head["pages"] if page["empty"]}
    assert not empty & {"findings", "steps", "timeline", "operators", "kernels"}
    assert "compiles" in empty
    assert head["steps"] == {"first": 0, "last": 119}
    assert "rank-0" in {worker["key"] for worker in head["workers"]}
    assert {span["worker"] for span in head["spans"]} == {"rank-0"}


def test_a_run_without_a_step_says_why_there_is_nothing(dashboard: Dashboard, served: Served) -> None:
    run = served("empty")
    answer = dashboard.ask(f"api/runs/{run}/pages/findings")
    while answer.status == 202:
        answer = dashboard.ask(f"api/runs/{run}/pages/findings")
    head = dashboard.json(f"api/runs/{run}")
    if answer.status == 200:
        assert [page["key"] for page in head["pages"] if page["empty"]]
    else:
        assert answer.status == 422
        assert answer.json["error"] == head["error"]
        assert head["state"] == "unreadable"


def test_a_range_of_steps_reads_these_alone(dashboard: Dashboard, served: Served) -> None:
    run = served("small")
    whole = dashboard.json(f"api/runs/{run}/pages/steps")
    part = dashboard.json(f"api/runs/{run}/pages/steps?steps=50:69")
    assert part["scope"]["steps"] == [50, 69]
    assert part["scope"]["note"] is None
    assert json.dumps(part["blocks"]) != json.dumps(whole["blocks"])
    everything = dashboard.json(f"api/runs/{run}/pages/steps?steps=0:119")
    assert everything["blocks"] == whole["blocks"]
    other = dashboard.json(f"api/runs/{run}/pages/environment?steps=50:69")
    assert "range of steps" in other["scope"]["note"]


@pytest.mark.parametrize(
    ("query", "word"),
    [("steps=9:3", "range"), ("steps=x", "range"), ("steps=900:901", "0 to 119"), ("worker=" + "x" * 400, "longer")],
)
def test_a_selection_that_makes_no_sense_is_an_error_in_a_line(
    dashboard: Dashboard, served: Served, query: str, word: str
) -> None:
    run = served("small")
    dashboard.json(f"api/runs/{run}/pages/steps")
    answer = dashboard.ask(f"api/runs/{run}/pages/steps?{query}")
    assert answer.status == 400
    assert answer.json["schema"] == "stepscope.error/1"
    assert word in answer.json["error"]
    assert "Traceback" not in answer.json["error"]


@pytest.mark.parametrize(
    "target",
    ["api/runs/no-such-run", "api/runs/no-such-run/live", "api/runs/no-such-run/pages/findings", "api", "x.js"],
)
def test_what_there_is_not_is_not_found(dashboard: Dashboard, target: str) -> None:
    answer = dashboard.ask(target)
    assert answer.status == 404
    assert answer.json["schema"] == "stepscope.error/1"


def test_what_is_asked_before_the_run_was_read(tmp_path: Path, dashboard_of: Callable[..., Dashboard]) -> None:
    shown = dashboard_of(gpu_traces.write(tmp_path / "a.pt.trace.json"))
    run = shown.json("api/runs")["runs"][0]["id"]
    cut = shown.ask(f"api/runs/{run}/slice?steps=1:1")
    assert (cut.status, cut.json["schema"]) == (409, "stepscope.error/1")
    page = shown.ask(f"api/runs/{run}/pages/findings")
    if page.status != 200:  # it may have been quick
        assert (page.status, page.json["schema"]) == (202, "stepscope.preparing/1")
        assert page.json["text"]
    assert shown.json(f"api/runs/{run}/pages/findings")["schema"] == "stepscope.page/1"


def test_a_mistake_of_ours_is_a_line(
    dashboard: Dashboard, served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = served("small")
    dashboard.json(f"api/runs/{run}/pages/findings")

    def broken(*_: object) -> None:
        raise KeyError("oh\n\x1b[31m")

    monkeypatch.setattr("stepscope.dashboard.pages.page", broken)
    answer = dashboard.ask(f"api/runs/{run}/pages/findings?x=1")
    assert answer.status == 500
    assert "KeyError" in answer.json["error"]
    assert problems(answer.json) == []
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "pages/findings" in said


def test_a_page_there_is_not(dashboard: Dashboard, served: Served) -> None:
    answer = dashboard.ask(f"api/runs/{served('small')}/pages/nothing")
    assert answer.status == 404
    assert "findings" in answer.json["error"]


def test_head_has_the_headers_of_get_and_no_body(dashboard: Dashboard) -> None:
    answer = dashboard.ask("api/runs", method="HEAD")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"] == "application/json"


# ------------------------------------------------------------------------------------------------------- timeline


def test_windows_slices_and_searches(dashboard: Dashboard, served: Served) -> None:
    run = served("gpu")
    block = next(b for b in dashboard.json(f"api/runs/{run}/pages/timeline")["blocks"] if b["kind"] == "timeline")
    end = block["to_ns"]
    window = dashboard.json(f"api/runs/{run}/timeline?from=0&to={end}&width=800")
    assert (window["schema"], window["from_ns"], window["to_ns"]) == ("stepscope.timeline/1", 0, end)
    found = dashboard.json(f"api/runs/{run}/timeline/search?text=sgemm&limit=2")
    assert found["total"] == 6
    assert len(found["hits"]) == 2
    detail = dashboard.json(f"api/runs/{run}/slices/{found['hits'][0]['id']}")
    assert "sgemm" in detail["name"]
    assert detail["operator"]["name"] == "aten::mm"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("timeline?from=x&to=5", 400),
        ("timeline?from=5&to=5", 400),
        ("timeline?width=-1", 400),
        ("timeline/search?text=", 400),
        ("slices/999999999", 404),
        ("slices/x", 404),
        ("slice?steps=4:2", 400),
        ("slice?steps=900:901", 400),
    ],
)
def test_questions_about_the_timeline_that_make_no_sense(
    dashboard: Dashboard, served: Served, target: str, status: int
) -> None:
    run = served("gpu")
    dashboard.json(f"api/runs/{run}/pages/timeline")
    answer = dashboard.ask(f"api/runs/{run}/{target}")
    assert (answer.status, answer.json["schema"]) == (status, "stepscope.error/1")


def test_a_cut_trace_is_a_file_for_perfetto(dashboard: Dashboard, served: Served) -> None:
    run = served("gpu")
    dashboard.json(f"api/runs/{run}/pages/timeline")
    answer = dashboard.ask(f"api/runs/{run}/slice?steps=2:3")
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/gzip"
    assert re.fullmatch(r'attachment; filename="[\w.-]+\.json\.gz"', answer.headers["content-disposition"])
    found = {event.get("name") for event in json.loads(gzip.decompress(answer.body))["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= found
    assert not {"ProfilerStep#1", "ProfilerStep#4"} & found


# ----------------------------------------------------------------------------------------------------------- list


def test_a_folder_of_runs_is_a_list_newest_first(tmp_path: Path, dashboard_of: Callable[..., Dashboard]) -> None:
    for number in (2, 1, 3):
        manifest = {
            "started_ns": T0 + number * MS,
            "command": ["python", f"train_{number}.py"],
            "tags": [f"tag{number}"],
        }
        make_run_folder(tmp_path, name=f"run-{number}", manifest=manifest)
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / ".hidden").mkdir()
    gpu_traces.write(tmp_path / "logs" / "worker0.1.pt.trace.json")
    shown = dashboard_of(tmp_path)
    assert names(shown)[1:] == ["run-3", "run-2", "run-1"]
    assert names(shown)[0] == "logs"
    assert names(shown, "?q=train_2.py") == ["run-2"]
    assert names(shown, "?q=TAG3+run") == ["run-3"]
    assert names(shown, "?q=nothing") == []
    entry = shown.json("api/runs?q=run-1")["runs"][0]
    assert (entry["kind"], entry["state"], entry["command"]) == ("run", "finished", "python train_1.py")
    assert entry["note"] == "demo tag1"


def test_an_entry_shows_what_a_report_says(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path, name="a")
    report = {"steps": {"count": 90, "mean_ms": 12.5, "excluded": {"warm-up": 10}, "other": [1]}, "findings": []}
    report["findings"] = [{"title": "The loader is late", "where": []}, {"title": "second"}]
    (run / "report.json").write_text(json.dumps(report))
    catalog = Catalog(Places([tmp_path]), lambda _: pytest.fail("not to be read"))
    entry = catalog.runs()[0]
    assert (entry["steps"], entry["mean_ms"], entry["first_finding"]) == (100, 12.5, "The loader is late")
    (run / "report.json").write_text("{ broken")
    entry = catalog.runs()[0]
    assert (entry["steps"], entry["mean_ms"], entry["first_finding"]) == (None, None, None)


def test_runs_that_appear_and_go_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr("stepscope.dashboard.server.catalog.AGAIN_S", 0.0)
    places = Places([tmp_path])
    assert places.all() == []
    run = make_run_folder(tmp_path, name="a")
    assert [place.name for place in places.all()] == ["a"]
    key = places.all()[0].key
    shutil.rmtree(run)
    assert places.all() == []
    assert places.get(key).name == "a"


def test_many_runs_are_listed_and_counted(tmp_path: Path) -> None:
    one = make_run_folder(tmp_path, name="run-0000", steps=[])
    manifest = (one / "host-a" / "manifest.json").read_bytes()
    for number in range(1, 1200):
        folder = tmp_path / f"run-{number:04d}"
        (folder / "host-a").mkdir(parents=True)
        (folder / "host-a" / "manifest.json").write_bytes(manifest)
    document = Catalog(Places([tmp_path]), lambda _: pytest.fail("not to be read")).document()
    assert document["total"] == 1200
    assert 100 <= len(document["runs"]) < 1200
    assert len({entry["id"] for entry in document["runs"]}) == len(document["runs"])


def test_an_experiment_is_listed_with_its_runs(tmp_path: Path) -> None:
    experiment = tmp_path / "tries"
    make_run_folder(experiment / "runs", name="002-workers-2")
    make_run_folder(experiment / "runs", name="001-pilot")
    (experiment / "experiment.json").write_text(json.dumps({"finished": True}))
    places = Places([tmp_path])
    found = {place.name: place for place in places.all()}
    assert set(found) == {"tries", "tries/001-pilot", "tries/002-workers-2"}
    assert found["tries"].kind == "experiment"
    assert found["tries"].folder == experiment / "runs" / "001-pilot"
    catalog = Catalog(places, lambda _: pytest.fail("not to be read"))
    assert catalog.experiment(found["tries"].key) == experiment
    assert catalog.experiment(found["tries/001-pilot"].key) is None


def test_traces_side_by_side_and_folders_of_ranks_are_one_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        gpu_traces.write(tmp_path / "ranks" / f"rank{rank}" / "a.pt.trace.json")
        gpu_traces.write(tmp_path / "logs" / f"worker{rank}.1.pt.trace.json")
        gpu_traces.write(tmp_path / "two" / f"with_{rank}_x" / "worker0.1.pt.trace.json")
    assert [place.name for place in Places([tmp_path / "ranks"]).all()] == ["ranks"]
    assert [place.name for place in Places([tmp_path / "logs"]).all()] == ["logs"]
    assert [place.name for place in Places([tmp_path / "two"]).all()] == ["with_0_x", "with_1_x"]


def test_a_path_that_is_not_there_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="no such file or folder"):
        Places([tmp_path / "nothing"])


def test_what_cannot_be_read_is_said_on_its_pages(tmp_path: Path, dashboard_of: Callable[..., Dashboard]) -> None:
    (tmp_path / "x.json").write_text("no trace")
    shown = dashboard_of(tmp_path / "x.json")
    run = shown.json("api/runs")["runs"][0]["id"]
    while (answer := shown.ask(f"api/runs/{run}/pages/findings")).status == 202:
        pass
    assert answer.status == 422
    head = shown.json(f"api/runs/{run}")
    assert head["state"] == "unreadable"
    assert head["error"] == answer.json["error"]


def test_an_empty_folder_is_an_empty_list(tmp_path: Path, dashboard_of: Callable[..., Dashboard]) -> None:
    shown = dashboard_of(tmp_path)
    assert shown.json("api/runs") == {"schema": "stepscope.runs/1", "runs": [], "total": 0}


def test_nothing_is_written_beside_a_run(tmp_path: Path, dashboard_of: Callable[..., Dashboard]) -> None:
    run = make_run_folder(tmp_path, steps=step_rows(30))
    before = sorted(str(path) for path in run.rglob("*"))
    shown = dashboard_of(run)
    shown.json(f"api/runs/{shown.id('run')}/pages/findings")
    shown.json(f"api/runs/{shown.id('run')}/pages/steps?steps=5:20")
    assert sorted(str(path) for path in run.rglob("*")) == before


def test_more_runs_than_are_kept_can_be_looked_at(tmp_path: Path, dashboard_of: Callable[..., Dashboard]) -> None:
    for number in range(4):
        make_run_folder(tmp_path, name=f"r{number}", steps=step_rows(10 + number))
    shown = dashboard_of(tmp_path)
    for number in (0, 1, 2, 3, 0):
        run = shown.id(f"r{number}")
        shown.json(f"api/runs/{run}/pages/environment")
        assert shown.json(f"api/runs/{run}")["steps"]["last"] == 9 + number


# ---------------------------------------------------------------------------------------------------- front end


def test_files_of_the_front_end_are_sent_and_no_others(
    tmp_path: Path, small_run: Path, dashboard_of: Callable[..., Dashboard]
) -> None:
    files = tmp_path / "static"
    (files / "assets").mkdir(parents=True)
    (files / "index.html").write_text("<!doctype html><title>x</title>")
    (files / "assets" / "index-abc.js").write_text("1")
    (tmp_path / "secret.txt").write_text("secret")
    shown = dashboard_of(small_run, files=files)
    index = shown.ask("/")
    assert (index.status, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
    script = shown.ask("assets/index-abc.js")
    assert (script.body, script.headers["content-type"]) == (b"1", "text/javascript; charset=utf-8")
    assert script.headers["cache-control"] == "no-cache"
    for path in ("assets/other.js", "secret.txt", "assets/", "assets"):
        assert shown.ask(path).status == 404
    assert shown.ask("/", token=False).status == 403


def test_without_a_front_end_the_documents_are_there(small_run: Path, dashboard_of: Callable[..., Dashboard]) -> None:
    shown = dashboard_of(small_run, files=None)
    answer = shown.ask("/")
    assert answer.status == 500
    assert "no dashboard" in answer.json["error"]
    assert shown.ask("api/runs").status == 200


# ------------------------------------------------------------------------------------------------------- command


def view(*arguments: str, **more: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SSH_", "SLURM_"))}
    kept |= {"BROWSER": "false", **more}
    line = [sys.executable, "-m", "stepscope", "view", *arguments]
    return subprocess.Popen(line, env=kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def front_end() -> None:
    from stepscope.dashboard import bundle

    if bundle.folder() is None:
        pytest.skip("needs the built front end (npm run build in web/)")


@pytest.mark.usefixtures("front_end")
def test_the_command_prints_one_address_and_ends_with_ctrl_c(small_run: Path) -> None:
    remote = {"SSH_CONNECTION": "a 1 b 2", "COLUMNS": "40"}
    with view(str(small_run), "--no-browser", "--port", "0", **remote) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline()
            match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{20,})\n", address)
            assert match is not None, address
            forwarding = process.stdout.readline()
            assert forwarding.startswith(f"ssh -N -L {match[1]}:127.0.0.1:{match[1]} ")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert process.stderr is not None
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_a_taken_port_is_refused_in_a_line(small_run: Path, dashboard: Dashboard) -> None:
    from stepscope.dashboard.server.start import Running, Settings

    with pytest.raises(EnvironmentRefusal, match=f"port {dashboard.running.port} .* is taken; .*--port"):
        Running(Settings(paths=(small_run,), port=dashboard.running.port))


def test_forwarding_goes_through_the_login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.cli.view import forwarding

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_SUBMIT_HOST", "login1")
    assert re.fullmatch(r"ssh -N -L 6107:127.0.0.1:6107 -J login1 \S+@\S+", forwarding(6107))
    monkeypatch.delenv("SLURM_JOB_ID")
    assert "-J" not in forwarding(6107)


def test_a_browser_is_given_a_file_that_only_its_user_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import webbrowser

    from stepscope.dashboard.server.browser import Opener

    opened: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    opener = Opener()
    assert opener.open("http://127.0.0.1:1/?token=secret&x=1")
    assert "secret" not in opened[0]
    path = Path(opened[0].removeprefix("file://"))
    assert path.stat().st_mode & 0o077 == 0
    assert "token=secret&amp;x=1" in path.read_text()
    opener.close()
    assert not path.exists()


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, stepscope.cli as c; c.load('view', c.COMMANDS['view']); "
    code += "print([m for m in ('polars', 'numpy', 'starlette', 'uvicorn', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
