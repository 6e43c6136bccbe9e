"""An allocator as PyTorch's, in miniature: it writes snapshots in the documented format and knows the truth of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ROUND = 512
SEGMENT = 2 * 2**20
START_US = 1_700_000_000_000_000
FILE = "/home/me/project/train.py"

Frame = dict[str, Any]


def stack(line: int) -> list[Frame]:
    """Innermost first, as in a snapshot: C++, torch, the user's line, its caller."""
    return [
        {"filename": "/build/c10/cuda/CUDACachingAllocator.cpp", "line": 0, "name": "malloc"},
        {"filename": "/env/lib/python3.11/site-packages/torch/nn/functional.py", "line": 10, "name": "linear"},
        {"filename": FILE, "line": line, "name": "forward"},
        {"filename": FILE, "line": 1, "name": "<module>"},
    ]


@dataclass
class Block:
    address: int
    size: int
    requested: int
    line: int
    recorded: bool  # allocated while the history was on
    state: str = "active_allocated"


@dataclass
class Moment:
    """What stands after an event of the history."""

    time_us: int
    allocated: int
    reserved: int
    by_line: dict[int, int]  # of what was allocated while recording
    before: int


@dataclass
class Allocator:
    """`history` switches the recording of events on; `moments` begins with what stood when it was."""

    times: bool = True
    now_us: int = START_US
    blocks: dict[int, Block] = field(default_factory=dict)
    segments: list[int] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    history: bool = False

    def record(self) -> None:
        self.history = True
        self.moments.append(self._moment())

    def allocate(self, requested: int, line: int) -> int:
        size = -(-requested // ROUND) * ROUND
        address = self._free_address(size)
        if address is None:
            self.segments.append(0x7F0000000000 + len(self.segments) * SEGMENT)
            address = self.segments[-1]
            self._event("segment_alloc", address, SEGMENT, line)
        self.blocks[address] = Block(address, size, requested, line, self.history)
        self._event("alloc", address, requested, line)
        return address

    def free(self, address: int, *, pending: bool = False) -> None:
        block = self.blocks[address]
        if pending:
            block.state = "active_pending_free"
        else:
            del self.blocks[address]
        self._event("free_requested", address, block.requested, block.line)
        if not pending:
            self._event("free_completed", address, block.requested, block.line)

    def out_of_memory(self, requested: int, device_free: int, line: int) -> None:
        self._event("oom", None, requested, line, device_free=device_free)

    def snapshot(self, device: int = 0) -> dict[str, Any]:
        traces: list[list[dict[str, Any]]] = [[] for _ in range(device)]
        return {
            "segments": [self._segment(address, device) for address in self.segments],
            "device_traces": [*traces, self.events],
            "allocator_settings": {"max_split_size": -1, "expandable_segments": False},
        }

    def in_use(self) -> list[Block]:
        return [block for block in self.blocks.values() if block.state == "active_allocated"]

    def _free_address(self, size: int) -> int | None:
        for segment in self.segments:
            at = segment
            for block in sorted(self.blocks.values(), key=lambda block: block.address):
                if segment <= block.address < segment + SEGMENT:
                    if block.address - at >= size:
                        return at
                    at = block.address + block.size
            if segment + SEGMENT - at >= size:
                return at
        return None

    def _event(self, action: str, address: int | None, size: int, line: int, **more: Any) -> None:
        self.now_us += 10
        if not self.history:
            return
        event = {"action": action, "size": size, "stream": 0, "frames": stack(line), **more}
        if address is not None:
            event["addr"] = address
        if self.times:
            event["time_us"] = self.now_us
        self.events.append(event)
        self.moments.append(self._moment())

    def _moment(self) -> Moment:
        by_line: dict[int, int] = {}
        before = 0
        for block in self.in_use():
            if block.recorded:
                by_line[block.line] = by_line.get(block.line, 0) + block.requested
            else:
                before += block.requested
        return Moment(self.now_us, before + sum(by_line.values()), len(self.segments) * SEGMENT, by_line, before)

    def _segment(self, address: int, device: int) -> dict[str, Any]:
        own = sorted(
            (block for block in self.blocks.values() if address <= block.address < address + SEGMENT),
            key=lambda block: block.address,
        )
        blocks: list[dict[str, Any]] = []
        at = address
        for block in own:
            if block.address > at:
                blocks.append(_free_block(at, block.address - at))
            known = {"address": block.address, "size": block.size, "requested_size": block.requested}
            blocks.append({**known, "state": block.state, "frames": stack(block.line)})
            at = block.address + block.size
        if at < address + SEGMENT:
            blocks.append(_free_block(at, address + SEGMENT - at))
        head = {"device": device, "address": address, "total_size": SEGMENT, "stream": 0}
        return {**head, "frames": [], "blocks": blocks}


def _free_block(address: int, size: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
