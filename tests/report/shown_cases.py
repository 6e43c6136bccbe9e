"""What is shown of made-up facts, case by case; `python -m tests.report.shown_cases` writes the texts that are kept."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from stepscope.dashboard import hotspots
from stepscope.dashboard.pages import compare
from stepscope.diagnose import RULES
from stepscope.model import (
    Abstention,
    DeviceLines,
    Diagnosis,
    Disagreement,
    Evidence,
    FrameworkFacts,
    Note,
    Place,
    Quality,
    Try,
)
from stepscope.model.comparison import AppliedKnob, Effect, TrialFacts, Verdict
from stepscope.model.compilers import Change, CompilersView, CompileStorm
from stepscope.model.sampled import SampledProcess
from stepscope.report import experiment_report
from stepscope.report.document import build
from stepscope.schema import Knob
from tests.records import replace
from tests.report import fabricate_compilers as compilers
from tests.report import fabricate_device, test_comparison, test_hotspots, test_sampled
from tests.report import fabricate_experiment as tried
from tests.report.fabricate import (
    analysis,
    diagnosis,
    finding,
    kept,
    run_facts,
    step_facts,
    three_findings,
    write_script,
)
from tests.report.test_terminal import shown

KEPT = Path(__file__).with_name("shown.txt")
NOTHING = Diagnosis((), ())
READING, NONE_FOUND, foreign = fabricate_device.READING, fabricate_device.NONE_FOUND, fabricate_device.foreign


def texts(folder: Path) -> dict[str, str]:
    """The text of every case by its name; `folder` is written into."""
    write_script(folder)
    made: dict[str, str] = {}
    for group in (_reports, _devices, _knobs, _compilers, _experiments, _sampled, _hotspots, _comparisons):
        made |= group(folder)
    return {name: text.replace(str(folder), "/FOLDER").rstrip() + "\n" for name, text in made.items()}


def _run(folder: Path, found: Diagnosis = NOTHING, **facts: Any) -> str:
    return shown(build(analysis(folder, **facts), found), width=100)


def _reports(folder: Path) -> dict[str, str]:
    file = str(folder / "train.py")
    first, second, third = three_findings(file)
    twice = (
        Evidence("data wait per step", 41.2, "ms", "steps.jsonl"),
        Evidence("share of the step", 0.672, "fraction", "steps.jsonl"),
        Evidence("operators per call", 22.0, "operators", "trace"),
    )
    two = Disagreement("data wait, part of the step", "fraction", 0.61, "rank-0/steps.jsonl", 0.47, "stacks.jsonl")
    explains = Diagnosis((replace(first, explains=(second.id,)), second, third), ())
    ranks = {"run": run_facts(folder, ranks=(0, 1, 2)), "steps": (step_facts(ranks=(0, 1, 2)),)}
    many = tuple(finding(file, title=f"Loss number {index}") for index in range(20))
    lost = tuple(Note("warning", f"thing {index} was lost", "reader") for index in range(30))
    trainer = kept("framework", FrameworkFacts)
    on_top = {"on_top": ("trl 1.16.0", "peft 0.21.2"), "steps_counted": 512, "steps_cut": 512}
    frameworks = {
        "a framework": {},
        "a framework with others on top": on_top,
        "a framework without all its seams": {
            "version": "6.0",
            "supported": False,
            "missing": ("logging: Trainer.log",),
        },
        "a framework of a version nobody read": {"supported": False},
        "a framework of no version": {"version": None, "also": ("Lightning",), "cut_by": ""},
    }
    usual = build(analysis(folder), diagnosis(folder))
    return {
        "a report on a narrow terminal": shown(usual),
        "a report on a terminal of ASCII": shown(usual, encoding="ascii"),
        "a report in colour": shown(usual, coloured=True).replace("\x1b", "ESC"),
        "a report that goes to a file": shown(usual, piped=True),
        "a healthy run": _run(folder),
        "a knob to try": _run(folder, Diagnosis((replace(first, try_=(Try("loader.num_workers", "2"),)),), ())),
        "a finding of one rank": _run(folder, Diagnosis((finding(file, ranks=(1,)),), ()), **ranks),
        "a finding of every rank": _run(folder, Diagnosis((finding(file, ranks=(0, 1, 2)),), ()), **ranks),
        "evidence that the title line says": _run(folder, Diagnosis((finding(file, evidence=twice),), ())),
        "an edited file": _run(folder, diagnosis(folder), run=run_facts(folder, started_ns=1)),
        "no steps": _run(folder, steps=(), run=run_facts(folder, exit_status=137)),
        "more findings than fit": _run(
            folder, Diagnosis(many, tuple(Abstention(f"rule.{i}", "x" * 60) for i in range(40)))
        ),
        "many warnings": _run(folder, quality=Quality({}, lost)),
        "a refused sampler": _run(folder, quality=Quality({}, (Note("warning", "stacks: refused", "sampler"),))),
        "a finding that explains another": _run(folder, explains),
        "sources that disagree": _run(folder, Diagnosis((replace(first, disagreements=(two,)),), ())),
        **{
            name: _run(folder, run=run_facts(folder, framework=replace(trainer, **changes)))
            for name, changes in frameworks.items()
        },
    }


def _devices(folder: Path) -> dict[str, str]:
    def of(found: Diagnosis = NONE_FOUND, **changes: Any) -> str:
        return shown(build(foreign(folder, **changes), found), width=100)

    times, line = fabricate_device.device_time, fabricate_device.device_line
    nowhere = DeviceLines("device", 10**6, (), {"no stacks": 10**6}, {"no stacks": 1.0}, 0.0, 0.0, 5)
    guess = line("transformers/a.py", 3, 10**6, guess=True)
    guesses = DeviceLines("device", 10**6, (guess,), {}, {}, 1.0, 1.0, None)
    host = DeviceLines("cpu_op", 9 * 10**6, (line(str(folder / "train.py"), 14, 9 * 10**6),), {}, {}, 1.0, 0.0, None)
    no_device = replace(READING, device_events=0, link_rate=None, linked_shares={}, before_recording_share=None)
    on_host = {"device_time": (), "device_lines": host, "reading": no_device}
    return {
        "a trace of others": of(),
        "device time whose second scope says the same": of(device_time=(times("launched"), times("all"))),
        "device time without a line": of(device_lines=nowhere),
        "device time of library code": of(device_lines=guesses),
        "several traces": of(device_time=tuple(times("launched", trace=f"span-{number}") for number in range(6))),
        "a trace that no rule could judge": of(
            Diagnosis((), tuple(Abstention(f"rule-{n}", "stacks") for n in range(len(RULES))))
        ),
        "lines by the host's time": of(**on_host),
        "lines by the host's time beside sampled stacks": of(**on_host, stacks=analysis(folder).stacks),
        "a recording of ours on a CPU": _run(folder, diagnosis(folder), reading=replace(no_device, lost=0, repaired=0)),
    }


def _knobs(folder: Path) -> dict[str, str]:
    def knob(name: str, value: str, applied: bool = True, line: int | None = None, **fields: Any) -> AppliedKnob:
        file = str(folder / "train.py") if line is not None else None
        return AppliedKnob(name, value, applied, file=file, line=line, **{"rank": 0, **fields})

    def of(*knobs: AppliedKnob, **fields: Any) -> str:
        text = _run(folder, trial=TrialFacts(knobs, **{"seed": None, **fields}))
        return text.split("\n\n")[0]

    workers, amp = knob("loader.num_workers", "2", line=7), knob("amp.dtype", "bf16", False, reason="no autocast runs")
    elsewhere = (
        knob("loader.num_workers", "2", line=9),
        knob("loader.num_workers", "2", False, 14, reason="has its own"),
    )
    return {
        "knobs, one not applied": of(workers, amp, seed=3),
        "a knob at some places": of(workers, *elsewhere),
        "a knob that a rank refused": of(knob("gc", "off"), knob("gc", "off", applied=False, rank=3)),
        "a seed alone": of(seed=9, skipped=2),
        "many knobs": of(*(knob(f"env:A{i}", "1") for i in range(300))),
    }


def _compilers(folder: Path) -> dict[str, str]:
    file = str(folder / "train.py")
    usual, xla, cause = compilers.view(file), compilers.xla_view(file), compilers.cause

    def of(found: CompilersView | None, *findings: Any, **facts: Any) -> str:
        return _run(folder, Diagnosis(findings, ()), compilers=found, **facts)

    def of_xla(found: CompilersView, *findings: Any) -> str:
        return of(found, *findings, steps=(), stacks=None, loader=None, run=run_facts(folder, hosts=()))

    def chain(*changes: tuple[str | None, str | None]) -> str:
        found = tuple(Change(step, old, new) for step, (old, new) in enumerate(changes))
        one = cause(file, subject="x", changes=found, count=len(found) or 1)
        return of(replace(usual, causes=(one,))).split("\nCompilers\n")[1]

    slow = (step_facts(), step_facts(kind="eval", count=3, mean_ms=212.0, median_ms=210.0, p95_ms=230.0))
    by_id = finding(file, id="compile.recompiles-torch.compile:recompile:mean:shape", category="compile", where=())
    by_line = finding(file, rule="compile.limit_hit", category="compile", where=(Place(file, 14),))
    other = finding(file, rule="host.python", where=(Place(file, 13),))
    storm = replace(
        usual, storms=(CompileStorm("torch.compile", 40, 140, False, 38, 102, 100, 90, 1.0, 0.2, "train", 40),)
    )
    unrated = replace(xla, backends=(replace(xla.backends[0], step_estimate_ms=None),))
    unmarked = replace(unrated, backends=(replace(unrated.backends[0], marked_steps=None),))
    of_ranks = replace(usual, backends=(compilers.facts(ranks=(0, 1)),))
    article = finding(file, title=f"{compilers.ARTICLE} and more", category="compile")
    return {
        "no compiler": of(None),
        "compilers that did nothing": of(CompilersView((), (), (), (), (), ())),
        "compilers": of(usual),
        "many causes": of(replace(usual, causes=tuple(cause(file, id=str(i), subject=f"t{i}") for i in range(90)))),
        "slow evaluation beside fast training": of(usual, steps=slow),
        "fast evaluation": of(replace(usual, steps=(compilers.steps("eval", share=0.002),))),
        "torch_xla": of_xla(xla),
        "torch_xla without rates": of_xla(unrated),
        "torch_xla without steps": of_xla(unmarked),
        "torch_xla without a complaint": of_xla(replace(xla, causes=(), warnings=(), steps=())),
        "torch_xla whose warning a finding tells": of(xla, article),
        "causes that findings tell": of(usual, by_id, by_line, other),
        "a storm of compiles": of(storm),
        "a storm that a finding tells": of(storm, finding(file, rule="compile.storm", category="compile")),
        "a cause of one rank": of(replace(of_ranks, causes=(cause(file, ranks=(1,)),))),
        "a cause of all ranks": of(replace(of_ranks, causes=(cause(file, ranks=(0, 1)),))),
        "values, three": chain(("8", "12"), ("12", "16")),
        "values, more": chain(("8", "12"), ("8", "16"), ("8", "20"), ("8", "24")),
        "values, old alone": chain(("0", None), ("1", None)),
        "values, what was expected": chain(("0", None)),
        "values, new alone": chain((None, "16")),
        "values, none": chain((None, None)),
        "values, no change": chain(),
        "values, long": chain(("f" * 200, "g")),
    }


def _experiments(folder: Path) -> dict[str, str]:
    faster, by_hand = tried.FASTER, tried.BY_HAND
    by_samples = replace(
        faster,
        candidate=replace(faster.candidate, knobs=(Knob("arg:--batch-size", "128"),)),
        outcome=replace(
            faster.outcome,
            knobs=(Knob("arg:--batch-size", "128"),),
            headline="samples_per_second",
            verdict=Verdict("faster", "faster: 20 % more samples per second (95 %: 18 to 22 %), 3 pairs"),
            effects={**faster.outcome.effects, "samples_per_second": Effect(1.2, 1.18, 1.22, 3)},
        ),
    )
    by_median = replace(
        faster,
        outcome=replace(
            faster.outcome,
            verdict=Verdict("faster", "faster by 3 % by the median step", figure="median_ms"),
            effects={"mean_ms": Effect(0.98, 0.94, 1.02, 6), "median_ms": Effect(0.97, 0.96, 0.98, 6)},
        ),
    )
    stopped = replace(tried.screening(), tried=(), finished=False, stopped="the budget of 4 minutes is spent", runs=8)
    other = replace(by_hand, title="torch.save inside the step", line=90)
    found = {
        "a win": tried.experiment(),
        "no knob helps": tried.experiment(
            tried=(tried.EQUAL,), by_hand=(by_hand,), notes=("No finding names a knob.",)
        ),
        "a win beside what only an edit removes": tried.experiment(tried=(faster,), by_hand=(by_hand, other)),
        "an undecided candidate": tried.experiment(tried=(tried.EQUAL, tried.UNDECIDED)),
        "void candidates": tried.experiment(tried=(tried.VOID,)),
        "a gain beyond its ceiling": tried.experiment(
            tried=(replace(faster, candidate=replace(faster.candidate, ceiling=0.2)),)
        ),
        "step times beside samples": tried.experiment(tried=(by_samples, faster)),
        "samples alone": tried.experiment(tried=(by_samples,)),
        "by the median": tried.experiment(tried=(by_median,)),
        "a screening": tried.screening(),
        "a screening without a combination": replace(tried.screening(), tried=()),
        "an experiment that was stopped": stopped,
        "an experiment that was stopped early": replace(stopped, effects=()),
        "a self test": tried.self_test(),
        "an unfinished experiment": tried.experiment(finished=False, stopped="the budget of 5 minutes is spent"),
        "an experiment from its first run": tried.experiment(source="findings"),
        "an experiment from a run": tried.experiment(source="/runs/one"),
    }
    texts = {f"experiment: {name}": tried.shown(each, page="/somewhere/report.html") for name, each in found.items()}
    small = {
        "experiment: a small screen": tried.shown(tried.experiment(), width=80),
        "experiment: a terminal of ASCII": tried.shown(tried.experiment(), encoding="ascii"),
    }
    document = experiment_report.experiment_document(tried.experiment(by_hand=(by_hand,)))
    beside = build(analysis(folder), diagnosis(folder), experiment=document)
    return {**texts, **small, "a report with an experiment": shown(beside, width=100)}


def _sampled(_folder: Path) -> dict[str, str]:
    views, empty, wait = test_sampled.VIEWS, test_sampled.EMPTY, test_sampled.WAIT
    ranks, slow = test_sampled.RANKS, test_sampled.SLOW
    calm = replace(
        ranks, lines=(), straggler=None, straggler_place=None, waiters=(), verdict="no line tells them apart"
    )
    line = replace(ranks.lines[0], by_rank={0: 12.5, 1: 0.25}, most=0, waiting=True)
    many = tuple(replace(wait, rank=rank, wait_share=0.1 + rank / 100) for rank in range(20))
    found = {
        "all of it": views,
        "nothing": empty,
        "a short wait": replace(empty, waits=(replace(wait, wait_share=0.02),)),
        "ranks alike": replace(empty, rank_lines=calm),
        "waiting not sampled": replace(empty, waits=(replace(wait, idle_sampled=False, wait_share=0.04),)),
        "samples without times": replace(empty, waits=(replace(wait, simultaneous=False, wait_ms_per_step=None),)),
        "many ranks": replace(empty, waits=many),
        "ranks in milliseconds": replace(empty, rank_lines=replace(ranks, unit="ms per step", lines=(line,))),
        "slow steps without a line": replace(empty, slow_steps=replace(slow, lines=())),
    }
    return {f"sampled: {name}": test_sampled.shown(each) for name, each in found.items()}


def _hotspots(_folder: Path) -> dict[str, str]:
    made, row = test_hotspots.hotspots, test_hotspots.row
    merged = row(line=None, library_function_line=None)
    nameless = replace(merged, name=None, library_function_name=None)
    itself = row(name="f", path="train.py", library_function_name="f", library_function_path="train.py")
    known = made()
    found = {
        "all": known,
        "no waiting": made(row()),
        "no mode": made(idle=None, idle_source=None),
        "waiting not sampled": made(idle=False, idle_source="recorded"),
        "known length": made(wall_s=12.0, wall_source="recorded", rate_hz=100.0),
        "length by the rate": made(wall_s=12.0, wall_source="nominal"),
        "least length": made(wall_s=12.0, wall_source="nominal", idle=False),
        "steps": made(row(seconds=2.5, ms_per_step=7.4), steps=90, mean_step_ms=12.5),
        "a warning": made(warnings=("beware of\nthis",)),
        "microseconds": made(unit="us"),
        "many processes": made(processes=tuple(SampledProcess("", n, "loader_worker", 0, 1, 5, 0) for n in range(20))),
        "a function of its own": made(itself),
        "by function": made(merged, by="function"),
        "by file": made(nameless, by="file"),
        "by module": made(nameless, by="module"),
    }
    texts = {f"hotspots: {name}": test_hotspots.shown(each) for name, each in found.items()}
    return {
        **texts,
        "hotspots: one row": test_hotspots.shown(known, 1),
        "hotspots: JSON": hotspots.to_json(known).decode(),
        "hotspots: CSV": hotspots.to_csv(known).decode(),
    }


def _comparisons(_folder: Path) -> dict[str, str]:
    made, change, terminal = test_comparison.comparison, test_comparison.change, test_comparison.terminal
    kinds = [change(kind, f"a {kind}") for kind in compare.KINDS]
    rows = (
        *kinds,
        *(change("kernel", f"gemm {number}", float(number)) for number in range(9)),
        change("kernel", "tiny", -0.0123, status="shrank"),
        change("utilisation", "GPU", -30.0, unit="%", baseline=90.0, candidate=60.0),
        change("utilisation", "cores", None, unit="cores", baseline=None, status="new"),
        change("finding", "Waiting for the loader", -8.0, status="gone", file="train.py", line=7),
        change("environment", "torch", None, unit="", baseline="2.9", candidate="2.10", status="changed"),
        change("window", "steps", None, unit="", baseline=None, candidate="8", status="new"),
    )
    long = made(*rows, notes=("a note",), absent={"memory": "not recorded", "kernels": "not recorded"})
    return {
        "comparison": terminal(long),
        "comparison, all rows": terminal(long, top=0),
        "comparison on a terminal of ASCII": terminal(made(), encoding="ascii"),
        "comparison without step time": terminal(made(outcome=None, absent={"step time": "b has no step"})),
    }


def written(found: dict[str, str]) -> str:
    """The cases as one text."""
    return "".join(f"######## {name}\n{text}" for name, text in found.items())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as given:
        KEPT.write_text(written(texts(Path(given))), encoding="utf-8")
    print(f"wrote {KEPT}", file=sys.stderr)
