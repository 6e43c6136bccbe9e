"""What logging takes of the main thread: tools known by their files, and the user's line that they are called from.

A tool that reads numbers of a device waits for all work queued on it, so its cost is mostly waiting; sampled stacks
show who waits, and where it was called from.
"""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.host.removable_calls import Calls
from stepscope.engine.call_tree import rows_of
from stepscope.model import Place
from stepscope.model.metrics import LoggingCost

# tool -> its files; the first that fits. What is called through another tool is that one's.
TOOLS: dict[str, re.Pattern[str]] = {
    name: re.compile(rf"(^|/)({files})")
    for name, files in {
        "wandb.watch": r"wandb/(integration/torch|sdk/lib)?/?\w*wandb_torch\.py",
        "W&B": r"wandb/",
        "TensorBoard": r"torch/utils/tensorboard/|tensorboardX/|tensorboard/",
        "MLflow": r"mlflow/",
        "Trackio": r"trackio/",
        "Comet": r"comet_ml/",
        "ClearML": r"clearml/",
        "SwanLab": r"swanlab/",
        "Neptune": r"neptune(_scale)?/",
        "Aim": r"aim/sdk/",
        "Lightning's ThroughputMonitor": r"\w*lightning/(\w+/)*throughput\w*\.py",
        "Lightning's loggers": r"\w*lightning/(\w+/)?(loggers|trainer/connectors/logger_connector)/",
    }.items()
}


def logging_costs(context: Context, calls: Calls | None) -> tuple[LoggingCost, ...] | None:
    """One for each tool and line, costliest first; None without stacks in steady steps."""
    samples = context.sampled
    if samples is None or calls is None:
        return None
    tree, names = samples.calls, list(TOOLS)
    of_frame = np.array([_tool(frame.file, names, context) for frame in tree.frames], np.int64)
    if not len(of_frame) or of_frame.max() < 0:
        return ()
    outermost = tree.outermost(tree.by_node(of_frame >= 0))
    nodes = rows_of(calls.rows["node"])
    entered = np.where(nodes >= 0, outermost[np.maximum(nodes, 0)], -1)
    tool = np.where(entered >= 0, of_frame[tree.frame[np.maximum(entered, 0)]], -1)
    rows = calls.rows.with_columns(tool=pl.Series(tool), entered=pl.Series(entered)).filter(pl.col("tool") >= 0)
    found = []
    for own in rows.partition_by("tool", "user_file", "user_line", "user_function"):
        first, share, count = own.row(0, named=True), calls.time.share(own), int(own["samples"].sum())
        line = (first["user_file"], first["user_line"], first["user_function"])
        top = own.group_by("entered").agg(pl.col("samples").sum()).sort("samples", "entered", descending=[True, False])
        found.append(
            LoggingCost(
                tool=names[first["tool"]],
                function=tree.frames[tree.frame[top["entered"][0]]].function,
                place=Place(*line) if line[0] else None,
                ms_per_step=share.ms,
                at_most_ms_per_step=share.at_most_ms,
                samples=count,
                waiting_share=int(own.filter(pl.col("waiting"))["samples"].sum()) / count,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.ms_per_step, one.tool)))


def _tool(file: str, names: list[str], context: Context) -> int:
    """The number of the tool that a file belongs to, -1 of the user's own and of all others."""
    found = next((at for at, name in enumerate(names) if TOOLS[name].search(file)), -1)
    return found if found < 0 or context.code.resolve(file) is None else -1
