"""What evaluation takes between training steps, and the lines of the training code that call it.

Where a loader brings its batches, the journal has steps of its own for it; what a framework does in its evaluation
beside them, as metrics over all of them, counts too. Of a loop of the user's samples tell it: what the line that
evaluates, or one that trains nothing, does between the last batch and the next step; files that are saved and loaders
that start are no part. Batches that are cut from tensors leave it in the training step that it follows, which is then
far longer than others; there samples tell its part, and need a line that speaks of evaluation.

Where some ranks alone evaluate, the others wait for them: theirs are the steps that count.

A line of the user's counts when a model is called below it, and no backward pass or optimizer. It is mostly sampled
while there is evaluation. Where it stands under `torch.no_grad()` and its like, or calls what does, it counts also
where evaluations of a loader's batches are too short for the sampler's clock.
"""

from __future__ import annotations

import ast
import re

import numpy as np
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.happenings import EVALUATION
from stepscope.analyze.host.sampled_stacks import overlaps_of
from stepscope.analyze.input.loader_waits import sample_gap_ns
from stepscope.engine.call_tree import UserPaths, at, rows_of
from stepscope.engine.intervals import covered
from stepscope.engine.journal import event_data
from stepscope.engine.step_labels import FIRST_BATCH, STEADY, times_of
from stepscope.model import Place
from stepscope.model.machine import EvaluationFacts
from stepscope.read.raw import Frame
from stepscope.tables.arrays import NONE, Bools, Int32
from stepscope.tables.phases import BACKWARD, FORWARD, OPTIMIZER, in_file, phase_mark

LEAST = 0.1  # of the loop: less is not worth a word
FAR_LONGER = 2.0  # than the fastest quarter of the steps: evaluation that takes less than a step is no loss
MOSTLY = 0.5  # of a line's time lies in steps with evaluation: less is the training's
MIN_SAMPLES = 5  # of a line: fewer are chance
MIN_UPDATES = 2  # samples of backward passes and optimizers: from there on lines above both are known to train
MAX_LINES = 3
_QUIET = re.compile(r"\b(no_grad|inference_mode)\b|\bset_grad_enabled\(False\)|\.eval\(\)")
_MEANT = re.compile(r"(?i)eval|valid|\bval_|_val\b|accura")  # a rollout or a target has no gradients either
_FUNCTION, _BLOCK = 1, 2


def evaluation(context: Context) -> EvaluationFacts | None:
    """None without evaluation between training steps that takes a notable part, as far as it can be told."""
    known = pl.col("start_ns").is_not_null() & pl.col("reason").is_in([STEADY, FIRST_BATCH])  # none that compiles
    frame = context.labelled.frame.filter(known).sort("process", "start_ns")
    trains, wall = pl.col("kind") == "train", pl.col("wall_ns").cast(pl.Float64)
    starts, walls = (column.filter(trains) for column in (pl.col("start_ns"), wall))
    frame = frame.filter(pl.col("start_ns").is_between(starts.min().over("process"), starts.max().over("process")))
    apart = bool((frame["kind"] == "eval").any())
    frame = frame.with_columns(inside=~trains if apart else wall > FAR_LONGER * walls.quantile(0.25).over("process"))
    if apart:
        frame = frame.filter(pl.col("inside").any().over("process"))
    else:  # among them evaluation takes most of the time, and what else makes steps longer is short beside it
        heavy = wall.filter("inside")
        frame = frame.with_columns(inside=pl.col("inside") & (2 * wall > (heavy * heavy / heavy.sum()).sum()))
    inside = frame.filter("inside")
    beside_ns = _beside_batches(context, frame) if apart else 0
    after = _after(context, frame) if apart else frame.clear()
    taken_ns, whole_ns = (int(rows["wall_ns"].sum()) + beside_ns for rows in (inside, frame))
    if not inside.height or taken_ns + (0 if beside_ns else int(after["wall_ns"].sum())) < LEAST * whole_ns:
        return None
    lines = _lines(context, frame, after, apart=apart)
    places, part, samples, after_ns, processes = lines or ((), 0.0, 0, 0, [])
    if not apart:
        frame = frame.filter(pl.col("process").is_in(processes))
        inside = frame.filter("inside")
        taken_ns, whole_ns = (int(rows["wall_ns"].sum()) for rows in (inside, frame))
    if not beside_ns:
        taken_ns, whole_ns = taken_ns + after_ns, whole_ns + after_ns
    if taken_ns < LEAST * whole_ns or not (apart or places):
        return None
    steps = frame.filter(trains).height
    # of a step that ends in evaluation only the part that its lines were seen for
    lost_ns = taken_ns * (1.0 if apart else part)
    begins = pl.col("inside") & ~pl.col("inside").shift(1, fill_value=False).over("process")
    times = int(frame.select(begins.sum()).item())
    return EvaluationFacts(
        places=places,
        times=times,
        steps=inside.height if apart else None,
        each_ms=lost_ns / times / 1e6,
        samples=samples,
        lost_ms_per_step=lost_ns / steps / 1e6,
        total_ms_per_step=whole_ns / steps / 1e6,
    )


