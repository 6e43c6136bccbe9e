"""What is read of flight recorders of PyTorch and of NCCL's RAS: calls as columns, groups, and who answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

SCHEDULED, STARTED, COMPLETED = range(3)  # what a dump says of a call
STATES = ("scheduled", "started", "completed")


class Frame(Struct, frozen=True):
    """A frame of the stack of a call, as the dump names it."""

    file: str
    line: int | None
    function: str


class Signature(Struct, frozen=True):
    """What a call was given: shapes of tensors, and their types as torch calls them."""

    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()


class GroupName(Struct, frozen=True):
    """A process group as one rank's dump has it: `ranks` in the order of the group, None where the dump is silent."""

    name: str
    description: str
    ranks: tuple[int, ...] | None


class CallColumns(Struct, frozen=True):
    """The calls of one dump, in the order in which they were made: n numbers in each column.

    `group`, `kind`, `signature` and `stack` are positions in the lists of the recording, -1 where nothing tells them.
    `sequence` counts the collective calls of a group, `p2p_sequence` a rank's own sends and receives in it. `state` is
    of STATES; `retired` calls are over for their rank, with or without success. `created_ns` is 0 where unknown.
    """

    group: npt.NDArray[np.int32]
    sequence: npt.NDArray[np.int64]
    p2p_sequence: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int32]
    signature: npt.NDArray[np.int32]
    stack: npt.NDArray[np.int32]
    state: npt.NDArray[np.int8]
    retired: npt.NDArray[np.bool_]
    p2p: npt.NDArray[np.bool_]
    created_ns: npt.NDArray[np.int64]


class Dump(Struct, frozen=True):
    """The flight recorder of one rank.

    `whole`: it holds every call that the rank made. `gaps`: calls that were over have been left out.
    """

    rank: int
    file: str
    version: str
    calls: CallColumns
    whole: bool
    gaps: bool = False


class RasRank(Struct, frozen=True):
    """A rank of a communicator as NCCL's RAS saw it; `counts` by operation, None of one that did not answer."""

    rank: int  # in the communicator
    host: str
    pid: int
    device: int
    counts: Mapping[str, int] | None = None
    unresponsive: bool = False
    dead: bool = False
    error: int = 0
    ending: bool = False  # finalize, destroy or abort was called


class Communicator(Struct, frozen=True):
    """A communicator of NCCL: `size` ranks, of which `ranks` are told."""

    hash: str
    size: int
    ranks: tuple[RasRank, ...]


class RasReport(Struct, frozen=True):
    """What `ncclras -f json` told once; `timestamp` as it wrote it, which sorts by time."""

    file: str
    version: str
    timestamp: str
    communicators: tuple[Communicator, ...]


class HangRecording(Struct, frozen=True):
    """All that was read of flight recorders and RAS: dumps in the order of ranks, and what was odd about the files."""

    dumps: tuple[Dump, ...]
    groups: Sequence[GroupName] = ()
    kinds: Sequence[str] = ()
    signatures: Sequence[Signature] = ()
    stacks: Sequence[tuple[Frame, ...]] = ()  # innermost first
    ras: tuple[RasReport, ...] = ()  # the newest last
    problems: tuple[str, ...] = ()
