"""What NCCL's RAS knows of a job (`ncclras -f json`, NCCL 2.28 and newer): ranks of communicators, and who is gone.

NCCL 2.28.9 leaves a comma out in the list of missing ranks. Where the text is no JSON, commas are put between the end
of a line and a key on the next one, where JSON allows nothing else; what then is still none is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from stepscope.errors import UnreadableInputError
from stepscope.read.hang_recording import Communicator, RasRank, RasReport
from stepscope.read.jsonl import decode
from stepscope.read.streams import read_whole
from stepscope.read.text import clean, integer, string, within

MAX_RANKS = 2**20  # of all communicators together
MAX_BYTES = 2**28
MAX_OPERATIONS = 64
_LOST_COMMA = re.compile(rb'((?:\d|"|[}\]]|true|false|null)[ \t]*\r?\n[ \t]*)(?="[A-Za-z_]+"[ \t]*:)')
_START = re.compile(rb"\s*(?:[A-Z][^\n{]{0,200}\n){0,8}\s*(?=\{)")  # the service answers each command with a line


def is_ras_report(head: bytes) -> bool:
    """Whether the first (unpacked) bytes of a file are those of a report of RAS as JSON."""
    return _START.match(head) is not None and b'"nccl_version"' in head and b'"communicators' in head


def read_ras_report(path: Path) -> tuple[RasReport, int]:
    """The report, and how many ranks in it could not be read.

    Raises UnreadableInputError where the file cannot be read or is no such report.
    """
    data = read_whole(path)
    advice = "write one with `ncclras -f json` of NCCL 2.28 or newer"
    if len(data) > MAX_BYTES:
        raise UnreadableInputError(f"{path}: it holds more than {MAX_BYTES >> 20} MiB; {advice}")
    start = _START.match(data)
    text = data[start.end() :] if start else data
    try:
        value = _decoded(text)
    except ValueError:
        raise UnreadableInputError(f"{path}: no valid JSON, perhaps cut off; {advice}") from None
    told = value.get("communicators") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(told, list):
        raise UnreadableInputError(f"{path}: no report of NCCL's RAS; {advice}")
    found: list[Communicator] = []
    lost = left = 0
    for row in told:
        communicator, broken = _communicator(row, MAX_RANKS - left)
        lost += broken
        if communicator is not None:
            found.append(communicator)
            left += len(communicator.ranks)
    version, timestamp = (clean(string(value.get(key)) or "")[:60] for key in ("nccl_version", "timestamp"))
    return RasReport(path.name, version, timestamp, tuple(found)), lost


def _decoded(text: bytes) -> Any:
    try:
        return decode(text)
    except ValueError:
        return decode(_LOST_COMMA.sub(rb"\1,", text))


def _communicator(row: Any, most: int) -> tuple[Communicator | None, int]:
    size = within(row.get("size"), MAX_RANKS) if isinstance(row, dict) else None
    if size is None:
        return None, 1
    answered, missing = (rows if isinstance(rows := row.get(key), list) else [] for key in ("ranks", "missing_ranks"))
    told = [_rank(one, missing=False) for one in answered[:most]]
    told += [_rank(one, missing=True) for one in missing[: max(0, most - len(told))]]
    ranks = tuple(rank for rank in told if rank is not None)
    return Communicator(clean(string(row.get("hash")) or "")[:60], size, ranks), len(answered) + len(missing) - len(
        ranks
    )


def _rank(row: Any, *, missing: bool) -> RasRank | None:
    number = within(row.get("rank"), MAX_RANKS) if isinstance(row, dict) else None
    if number is None:
        return None
    device = integer(row.get("cuda_dev"))
    status = row.get("status") if isinstance(row.get("status"), dict) else {}
    counts = row.get("collective_counts")
    given = list(counts.items())[:MAX_OPERATIONS] if isinstance(counts, dict) else []
    made = {clean(name)[:60]: count for name, one in given if (count := within(one, 2**63 - 1)) is not None}
    return RasRank(
        rank=number,
        host=clean(string(row.get("host")) or "")[:200],
        pid=integer(row.get("pid")) or -1,
        device=-1 if device is None else device,
        counts=None if missing else made,
        unresponsive=status.get("unresponsive") is True,
        dead=status.get("considered_dead") is True,
        error=integer(status.get("async_error")) or 0,
        ending=any(status.get(key) is True for key in ("finalize_called", "destroy_flag", "abort_flag")),
    )