def _beside_batches(context: Context, frame: pl.DataFrame) -> int:
    """What a framework says that it evaluates between these steps and that lies in none, as metrics do (ns)."""
    windows = context.tables.journal.filter(pl.col("kind") == "window")  # ours, and may lie in an evaluation
    windows = windows.select("process", start_ns="time_ns", wall_ns="duration_ns")
    steps = pl.concat([context.labelled.frame.select(windows.columns), windows]).drop_nulls()
    regions = [row for row, data in event_data(context.tables, "region") if data.get("name") == EVALUATION]
    beside_ns = 0
    for (process,), own in frame.partition_by("process", as_dict=True).items():
        known = times_of(steps.filter(pl.col("process") == process))
        for row in regions:
            begin, ns = row["time_ns"] or 0, row["duration_ns"] or 0
            if row["process"] == process and own["start_ns"][0] < begin < own["start_ns"][-1]:
                beside_ns += ns - int(covered(known, np.array([begin]), np.array([begin + ns]))[0])
    return beside_ns


def _after(context: Context, frame: pl.DataFrame) -> pl.DataFrame:
    """From the last batch of each evaluation among these steps to the step that follows it, without our windows."""
    everything = context.labelled.frame.drop_nulls("start_ns").sort("process", "start_ns")
    end, begins = pl.col("start_ns") + pl.col("wall_ns"), pl.col("start_ns").shift(-1).over("process")
    last = (pl.col("kind") != "train") & (pl.col("kind").shift(-1).over("process") == "train")
    found = everything.with_columns(start_ns=end, wall_ns=begins - end).filter(last & (pl.col("wall_ns") > 0))
    windows = context.tables.journal.filter(pl.col("kind") == "window")["time_ns"].to_numpy()
    mine = pl.col("process").is_in(frame["process"].implode()) & (pl.col("start_ns") <= frame["start_ns"].max())
    within = found["start_ns"].to_numpy()[:, None], (found["start_ns"] + found["wall_ns"]).to_numpy()[:, None]
    struck = ((windows >= within[0]) & (windows < within[1])).any(axis=1)
    return found.filter(pl.Series(~struck)).filter(mine)


