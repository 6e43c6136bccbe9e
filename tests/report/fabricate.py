"""Made-up facts and findings, so that the report is tested apart from what measures them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stepscope.model import (
    Abstention,
    Analysis,
    Diagnosis,
    Finding,
    FixedCosts,
    Ignored,
    IoFacts,
    LoaderFacts,
    LoopFacts,
    ProcessFacts,
    Quality,
    RunFacts,
    Site,
    SourceFiles,
    StackFacts,
    StepFacts,
    WindowFacts,
)
from stepscope.model.machine import MachineFacts
from stepscope.model.views import OperatorRow, Views
from tests.records import replace

SCRIPT = """\
import torch
from PIL import Image


class Pictures(torch.utils.data.Dataset):
    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB")
        return self.transform(image), self.labels[index]


def loss_of(logits, tokens):
    total = 0
    for position in range(tokens.shape[1]):
        total = total + cross_entropy(logits[:, position], tokens[:, position])
    return total
"""
T = TypeVar("T")
FACTS = msgspec.json.decode(Path(__file__).with_name("facts.json").read_bytes())
ITEM_LINE, LOOP_LINE = 7, 14


def write_script(folder: Path) -> str:
    """Write the script that the fabricated findings point into; returns its path."""
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def kept(name: str, kind: type[T], file: str = "") -> T:
    """Facts of `facts.json`, with `file` as the script that they name."""
    text = msgspec.json.encode(FACTS[name])
    for of_ours, of_theirs in ((b"/FOLDER/train.py", file), (b"/FOLDER", str(Path(file).parent))):
        text = text.replace(of_ours, msgspec.json.encode(of_theirs)[1:-1])
    return msgspec.json.decode(text, type=kind)


def run_facts(folder: Path, **changes: Any) -> RunFacts:
    """A run of `python train.py` in `folder`; it started long after any file of a test was written."""
    return replace(kept("run", RunFacts, str(folder / "train.py")), **changes)


def step_facts(**changes: Any) -> StepFacts:
    """512 training steps that spend two thirds of their time waiting for data."""
    return replace(kept("steps", StepFacts), **changes)


def finding(file: str, **changes: Any) -> Finding:
    """The loader finding."""
    return replace(three_findings(file)[0], **changes)


def three_findings(file: str) -> tuple[Finding, ...]:
    """A loss in the input, one in a Python loop, one in file access."""
    return kept("findings", tuple[Finding, ...], file)


def operator_row(file: str, **changes: Any) -> OperatorRow:
    """An operator of five profiled steps on the CPU, four times in each."""
    return replace(kept("operator", OperatorRow, file), **changes)


def analysis(folder: Path, **changes: Any) -> Analysis:
    """All facts of the fabricated run, whose script lies in `folder`."""
    file = str(folder / "train.py")
    facts = Analysis(
        run=run_facts(folder),
        source_files=SourceFiles((str(folder),)),
        quality=kept("quality", Quality),
        steps=(step_facts(), step_facts(kind="eval", count=40, mean_ms=20.1, median_ms=20.0, p95_ms=22.0)),
        fixed=FixedCosts(4.21, 3.1, 0.61, 1.11, None),
        stacks=kept("stacks", StackFacts, file),
        loader=kept("loader", LoaderFacts, file),
        machine=MachineFacts(),
        views=Views((), (operator_row(file),), (), None, None, (), (), None, {}),
        loops=kept("loops", tuple[LoopFacts, ...], file),
        io=kept("io", tuple[IoFacts, ...], file),
        windows=kept("windows", tuple[WindowFacts, ...]),
        sites=kept("sites", tuple[Site, ...], file),
        processes=kept("processes", tuple[ProcessFacts, ...]),
        system={"cpu_mean_pct": 99.0},
        regions=kept("regions", tuple[dict[str, Any], ...]),
    )
    return replace(facts, **changes)


def diagnosis(folder: Path, **changes: Any) -> Diagnosis:
    """Three findings, one rule that abstained, one that is ignored."""
    facts = Diagnosis(
        findings=three_findings(str(folder / "train.py")),
        abstained=(Abstention("memory.fragmented", "a CUDA device"),),
        ignored=(Ignored("io.logging", "we need every line"),),
    )
    return replace(facts, **changes)
