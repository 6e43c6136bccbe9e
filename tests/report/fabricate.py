"""Made-up facts and findings, so that the report is tested apart from what measures them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepscope.model import (
    Abstention,
    Analysis,
    Diagnosis,
    Evidence,
    Finding,
    FixedCosts,
    HotLine,
    Ignored,
    Interval,
    IoFacts,
    LoaderFacts,
    LoopFacts,
    Note,
    PartitionPart,
    Place,
    ProcessFacts,
    Quality,
    RunFacts,
    Site,
    SourceFiles,
    StackFacts,
    StepFacts,
    Try,
    WindowFacts,
)
from stepscope.model.views import OperatorRow, Views
from tests.records import blank, replace

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
ITEM_LINE, LOOP_LINE = 7, 14


def write_script(folder: Path) -> str:
    """Write the script that the fabricated findings point into; returns its path."""
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def run_facts(folder: Path, **changes: Any) -> RunFacts:
    """A run of `python train.py` in `folder`."""
    facts = RunFacts(
        folder=str(folder / "stepscope-runs" / "one"),
        name="pictures",
        tags=("baseline",),
        command=("python", "train.py", "--lr", "0.1"),
        cwd=str(folder),
        started_ns=4_000_000_000_000_000_000,  # long after any file of a test was written
        ended_ns=4_000_000_060_000_000_000,
        exit_status=0,
        hosts=("host-a",),
        ranks=(0,),
        world_size=1,
        versions={"python": "3.11.9", "torch": "2.13.0"},
        hardware={"cpu_model": "Some CPU", "logical_cores": 8},
        noise={"governor": "powersave"},
        git=None,
        user_roots=(str(folder),),
    )
    return replace(facts, **changes)


def step_facts(**changes: Any) -> StepFacts:
    """512 training steps that spend two thirds of their time waiting for data."""
    facts = StepFacts(
        kind="train",
        count=512,
        signal="loader",
        ranks=(0,),
        mean_ms=61.3,
        median_ms=60.1,
        p95_ms=88.0,
        per_second=16.3,
        samples_per_second=522.0,
        partition=(
            PartitionPart("data_wait", 41.2, 0.672),
            PartitionPart("forward", 7.4, 0.121),
            PartitionPart("backward", 8.6, 0.140),
            PartitionPart("optimizer", 2.0, 0.033),
            PartitionPart("other", 2.1, 0.034),
        ),
        excluded={"warm-up": 3, "first batch": 1, "in a window": 5},
        first_batch_ms=210.0,
        low_confidence=False,
        series=tuple((step, 60.0 + step % 7 + (90.0 if step == 200 else 0.0)) for step in range(0, 512, 4)),
    )
    return replace(facts, **changes)


def finding(file: str, **changes: Any) -> Finding:
    """The loader finding."""
    found = Finding(
        id="input.loader_bound:0",
        rule="input.loader_bound",
        category="input",
        title="Waiting for the loader",
        severity="critical",
        confidence="high",
        cost_ms_per_step=41.2,
        share=0.672,
        gain_ceiling=0.672,
        where=(Place(file, ITEM_LINE, "Pictures.__getitem__", 0.91),),
        evidence=(
            Evidence("data_wait", 41.2, "ms", "steps.jsonl, inside the iterator's __next__"),
            Evidence("workers", 0, "processes", "construction site of the DataLoader"),
        ),
        fix="Load in 4 worker processes: DataLoader(..., num_workers=4, persistent_workers=True).",
        falsified_by="step time does not fall with 4 workers",
        caveat="Each worker holds a copy of the data set object.",
        learn="https://pytorch.org/docs/stable/data.html",
        try_=(Try("loader.workers", "4"),),
    )
    return replace(found, **changes)


def three_findings(file: str) -> tuple[Finding, ...]:
    """A loss in the input, one in a Python loop, one in file access."""
    return (
        finding(file),
        finding(
            file,
            id="launch.python_loop:0",
            rule="launch.python_loop",
            category="launch",
            title="A Python loop calls cross_entropy once per item",
            severity="warning",
            confidence="medium",
            cost_ms_per_step=5.1,
            share=0.083,
            gain_ceiling=0.08,
            expected_gain=Interval(0.05, 0.075),
            where=(Place(file, LOOP_LINE, "loss_of", 1.0), Place(file, 13, "loss_of", None)),
            evidence=(
                Evidence("calls_per_step", 256.0, "calls", "trace-0"),
                Evidence("equals", "256 = dim 1 of (8, 256)", "text", "trace-0"),
            ),
            fix="Call it once on the whole tensor: flatten the batch and the positions before the call.",
            caveat="",
            try_=(),
        ),
        finding(
            file,
            id="io.blocking:0",
            rule="io.blocking",
            category="io",
            title="torch.save inside the step",
            severity="info",
            confidence="low",
            cost_ms_per_step=1.4,
            share=0.023,
            gain_ceiling=0.023,
            where=(Place("/elsewhere/lib.py", 3, "save", None),),
            evidence=(Evidence("bytes", 104_857_600, "bytes", "events.jsonl"),),
            fix="Save every 1,000 steps, or from a thread.",
            caveat="A crash loses more steps.",
            try_=(),
            learn="",
        ),
    )


def hot_line(file: str, **changes: Any) -> HotLine:
    """A sampled line of the data set."""
    line = HotLine(file, ITEM_LINE, "Pictures.__getitem__", "rank", "data_wait", 900, 0.61, 37.5, 0.02, "decode (PIL)")
    return replace(line, **changes)


def operator_row(file: str, **changes: Any) -> OperatorRow:
    """An operator of five profiled steps on the CPU, four times in each."""
    row = blank(
        OperatorRow,
        name="aten::conv2d",
        calls=21,
        calls_per_step=4.0,
        host_self_ns=17_000_000,
        host_total_ns=36_000_000,
        host_self_ns_per_step=3_200_000.0,
        host_total_ns_per_step=6_900_000.0,
        runtime_ns=0,
        place=Place(file, 12, "forward", 0.9),
        place_exact=True,
    )
    return replace(row, **changes)


def analysis(folder: Path, **changes: Any) -> Analysis:
    """All facts of the fabricated run, whose script lies in `folder`."""
    file = str(folder / "train.py")
    line = hot_line(file)
    facts = Analysis(
        run=run_facts(folder),
        source_files=SourceFiles((str(folder),)),
        quality=Quality(
            {"steps": 521, "torn_lines": 1},
            (
                Note("warning", "1 torn line at the end of rank-0/steps.jsonl was dropped", "steps"),
                Note("info", "stacks sampled at 100 Hz by py-spy", "sampler"),
            ),
        ),
        steps=(step_facts(), step_facts(kind="eval", count=40, mean_ms=20.1, median_ms=20.0, p95_ms=22.0)),
        fixed=FixedCosts(4.21, 3.1, 0.61, 1.11, None),
        stacks=StackFacts("py-spy", 100.0, 3100, 4, 2900, {"data_wait": 1900, "forward": 400}, (line,)),
        loader=LoaderFacts(
            num_workers=0,
            batch_size=32,
            site=Place(file, 2, "main"),
            arguments={"shuffle": "True"},
            data_wait_ms=41.2,
            data_wait_share=0.672,
            in_main_process=True,
            lines=(line,),
            workers_busy_share=None,
            workers_idle_share=None,
            cpu_limit=4.0,
            suggested_workers=4,
        ),
        views=Views((), (operator_row(file),), (), None, None, (), (), None, {}),
        loops=(
            LoopFacts("cross_entropy", 256.0, 5.1, 6.0, Place(file, LOOP_LINE), "256 = dim 1 of (8, 256)", "trace-0"),
        ),
        io=(IoFacts("torch.save", Place(file, 3), 0.1, 1.4, "events.jsonl"),),
        windows=(WindowFacts(0, "trace-0.json.gz", "stepscope", 5, False, "steady", 10.0, 320.0, 4_000_000, 1.4),),
        sites=(Site("DataLoader", Place(file, 2, "main"), {"batch_size": "32"}, 0),),
        processes=(ProcessFacts(4711, "rank", "python train.py", True, None),),
        system={"cpu_mean_pct": 99.0},
        regions=({"name": "augment", "calls": 512, "calls_per_step": 1.0, "ms_per_step": 3.0, "source": "events"},),
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
