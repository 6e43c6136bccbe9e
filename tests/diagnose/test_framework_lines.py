"""Where a loss is when a framework trains: the user's line, or the framework's, and never the line that calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Finding
from stepscope.tables.schema import Tables
from tests.analyze.scenes import LOOP_SOURCE, TORCH, TRAIN, Trace, loop_tables, stack, steps_with_window
from tests.builders import MS, make_tables
from tests.records import replace

PYTHON = "host.python_on_critical_path"
SITE = "/venv/lib/python3.11/site-packages"
ENTRY = f"<module> ({TRAIN}:16)"
EPOCH = f"Trainer._run_epoch ({SITE}/transformers/trainer.py:1909)"
TRAINING_STEP = f"Trainer.training_step ({SITE}/transformers/trainer.py:2118)"
MODULE = f"Module._call_impl ({TORCH}/nn/modules/module.py:1789)"
BACKWARD = f"Tensor.backward ({TORCH}/_tensor.py:623)"
BASE = [ENTRY, EPOCH]
LOG = f"Trainer.log ({SITE}/transformers/trainer.py"
WORK: list[dict[str, Any]] = [
    stack([*BASE, TRAINING_STEP, MODULE, f"linear ({TORCH}/nn/functional.py:1)"], 80, phase="forward"),
    stack([*BASE, TRAINING_STEP, BACKWARD], 100, phase="backward"),
    stack([*BASE, f"Optimizer.step ({TORCH}/optim/sgd.py:5)"], 20, phase="optimizer"),
]


def window_of(function: str, operators: float) -> list[dict[str, Any]]:
    """Slices of two window steps in which `function` of the framework takes 40 ms, a share of it in an operator."""
    trace = Trace()
    for row in steps_with_window():
        if row["in_window"]:
            trace.add("train.py(1): <module>", row["start_ns"], 190 * MS, step=row["step"])
            trace.add("transformers/trainer.py(1900): _run_epoch", row["start_ns"], 180 * MS, step=row["step"])
            trace.add(f"transformers/{function}", row["start_ns"], 40 * MS, step=row["step"])
            share = round(40 * operators * MS)
            trace.add("<built-in method mul of Tensor object at 0x7f>", row["start_ns"], share, step=row["step"])
            trace.add("aten::mul", row["start_ns"], share, step=row["step"], category="cpu_op")
    return trace.rows


def tables(stacks: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]] = (), **more: Any) -> Tables:
    return make_tables(steps=steps_with_window(), stacks=[*WORK, *stacks], events=list(events), **more)


def findings(made: Tables, rule: str = PYTHON) -> list[Finding]:
    return [finding for finding in diagnose(analyze(made)).findings if finding.rule == rule]


def test_operators_that_a_framework_calls_are_not_pythons() -> None:
    """C has no frame: `x * y` in a library's function shows the library's line."""
    leaf = stack([*BASE, f"Trainer.clip ({SITE}/transformers/trainer.py:300)"], 100)
    assert findings(tables([leaf], window_of("trainer.py(290): clip", operators=0.95))) == []
    assert findings(tables([leaf])) == []  # no window saw it: nobody knows


def test_a_frameworks_own_python_is_told_at_its_line_and_the_users_line_is_the_entry() -> None:
    stacks = [
        stack([*BASE, f"{LOG}:300)", "dumps (/usr/lib/python3.11/json.py:7)"], 20),
        stack([*BASE, f"{LOG}:301)"], 40),
    ]
    (finding,) = findings(tables(stacks, window_of("trainer.py(290): log", 0.0)))
    assert [(place.file, place.line) for place in finding.where] == [
        ("transformers/trainer.py", 301),
        ("transformers/trainer.py", 300),
        (TRAIN, 16),
    ]
    assert "log (trainer.py:301)" in finding.title
    assert "reached from train.py:16" in finding.title
    assert "train.py:16 only leads there" in finding.fix


def test_fetching_a_batch_through_a_framework_blames_no_line() -> None:
    fetch = [ENTRY, f"DataLoaderShard.__iter__ ({SITE}/accelerate/data_loader.py:598)"]
    stacks = [
        stack([*fetch, f"_BaseDataLoaderIter.__next__ ({TORCH}/utils/data/dataloader.py:733)"], 50, phase="data_wait"),
        stack([*fetch, f"send_to_device ({SITE}/accelerate/operations.py:140)"], 60),
    ]
    assert findings(tables(stacks)) == []


def test_what_no_window_saw_of_a_call_that_could_be_spared_counts_with_low_confidence_and_is_never_critical() -> None:
    metric = f"compute ({SITE}/somemetrics/f1.py:9)"
    stacks = [stack([*BASE, f"Mine.on_step_end ({TRAIN}:8)", f"measure ({TRAIN}:4)", metric], 200)]
    (finding,) = findings(tables(stacks))
    assert finding.where[0].line == 4
    assert finding.share > 0.4
    assert (finding.confidence, finding.severity) == ("low", "warning")
    assert any(evidence.metric == "of it not told from torch operators" for evidence in finding.evidence)


def test_python_in_a_loop_that_costs_much_less_is_told_by_itself() -> None:
    """Two operators an iteration and a sort of Python's: the loop's finding counts the operators alone."""
    analysis = analyze(loop_tables(), {TRAIN: LOOP_SOURCE})
    assert analysis.loops is not None
    assert analysis.python is not None
    assert PYTHON not in {finding.rule for finding in diagnose(analysis).findings}
    loop = replace(analysis.loops[0], ms_per_step=6.0, backward_ms_per_step=None)
    line = replace(analysis.python[0], ms_per_step=30.0, samples=60, inside_loop=loop.place)
    found = diagnose(replace(analysis, loops=(loop,), python=(line,))).findings
    assert [finding.rule for finding in found] == [PYTHON, "host.per_item_loop"]


def saves(at: dict[str, Any]) -> list[dict[str, Any]]:
    rows = steps_with_window()
    return [{"kind": "save", "time_ns": row["start_ns"], "duration_ns": 20 * MS, "path": "c.pt", **at} for row in rows]


def test_a_checkpoint_of_the_frameworks_is_told_at_its_line_and_once() -> None:
    """The recorder times the save and knows the user's line alone; the samples know whose function it is."""
    save = [f"_save_checkpoint ({SITE}/transformers/trainer.py:2300)", f"save ({TORCH}/serialization.py:980)"]
    journal = saves({"file": TRAIN, "line": 16, "function": "<module>"})
    (finding,) = findings(tables([stack([*BASE, *save], 50)], journal=journal), "io.blocking_in_step")
    assert [(place.file, place.line) for place in finding.where] == [("transformers/trainer.py", 2300), (TRAIN, 16)]
    assert finding.share == 0.2
    assert "reached from train.py:16" in finding.title
    assert "at train.py:16" not in finding.fix
