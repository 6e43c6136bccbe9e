"""Notebooks: the magic records a cell as it is and shows the findings inline; `display` shows those of any run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope.dashboard import single
from stepscope.model import Diagnosis
from stepscope.report.document import build
from tests.dashboard.plain_pages import Page
from tests.report.fabricate import analysis, diagnosis, write_script

SOURCE = Path(stepscope.__file__).resolve().parents[1]

DEFINITIONS = """import time
import torch
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    def __len__(self):
        return 320
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.ones(8), torch.ones(1)

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
SLOW_LINE = DEFINITIONS.split("\n").index("        time.sleep(0.004)") + 1
TRAINING = """%%stepscope --name slow

for inputs, targets in DataLoader(Pictures(), batch_size=4):
    loss = (model(inputs) - targets).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"the last expression"
"""
FAILING = """%%stepscope --out failed --no-report --no-source
ending = time.monotonic() + 2  # long enough for samples on a busy machine
for step in range(10**6):
    if step >= 29 and time.monotonic() > ending:
        break
    optimizer.zero_grad(); model(torch.ones(4, 8)).sum().backward(); optimizer.step()
    kept = step
raise RuntimeError("as without the magic")
"""
AFTERWARDS = """import multiprocessing, threading
fork = multiprocessing.get_context("fork")
names = fork.SimpleQueue()
child = fork.Process(target=lambda: names.put([thread.name for thread in threading.enumerate()]))
child.start()
found = names.get()
child.join()
"stepscope-sampler" in [*found, *(thread.name for thread in threading.enumerate())]
"""
CELLS = (
    "%load_ext stepscope",
    DEFINITIONS,
    TRAINING,
    FAILING,
    "kept",
    "%%stepscope --nonsense\npass",
    AFTERWARDS,
    "import glob, stepscope\nstepscope.display(glob.glob('stepscope-runs/*-notebook')[0])",
)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """Folder and outputs, cell by cell, of the notebook above, run by a real kernel."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    folder = tmp_path_factory.mktemp("notebook")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SOURCE))
        patch.setenv("IPYTHONDIR", str(folder / ".ipython"))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        client = nbclient.NotebookClient(
            book, timeout=150, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
        )
        client.execute()
    return folder, [list(cell.get("outputs", ())) for cell in book.cells]


def html_of(outputs: list[dict[str, Any]]) -> str:
    found = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert len(found) == 1, outputs
    return str(found[0])


def words_of(fragment: str) -> str:
    return " ".join(Page(fragment).text.split())


@pytest.mark.torch
@pytest.mark.process
def test_the_findings_stand_below_the_cell(executed: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    folder, outputs = executed
    assert outputs[0] == outputs[1] == []
    text = words_of(html_of(outputs[2]))
    assert "slow:" in text
    assert "a step" in text
    assert "Fix:" in text
    # the line of another cell that the time is lost on, as the notebook counts it
    assert f"cell [2], line {SLOW_LINE}" in text
    assert "time.sleep(0.004)" in text
    (run,) = (folder / "stepscope-runs").iterdir()
    assert str(run.relative_to(folder) / "report.html") in text
    assert (run / "report.html").stat().st_size > 1000
    assert (run / "report.json").exists()


@pytest.mark.torch
@pytest.mark.process
def test_the_cell_runs_as_it_would_without(executed: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    folder, outputs = executed
    assert "'the last expression'" in [output.get("data", {}).get("text/plain") for output in outputs[2]]
    assert [output["ename"] for output in outputs[3] if output["output_type"] == "error"] == ["RuntimeError"]
    assert int(outputs[4][0]["data"]["text/plain"]) >= 29
    # the second recording of one kernel is one of its own, with its findings above the error
    assert "notebook, cell 4" in words_of(html_of(outputs[3]))
    assert (folder / "failed").is_dir()
    assert not (folder / "failed" / "report.html").exists()
    assert list((folder / "failed").glob("host-*/stacks-*.raw"))
    assert "model(torch.ones" not in html_of(outputs[3])
    # when the cell has ended nothing is sampled
    assert [output["data"]["text/plain"] for output in outputs[6] if "data" in output] == ["False"]
    # a wrong option is one line
    said = " ".join(str(output.get("text", output.get("evalue", ""))) for output in outputs[5])
    assert "--nonsense" in said
    assert "Traceback" not in said


@pytest.mark.torch
@pytest.mark.process
def test_a_recorded_run_is_displayed_again_with_its_lines(executed: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    _, outputs = executed
    text = words_of(html_of(outputs[7]))
    assert f"cell [2], line {SLOW_LINE}" in text
    assert "slow:" in text
    plain = next(output["data"]["text/plain"] for output in outputs[7] if "text/html" in output.get("data", {}))
    assert plain.startswith("slow: ")
    assert "\x1b" not in plain


def test_outside_of_a_notebook_the_terminal_report_is_printed(
    small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stepscope.display(small_run)
    shown = capsys.readouterr()
    assert "a step" in shown.out
    assert shown.err == ""


def test_a_fragment_is_one_element_without_scripts(tmp_path: Path) -> None:
    write_script(tmp_path)
    made = single.fragment(build(analysis(tmp_path), diagnosis(tmp_path)), page="runs/one/report.html")
    page = Page(made)
    assert page.open == []
    assert page.top == 1
    assert not {"script", "link", "img", "iframe", "svg", "html", "body"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "style")]
    text = " ".join(page.text.split())
    for part in ("61.3 ms a step", "Waiting for the loader", "41.2 ms a step, 67 %", "Load in 4 worker", "train.py:7"):
        assert part in text
    assert "Image.open" in text
    assert "loader.workers=4" in text
    assert "runs/one/report.html" in text
    # every rule of its style sheet is bound to it
    rules = made[made.index("<style>") + len("<style>") : made.index("</style>")].split("{")[:-1]
    assert all(".stepscope-findings" in rule.rpartition("}")[2] for rule in rules)


def test_a_healthy_run_and_one_without_steps(tmp_path: Path) -> None:
    write_script(tmp_path)
    assert "Nothing worth fixing" in single.fragment(build(analysis(tmp_path), Diagnosis((), ())))
    silent = single.fragment(build(analysis(tmp_path, steps=(), stacks=None), Diagnosis((), ())))
    assert "no step was seen" in silent
