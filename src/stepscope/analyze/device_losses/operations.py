"""Operations that own all that happens in them: the idle time of the devices, and the work they launch.

Linear algebra that a device does matrix by matrix, and DataParallel's copying of the model and of batches. Whatever
waits, copies or launches lie inside are parts of the operation and no losses of their own.
"""

from __future__ import annotations

import json
from functools import cached_property
from math import prod

import numpy as np
from msgspec import Struct

from stepscope.analyze.device_losses.pieces import Piece, host_rows, piece
from stepscope.engine import intervals
from stepscope.engine.device_work import KERNEL
from stepscope.engine.intervals import Intervals
from stepscope.engine.scene import Scene
from stepscope.tables.arrays import NONE, Bools, Int64

# A kernel that ends before the next could be launched is over before the device did anything worth a launch.
SHORT_NS = 10_000
# Of an operator's time on the device, in kernels that are neither short nor leave multiprocessors empty: with less
# than half of it the device mostly waits for the next small piece of a serial algorithm.
BUSY = 0.5
_LINALG = (
    r"^aten::_?(linalg_)?(qr|svd|eigh?|eigvalsh?|cholesky(_ex|_inverse|_solve)?|lu(_factor(_ex)?|_solve|_with_info)?"
    r"|solve(_ex)?|inv(_ex)?|inverse|det|slogdet|lstsq|pinv|ldl_factor(_ex)?|ldl_solve|householder_product|matrix_exp"
    r"|symeig|geqrf|orgqr|ormqr|svdvals|svd_helper|solve_triangular|triangular_solve)$"
)
_DATA_PARALLEL = r"^DataParallel\.forward$|(^|/)torch/nn/parallel/data_parallel\.py\(\d+\): forward$"
_DISTRIBUTING = (
    r"(^|/)torch/nn/parallel/(replicate|scatter_gather|comm|_functions)\.py\(\d+\): "
    r"|^(autograd::engine::evaluate_function: )?(Broadcast|Scatter|Gather|ReduceAddCoalesced)(Backward)?$"
)


