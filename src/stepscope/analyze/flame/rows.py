"""The sampled stacks of a flame graph as arrays: which thread a row is of, and what one sample of it is worth.

Where steady steps are known a sample is worth milliseconds per step: a rank's main thread's samples of steady segments
together are its mean step, and samples of its other threads, taken at the same moments, count the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from stepscope.analyze.context import Context
from stepscope.analyze.sampled.loop import sampled_loop
from stepscope.analyze.sampled.selection import StackSelection, choose, main_roles
from stepscope.analyze.sampled.user_paths import UserPaths
from stepscope.engine.call_tree import CallTree
from stepscope.engine.samples import Samples
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import PHASES
from stepscope.tables.arrays import NONE, Bools, Floats, Int32

MAIN, WORKERS, THREADS, OTHERS = "main", "workers", "threads", "other"
MS_PER_STEP = "ms per step"
_SEGMENT = ["process", "start_ns", "end_ns"]


class SampleRows(Struct, frozen=True):
    """Rows that are drawn: arrays of one length, and what they have in common.

    `kind` is one of the four above; `rank` is -1 and `phase` None where unknown. `worth` is what one sample counts for
    in a tree of all ranks, `rank_worth` in one of its rank alone. Rows that are not `steady` are in no step: they
    belong in no tree whose unit is per step. `loop`: main threads in the training loop, as far as steps or paths tell.
    """

    calls: CallTree
    node: Int32  # -1 for a stack without frames
    samples: Floats
    waiting: Bools
    kind: npt.NDArray[np.object_]
    phase: npt.NDArray[np.object_]
    rank: Int32
    steady: Bools
    loop: Bools
    worth: Floats
    rank_worth: Floats
    unit: str
    source: str
    left_out: dict[str, int]

    @property
    def per_step(self) -> bool:
        """Whether values are per step."""
        return self.unit == MS_PER_STEP

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose main thread was sampled in the steady state."""
        return tuple(sorted(set(self.rank[(self.kind == MAIN) & self.steady].tolist()) - {NONE}))


def sample_rows(context: Context, selection: StackSelection, *, per_step: bool = True) -> SampleRows:
    """The rows of `selection`; with `per_step` in ms per step where steady steps are known, else in samples."""
    tables = context.tables
    chosen = choose(tables, selection)
    stacks = chosen.rows
    kind = _kinds(stacks, main_roles(tables.stacks))
    rank = stacks["rank"].fill_null(NONE).to_numpy().astype(np.int32)
    per_sample = _per_sample(context) if per_step else {}
    worth, steady = np.ones(len(rank)), np.ones(len(rank), dtype=np.bool_)
    if per_sample and context.sampled is not None:
        steady = _steady(stacks, kind, context.sampled)
        worth = _by_rank(rank, per_sample)
        if not steady.any():  # asked for what lies in no steady step, such as startup
            return sample_rows(context, selection, per_step=False)
    several = f", mean of {len(per_sample)} ranks" if len(per_sample) > 1 else ""
    return SampleRows(
        calls=context.calls,
        node=stacks["node"].fill_null(NONE).to_numpy().astype(np.int32),
        samples=stacks["samples"].to_numpy().astype(np.float64),
        waiting=stacks["waiting"].fill_null(False).to_numpy(),
        kind=kind,
        phase=stacks["phase"].to_numpy().astype(object),
        rank=rank,
        steady=steady,
        loop=steady & (kind == MAIN) if per_sample else _in_loop(context, stacks, kind),
        worth=worth / max(1, len(per_sample)),
        rank_worth=worth,
        unit=MS_PER_STEP if per_sample else _unit(context),
        source=f"share of the main thread's samples in steady steps x mean step{several}"
        if per_sample
        else "as the files count them",
        left_out=chosen.left_out,
    )


def _kinds(stacks: pl.DataFrame, main: tuple[str, ...]) -> npt.NDArray[np.object_]:
    role = pl.col("role").fill_null("other")
    kind = (
        pl.when(role == "loader_worker")
        .then(pl.lit(WORKERS))
        .when(~role.is_in(main))
        .then(pl.lit(OTHERS))
        .when(pl.col("main_thread").fill_null(True))
        .then(pl.lit(MAIN))
        .otherwise(pl.lit(THREADS))
    )
    return stacks.select(kind.alias("kind"))["kind"].to_numpy().astype(object)


def _per_sample(context: Context) -> dict[int, float]:
    """Milliseconds per step that one sample of a rank stands for; empty where steady steps or samples are missing."""
    if context.sampled is None:
        return {}
    means = _mean_steps(context.labelled)
    counts = context.sampled.rank_steps().group_by("rank").agg(pl.col("samples").sum())
    return {
        int(rank): means[rank] / samples for rank, samples in counts.sort("rank").rows() if samples and rank in means
    }


def _mean_steps(labelled: LabelledSteps) -> dict[int, float]:
    """The mean steady step of each rank in ms: of training, or of evaluation where nothing is trained."""
    steady = labelled.steady("train")
    steady = labelled.steady("eval") if steady.is_empty() else steady
    means = steady.group_by("rank").agg(ms=pl.col("wall_ns").mean() / 1e6)
    return {int(rank): float(ms) for rank, ms in means.rows() if rank is not None}


def _steady(stacks: pl.DataFrame, kind: npt.NDArray[np.object_], sampled: Samples) -> Bools:
    """Which rows count per step: of steady segments, and of main threads only what is inside a step's phases."""
    segments = sampled.rows.group_by(_SEGMENT).agg(pl.col("steady").any())
    joined = stacks.select(_SEGMENT).join(segments, on=_SEGMENT, how="left", nulls_equal=True, maintain_order="left")
    steady: Bools = joined["steady"].fill_null(False).to_numpy().copy()
    profiling = sampled.rows.filter(pl.col("in_profiler"))["node"].unique()
    inside = stacks["phase"].is_in(PHASES).fill_null(False) & ~stacks["node"].is_in(profiling.implode()).fill_null(
        False
    )
    steady &= (kind != MAIN) | inside.to_numpy()
    return steady


def _in_loop(context: Context, stacks: pl.DataFrame, kind: npt.NDArray[np.object_]) -> Bools:
    """Main threads in the training loop, of files that know no steps."""
    found = sampled_loop(context, UserPaths(context.calls, context.code))
    if found is None or found.inside is None:
        return np.zeros(len(kind), dtype=np.bool_)
    inside = np.append(found.inside, False)[stacks["node"].fill_null(NONE).to_numpy()]
    working: Bools = inside & stacks["stage"].is_null().to_numpy() & (kind == MAIN)
    return working


def _by_rank(rank: Int32, per_sample: dict[int, float]) -> Floats:
    """The worth of a sample for each row; rows of no rank, and of ranks without steps, count like the mean rank's."""
    usual = sum(per_sample.values()) / len(per_sample)
    return np.asarray([per_sample.get(int(each), usual) for each in rank], dtype=np.float64)


def _unit(context: Context) -> str:
    """What the files count; files of one unit only can be opened together."""
    units = context.tables.segments["unit"].drop_nulls().unique().to_list()
    return str(units[0]) if len(units) == 1 else "samples"
