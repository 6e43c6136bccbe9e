"""What windows may cost: a share of the run's time and a number of bytes. Pure bookkeeping, integer nanoseconds."""

from __future__ import annotations

# Measured: a recorded event takes about a third of the memory that it takes as JSON.
JSON_BYTES_PER_BYTE = 3
MEMORY_NOISE_BYTES = 64_000_000  # what a training process gains or frees between steps anyway


class Budget:
    """Time and bytes of all windows of a process. The first window may always be opened."""

    def __init__(self, *, began_ns: int, time_share: float, byte_budget: int) -> None:
        self.time_share = time_share
        self.byte_budget = byte_budget
        self.bytes = 0  # of the traces kept
        self.spent_ns = 0
        self.last_cost_ns = 0
        self._began_ns = began_ns
        self._opened = 0

    @property
    def bytes_left(self) -> int:
        """Bytes further traces may take."""
        return self.byte_budget - self.bytes

    def opened(self) -> None:
        """A window was opened."""
        self._opened += 1

    def charge(self, cost_ns: int) -> None:
        """A window cost so much: its calls, and how much longer its steps took than usual."""
        self.last_cost_ns = cost_ns
        self.spent_ns += cost_ns

    def affords_time(self, now_ns: int) -> bool:
        """Whether another window like the last one would stay within the share of the time run so far."""
        if not self._opened:
            return True
        return self.spent_ns + self.last_cost_ns <= self.time_share * (now_ns - self._began_ns)

    def over_time(self) -> str:
        """The reason to give when `affords_time` is False."""
        return f"another window would exceed {100 * self.time_share:.3g} % of the run's time"

    def fits(self, size: int) -> bool:
        """Whether a trace of `size` bytes may be kept."""
        return size <= self.bytes_left

    def steps_left(self, size: int, steps: int) -> int:
        """How many steps the bytes left will hold, going by a trace of `size` bytes over `steps` steps."""
        return max(0, self.bytes_left) * steps // max(1, size)

    def outgrown_by(self, grown_bytes: int) -> bool:
        """Whether a recording that made the process grow by so much will take too many bytes as JSON."""
        return (grown_bytes - MEMORY_NOISE_BYTES) * JSON_BYTES_PER_BYTE > self.bytes_left