class Operations(Struct, frozen=True, dict=True):
    """The owning operations of one trace; `gaps` is when no device works."""

    scene: Scene
    gaps: Intervals

    @property
    def times(self) -> Intervals:
        """When the host is inside one."""
        return intervals.merge(self._linalg, self._distributing)

    @cached_property
    def work(self) -> Bools:
        """Slices of work that they launched."""
        return self._launched_in(self._linalg_rows, self._linalg) | self._launched_in(
            self._distributing_rows, self._distributing
        )

    # ------------------------------------------------------------------------------------------ linear algebra

    @cached_property
    def _linalg_rows(self) -> Int64:
        span = self.scene.span
        rows = host_rows(span, _LINALG)
        return rows[span.is_operator[rows]]

    @cached_property
    def _linalg(self) -> Intervals:
        """Calls of linear algebra that leave the device empty for most of their time."""
        scene, span, rows = self.scene, self.scene.span, self._linalg_rows
        calls = intervals.union(span.start_ns[rows], span.ends(rows))
        if not len(calls.starts):
            return calls
        found = scene.found
        mine = self._launched_in(rows, calls)
        at = self._call_of(calls, mine)
        lengths = (found.end_ns - found.start_ns)[mine]
        blocks = span.series("blocks_per_sm").gather(found.rows[mine]).fill_null(1.0).to_numpy()
        full = (found.kind[mine] == KERNEL) & (lengths > SHORT_NS) & (blocks >= 1)
        work = np.bincount(at, lengths, len(calls.starts))
        busy = np.bincount(at[full], lengths[full], len(calls.starts))
        serial = busy < BUSY * (work + intervals.covered(self.gaps, calls.starts, calls.ends))
        return Intervals(calls.starts[serial], calls.ends[serial])

    def linear_algebra(self, told: Intervals) -> Piece:
        """Calls of linear algebra in which the device mostly waits for the next small piece."""
        rows, calls = self._linalg_rows, self._linalg
        found = self._owned(rows, calls, told)
        sizes = [self._matrices(int(row)) for row in found.rows if row >= 0]
        count = sum(number for number, _ in sizes)
        mine = self._launched_in(rows, calls) & (self.scene.step_of(self.scene.found.start_ns) >= 0)
        found.details.update(
            launches=float(mine.sum()),
            matrices=float(count),
            matrix_rows=float(sum(number * size for number, size in sizes)),
        )
        return found

    def _matrices(self, row: int) -> tuple[int, int]:
        """How many matrices the operator got, and the rows of each; (0, 0) where no shapes were recorded."""
        shape = _first_shape(self.scene.span.series("shapes")[row])
        return (prod(shape[:-2]), shape[-2]) if len(shape) >= 2 else (0, 0)

    # -------------------------------------------------------------------------------------------- DataParallel

    @cached_property
    def _distributing_rows(self) -> Int64:
        span, devices = self.scene.span, np.unique(self.scene.found.device)
        if (devices >= 0).sum() < 2 or not len(host_rows(span, _DATA_PARALLEL)):
            return np.empty(0, np.int64)
        return host_rows(span, _DISTRIBUTING)

    @cached_property
    def _distributing(self) -> Intervals:
        span, rows = self.scene.span, self._distributing_rows
        return intervals.union(span.start_ns[rows], span.ends(rows))

    def data_parallel(self, told: Intervals) -> Piece:
        """DataParallel's replicate, scatter and gather, as far as nothing hides them."""
        found = self._owned(self._distributing_rows, self._distributing, told)
        found.details["devices"] = float(len(np.unique(self.scene.found.device)) * len(self.scene.windows))
        return found

    # ---------------------------------------------------------------------------------------------------- both

    def _launched_in(self, rows: Int64, times: Intervals) -> Bools:
        """Slices of work whose launch lies in these times, on a thread of the rows."""
        span, found = self.scene.span, self.scene.found
        launch = np.maximum(found.launch, 0)
        starts = span.start_ns[launch]
        tracks = np.unique(span.tracks.codes[rows])
        inside: Bools = (intervals.covered(times, starts, starts + 1) > 0) & (found.launch >= 0)
        return inside & np.isin(span.tracks.codes[launch], tracks)

    def _call_of(self, calls: Intervals, mine: Bools) -> Int64:
        starts = self.scene.span.start_ns[self.scene.found.launch[mine]]
        at: Int64 = np.searchsorted(calls.starts, starts, side="right") - 1
        return at

    def _owned(self, rows: Int64, calls: Intervals, told: Intervals) -> Piece:
        """Idle time inside the calls, without what is `told` elsewhere, and their work with nothing beside it."""
        scene, span = self.scene, self.scene.span
        mine = self._launched_in(rows, calls) if len(calls.starts) else np.zeros(len(scene.found), bool)
        idle = intervals.subtract(intervals.intersect(self.gaps, calls), told)
        times = intervals.intersect(intervals.merge(idle, scene.exclusive(mine)), scene.inside)
        ends = calls.ends.copy()
        np.maximum.at(ends, self._call_of(calls, mine), scene.found.end_ns[mine])
        ends[:-1] = np.minimum(ends[:-1], calls.starts[1:])  # what a later call began is that call's
        weights = intervals.covered(times, calls.starts, ends)
        order = np.lexsort((-span.duration_ns[rows], span.start_ns[rows]))
        begins = np.searchsorted(span.start_ns[rows][order], calls.starts)
        outer = rows[order][begins] if len(calls.starts) else np.full(0, NONE, np.int64)
        kept = weights > 0
        details = {"idle_ns": float(intervals.total(intervals.intersect(idle, scene.inside)))}
        return piece(scene, times, outer[kept], weights[kept], outer[kept], details)


def _first_shape(text: str | None) -> list[int]:
    try:
        shapes = json.loads(text or "[]")
    except ValueError:
        return []
    first = shapes[0] if isinstance(shapes, list) and shapes else []
    return first if isinstance(first, list) and all(type(size) is int for size in first) else []
