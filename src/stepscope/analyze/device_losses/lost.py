"""What one trace loses: the pieces of every kind, each made once for the losses and for the replays without them."""

from __future__ import annotations

from functools import cached_property

from msgspec import Struct

from stepscope.analyze.device_losses import busy, copies, launches
from stepscope.analyze.device_losses.busy import Busy
from stepscope.analyze.device_losses.idle import Idle
from stepscope.analyze.device_losses.launches import Launches
from stepscope.analyze.device_losses.pieces import Piece
from stepscope.engine.scene import Scene


class Lost(Struct, frozen=True, dict=True):
    """The losses of a trace whose steps hold device work."""

    scene: Scene

    @cached_property
    def idle(self) -> Idle:
        return Idle(self.scene)

    @cached_property
    def launching(self) -> dict[str, Piece]:
        """By kind, as the others."""
        return dict(launches.pieces(Launches(self.idle)))

    @cached_property
    def kernels(self) -> Busy:
        return Busy(self.scene)

    @cached_property
    def working(self) -> dict[str, Piece]:
        return busy.pieces(self.kernels)

    @cached_property
    def copied(self) -> Piece:
        return copies.on_devices(self.idle)

    @cached_property
    def linear_algebra(self) -> Piece:
        return self.idle.operations.linear_algebra(self.idle.before_operations)

    @cached_property
    def data_parallel(self) -> Piece:
        return self.idle.operations.data_parallel(self.idle.before_operations)