def _lines(
    context: Context, frame: pl.DataFrame, after: pl.DataFrame, *, apart: bool
) -> tuple[tuple[Place, ...], float, int, int, list[str]] | None:
    """The lines with their share of the sampled time of evaluation, most first, their share without those inside one
    another, their samples, time in `after` and processes. First comes the line besides the model that takes most, where
    most of it is no call of the model.
    """
    samples, stretches = context.sampled, context.tables.stretches
    main = (pl.col("role") == "rank") & pl.col("main_thread").fill_null(False) & pl.col("process").is_not_null()
    stretches = stretches.filter(main)
    if samples is None or stretches.is_empty():
        return None
    users = UserPaths(samples.calls, samples.code)
    updates = users.marked(lambda frame: phase_mark(frame) in (BACKWARD, OPTIMIZER))
    home, evaluates, quiet = _homes(context, users, updates, meant=not apart)
    if not apart:
        seen = stretches.filter(pl.Series(at(evaluates & quiet, rows_of(stretches["node"]), False)))
        stretches = stretches.filter(pl.col("process").is_in(seen["process"].unique().implode()))
    nodes, processes = rows_of(stretches["node"]), stretches["process"].unique().to_list()
    among = (frame.filter("inside"), frame.filter(~pl.col("inside")), after)
    times = [overlaps_of(stretches, steps) for steps in among]
    in_ns, out_ns, after_ns = (np.bincount(time["stretch"], time["ns"], minlength=stretches.height) for time in times)
    later_ns = after_ns * (int(after["wall_ns"].sum()) / max(1, int(after_ns.sum())))  # with what was not sampled of it
    later_ns[at(users.tree.innermost(users.marked(_is_no_evaluation)), nodes, NONE) >= 0] = 0
    whole, gap_ns = float(in_ns.sum()), sample_gap_ns(context.tables)
    if (in_ns + out_ns)[at(users.tree.innermost(updates), nodes, NONE) >= 0].sum() < MIN_UPDATES * gap_ns:
        return None  # nobody can tell the lines that train
    rows = pl.DataFrame(
        {
            "line": at(users.line, at(home, nodes, NONE), NONE),
            "evaluates": at(evaluates, nodes, False),
            "quiet": at(quiet, nodes, False),
            "in_ns": in_ns,
            "out_ns": out_ns,
            "after_ns": later_ns,
        }
    )
    # a line belongs to evaluation as a whole: what else is called there, its operators and metrics, is of it
    lines = rows.group_by("line").agg(
        pl.col("in_ns", "out_ns", "after_ns").sum(), *(pl.col(name).any() for name in ("evaluates", "quiet"))
    )
    seen_ns = pl.col("in_ns") + pl.col("out_ns")
    mostly = pl.col("in_ns") >= MOSTLY * seen_ns
    enough = (seen_ns if apart else pl.col("in_ns")) >= MIN_SAMPLES * gap_ns
    meant = (pl.col("quiet") | mostly) if apart else (pl.col("quiet") & mostly)
    lines = lines.filter(pl.col("line") >= 0)
    quietly = pl.lit(apart) & pl.col("quiet") & mostly  # the model itself may be too fast to be sampled
    ours = lines.filter((pl.col("evaluates") | quietly) & meant & enough)
    # what the training code does with the results, at a line of its own
    later = pl.col("after_ns") >= pl.max_horizontal(MIN_SAMPLES * gap_ns, MOSTLY * (seen_ns + pl.col("after_ns")))
    lines = pl.concat([ours, lines.filter(~pl.col("evaluates") & later)]) if apart else ours
    lines = lines.with_columns(ns=pl.col("in_ns") + pl.col("after_ns")).sort(["ns", "line"], descending=[True, False])
    lines = lines.head(MAX_LINES)
    own_ns, more_ns = float(lines["ns"].sum()), float(lines["after_ns"].sum())
    found = {place: ns for line, ns in lines.select("line", "ns").rows() if (place := users.place(line)) is not None}
    # where most of it is no call of the model, as metrics in Python are, the line that takes most of that comes first
    rows = rows.with_columns(inner=pl.Series(at(users.line, at(users.innermost, nodes, NONE), NONE)))
    rows = rows.filter(pl.col("line").is_in(lines["line"].implode()) & (pl.col("inner") >= 0) & ~pl.col("evaluates"))
    inner = rows.group_by("inner").agg(ns=(pl.col("in_ns") + pl.col("after_ns")).sum()).sort("ns", "inner")
    if float(inner["ns"].sum()) >= MOSTLY * own_ns > 0:
        line, ns = inner.tail(1).row(0)
        place = users.place(line)
        found = {place: found.get(place, ns), **found} if place is not None else found
    whole += more_ns
    places = tuple(Place(place.file, place.line, place.function, ns / whole) for place, ns in found.items())
    return places, own_ns / whole if whole else 0.0, round(own_ns / gap_ns), round(more_ns), processes


def _is_no_evaluation(frame: Frame) -> bool:
    """Files that are saved, and a loader that starts its workers for the next epoch (`input.first_batch`)."""
    return any(in_file(frame.file, file) for file in ("torch/serialization.py", "torch/utils/data/dataloader.py"))


def _homes(context: Context, users: UserPaths, updates: Bools, *, meant: bool) -> tuple[Int32, Bools, Bools]:
    """By node: the user's outermost line that trains nothing, whether a model is called below it, and whether gradients
    are switched off on the way there.
    """
    tree = users.tree
    known = {file: _quiet_lines(context, file, meant=meant) for file in set(users.files) if file is not None}
    leads = users.user & (tree.totals(updates.astype(np.float64)) > 0)
    home = tree.outermost(users.user & ~np.isin(users.line, users.line[leads]))
    model = tree.outermost(users.marked(lambda frame: phase_mark(frame) == FORWARD))
    quiet = np.array(
        [
            known[file].get(frame.line or 0, 0) if file is not None else 0
            for file, frame in zip(users.files, tree.frames, strict=True)
        ],
        np.int8,
    )
    # the function that calls for evaluation trains: of it only what stands in a `with`
    blocks, anything = (tree.innermost((model < 0) & (tree.by_node(quiet) >= least)) for least in (_BLOCK, _FUNCTION))
    calls = (home >= 0) & (home < model)  # a line of the model's own is training's as well
    return home, calls, (home >= 0) & ((blocks >= home) | (anything > home))


def _quiet_lines(context: Context, file: str, *, meant: bool) -> dict[int, int]:
    """The lines of functions, and of `with` blocks, that switch gradients or dropout off; `meant`: and speak of
    evaluation.
    """
    tree, text = context.lines.tree(file), context.sources.get(file, "").splitlines()
    found: dict[int, int] = {}
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.With | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = range(node.lineno - len(getattr(node, "decorator_list", ())), (node.end_lineno or node.lineno) + 1)
            kind = _BLOCK if isinstance(node, ast.With) else _FUNCTION
            own = text[lines.start - 1 : lines.stop - 1]
            head = own[: node.body[0].lineno - node.lineno] if kind == _BLOCK else own
            if _QUIET.search("\n".join(head)) and not (meant and _MEANT.search("\n".join(own)) is None):
                found |= {line: max(kind, found.get(line, 0)) for line in lines}
    return found
