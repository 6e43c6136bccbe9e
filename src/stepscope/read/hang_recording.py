"""Flight recorders of PyTorch and reports of NCCL's RAS: calls as columns, groups, and who answered.

A dump holds the last calls of each process group that one rank made, as JSON or as a pickle: versions 2.x of the
format, as torch and torchcomms write them. A pickle is read by the machine that knows plain data alone. Records are
checked one by one: what is none is counted and skipped. Names, signatures and stacks get numbers in lists that all
dumps share, so that a thousand ranks with the same few lines need little more than their numbers.

NCCL's RAS (`ncclras -f json`, NCCL 2.28 and newer) knows the ranks of communicators, and who is gone. NCCL 2.28.9
leaves a comma out in the list of missing ranks. Where the text is no JSON, commas are put between the end of a line and
a key on the next one, where JSON allows nothing else; what then is still none is refused.

Dumps have no ending of their own (`nccl_trace_rank_3`), so a file is known by its first bytes. One dump is kept of a
rank; what was odd about the files is said, and never keeps the others from being read.
"""

from __future__ import annotations

import contextlib
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw, Struct
from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.read.kineto import holds_traces
from stepscope.read.plain_pickle import PickleLimits, StackNumbers, loads
from stepscope.read.streams import decode_json, files_in, read_head, read_whole
from stepscope.read.text import INT64_MAX, clean, integer, moment_ns, string, whole_number, within
from stepscope.schema import RUN_PART
from stepscope.workers import main_is_guarded, usable_cores

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


MAX_CALLS = 200_000  # of one dump, the last ones; the ring holds 2,000 unless it was asked for more
MAX_RANK = 2**24
MAX_GROUP = 2**20  # ranks of a group
MAX_TENSORS = 1_024  # of a call; what is more does not tell calls apart
MAX_FRAMES = 200
MAX_DIMENSIONS = 64
MAX_NAME = 400  # characters
_SHORT = 16  # tensors
_INTEGERS = {int}
LIMITS = PickleLimits(file_bytes=2**28, memory_bytes=2**31, wanted="one that PyTorch's flight recorder wrote")
_JSON_BYTES = 2**29
_KEYS = (b'"pg_config"', b'"pg_status"', b'"profiling_name"', b'"comm_lib_version"')
_PICKLED_KEYS = (b"pg_config", b"pg_status", b"profiling_name", b"comm_lib_version", b"nccl_version")
_STATES = {"scheduled": SCHEDULED, "started": STARTED, "completed": COMPLETED}
_RANK = re.compile(r"rank[-_=. ]?(\d{1,8})(?!\d)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,8})(?:\.[A-Za-z]\w*)*$")
_RANKS = re.compile(r"\[[\d,\s]*\]")
_COLUMNS = {
    "group": "i", "sequence": "q", "p2p_sequence": "q", "kind": "i", "signature": "i", "stack": "i", "state": "b",
    "retired": "b", "p2p": "b", "created_ns": "q",
}  # fmt: skip


def is_flight_recorder(head: bytes) -> bool:
    """Whether the first (unpacked) bytes of a file are those of a dump, as JSON or as a pickle of any protocol."""
    if head.lstrip()[:1] == b"{":
        return sum(key in head for key in _KEYS) >= 2 and b'"traceEvents"' not in head
    return head[:1] in (b"\x80", b"(", b"}") and any(key in head for key in _PICKLED_KEYS)


def named_rank(path: Path) -> int | None:
    """The rank that a file's name ends with or has behind "rank", else its folder's."""
    for name in (path.name, path.parent.name):
        found = list(_RANK.finditer(name))
        if found:
            return int(found[-1][1])
        last = _LAST_NUMBER.search(name) if name == path.name else None
        if last is not None:
            return int(last[1])
    return None


class _Entry(Struct):
    """An entry of a dump as JSON; what is only compared stays as it is written."""

    profiling_name: str
    process_group: tuple[str, str]
    collective_seq_id: int = -1
    p2p_seq_id: int = -1
    is_p2p: bool | None = None
    state: str = ""
    retired: bool = False
    time_created_ns: int | None = None
    time_discovered_completed_ns: int | None = None
    record_id: int = -1
    input_sizes: Raw = Raw(b"")
    output_sizes: Raw = Raw(b"")
    input_dtypes: Raw = Raw(b"")
    output_dtypes: Raw = Raw(b"")
    frames: Raw = Raw(b"")


class _File(Struct):
    version: Any = ""
    pg_config: Any = None
    pg_status: Any = None
    entries: list[Raw] = []


_file = msgspec.json.Decoder(_File)
_entry = msgspec.json.Decoder(_Entry)


class DumpReader:
    """Reads dumps one after another into lists that all of them share. `problems` says what was odd about them."""

    def __init__(self) -> None:
        # each with its number, in the order of the numbers
        self.groups: dict[GroupName, int] = {}
        self.kinds: dict[str, int] = {}
        self.signatures: dict[Signature, int] = {}
        self.stacks: dict[tuple[Frame, ...], int] = {}
        self._kind_of: dict[str, str] = {}  # by the name of the dump
        self._ranks: dict[str, tuple[int, ...] | None] = {}
        self._same: dict[Any, int] = {}  # numbers of signatures and stacks by their JSON

    def read(self, path: Path) -> tuple[Dump, int]:
        """The dump, with the rank that its name tells or -1, and how many of its records could not be read.

        Raises UnreadableInputError where the file cannot be read or is no dump.
        """
        data = read_whole(path)
        advice = "give what torch._C._distributed_c10d._dump_fr_trace or TORCH_FR_DUMP_TEMP_FILE wrote"
        try:
            if data.lstrip()[:1] == b"{":
                version, config, status, rows = self._json(data)
            else:
                version, config, status, rows = self._plain(loads(data, LIMITS))
        except ValueError:
            raise UnreadableInputError(f"{path}: no valid JSON, perhaps cut off; {advice}") from None
        except UnreadableInputError as error:
            raise type(error)(f"{path}: {error}") from None
        columns = {name: array(code) for name, code in _COLUMNS.items()}
        add = [column.append for column in columns.values()]
        known: dict[tuple[str, str], int] = {}  # of this rank's groups
        lost, records = 0, array("q")
        for row in rows:
            if row is None:
                lost += 1
                continue
            record, name, values = row
            records.append(record)
            number = known.get(name)
            if number is None:
                told = config.get(name[0])
                ranks = self._members(told.get("ranks")) if isinstance(told, dict) else None
                made = GroupName(clean(name[0])[:MAX_NAME], clean(name[1])[:MAX_NAME], ranks)
                number = known[name] = self.groups.setdefault(made, len(self.groups))
            for append, value in zip(add, (number, *values), strict=True):
                append(value)
        calls = CallColumns(
            **{
                name: np.frombuffer(column, np.bool_ if name in ("retired", "p2p") else column.typecode)
                for name, column in columns.items()
            }
        )
        rank = named_rank(path)
        rank = -1 if rank is None or rank > MAX_RANK else rank
        begins = records[0] == 0 if records else not status
        gaps = bool(records) and records[-1] - records[0] + 1 != len(records) + lost
        return Dump(rank, path.name, version, calls, begins and not gaps and not lost, gaps), lost

    # ------------------------------------------------------------------------------------------- the two formats

    def _json(self, data: bytes) -> tuple[str, dict[str, Any], bool, Iterator[_Row | None]]:
        if len(data) > _JSON_BYTES:
            raise UnreadableInputError(f"it holds more than {_JSON_BYTES >> 20} MiB; dump a shorter ring")
        try:
            file = _file.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._plain(decode_json(data))
        rows = map(self._of_json, file.entries[-MAX_CALLS:])
        return _version(file.version), _config(file.pg_config), _has_calls(file.pg_status), rows

    def _plain(self, value: Any) -> tuple[str, dict[str, Any], bool, Iterator[_Row | None]]:
        if not isinstance(value, dict) or not ("entries" in value or "pg_status" in value or "pg_config" in value):
            raise UnreadableInputError("no dump of a flight recorder: neither entries nor groups in it")
        entries = value.get("entries")
        entries = entries[-MAX_CALLS:] if isinstance(entries, list) else []
        alive = _Alive(self)  # lists are told apart by identity, so they must stay alive
        status = _has_calls(value.get("pg_status"))
        return _version(value.get("version")), _config(value.get("pg_config")), status, map(alive.row, entries)

    def _of_json(self, raw: Raw) -> _Row | None:
        try:
            entry = _entry.decode(raw)
            given = (entry.input_sizes, entry.output_sizes, entry.input_dtypes, entry.output_dtypes)
            key, frames = tuple(map(bytes, given)), bytes(entry.frames)
            if key not in self._same:
                self._same[key] = self.signature(*(decode_json(part) if part else None for part in key))
            if frames not in self._same:
                self._same[frames] = self.stack(map(_frame, _some(decode_json(frames)))) if frames else -1
        except (ValueError, msgspec.MsgspecError, RecursionError):
            try:
                return _Alive(self).row(decode_json(bytes(raw)))
            except ValueError:
                return None
        return self._row(
            entry.record_id, entry.profiling_name, entry.process_group, entry.collective_seq_id, entry.p2p_seq_id,
            self._same[key], self._same[frames], entry.state,
            entry.retired, entry.is_p2p, entry.time_created_ns, entry.time_discovered_completed_ns,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------ what both have in common

    def _row(
        self, record: int, kind: str, group: tuple[str, str], sequence: int, p2p_sequence: int,
        signature: int, stack: int, state: str, retired: bool, p2p: bool | None,
        created_ns: int | None, completed_ns: int | None,
    ) -> _Row | None:  # fmt: skip
        if not -1 <= sequence <= INT64_MAX or not -1 <= p2p_sequence <= INT64_MAX or abs(record) > INT64_MAX:
            return None
        name = self._kind_of.get(kind)
        if name is None:
            name = self._kind_of[kind] = clean(kind.partition(":")[2] or kind)[:MAX_NAME]
        number = self.kinds.setdefault(name, len(self.kinds))
        if p2p is None:
            p2p = name.startswith(("send ", "recv "))
        reached = COMPLETED if completed_ns else _STATES.get(state, SCHEDULED)
        created = moment_ns(created_ns) or 0
        return record, group, (sequence, p2p_sequence, number, signature, stack, reached, retired, p2p, created)

    def signature(self, inputs: Any, outputs: Any, input_dtypes: Any, output_dtypes: Any) -> int:
        made = Signature(_shapes(inputs), _shapes(outputs), _dtypes(input_dtypes), _dtypes(output_dtypes))
        return self.signatures.setdefault(made, len(self.signatures))

    def stack(self, frames: Iterable[Frame | None]) -> int:
        made = tuple(frame for frame in frames if frame is not None)
        return self.stacks.setdefault(made, len(self.stacks))

    def _members(self, told: Any) -> tuple[int, ...] | None:
        """Ranks as a list, or as the text "[0, 1]" that torch writes; None where they are neither or empty."""
        if isinstance(told, list):
            told = str(told[:MAX_GROUP]) if all(type(rank) is int for rank in told[:MAX_GROUP]) else ""
        if not isinstance(told, str):
            return None
        if told not in self._ranks:
            whole = _RANKS.fullmatch(told.strip()) if len(told) <= 10 * MAX_GROUP else None
            found = tuple(int(text) for text in re.findall(r"\d{1,8}", told)) if whole else ()
            self._ranks[told] = found if found and max(found) <= MAX_RANK and len(set(found)) == len(found) else None
        return self._ranks[told]


_Row = tuple[int, tuple[str, str], tuple[int, int, int, int, int, int, bool, bool, int]]


class _Alive:
    """Entries as dicts, of a pickle or of JSON that no strict decoder takes, while all of them are alive."""

    def __init__(self, reader: DumpReader) -> None:
        self._reader = reader
        self._stacks = StackNumbers(reader.stacks, _frame, MAX_FRAMES)
        self._lists: dict[int, Any] = {}
        self._signatures: dict[Any, int] = {}

    def row(self, entry: Any) -> _Row | None:
        if type(entry) is not dict:
            return None
        get = entry.get
        kind, group = get("profiling_name"), get("process_group")
        if type(kind) is not str or (type(group) is not tuple and type(group) is not list) or len(group) != 2:
            return None
        name, description = group
        if type(name) is not str or type(description) is not str:
            return None
        record, sequence, p2p_sequence = get("record_id"), get("collective_seq_id"), get("p2p_seq_id")
        if not type(record) is type(sequence) is type(p2p_sequence) is int:
            sequence = get("seq_id") if sequence is None else sequence
            record, sequence, p2p_sequence = (
                -1 if (number := whole_number(value)) is None else number for value in (record, sequence, p2p_sequence)
            )
        parts = (get("input_sizes"), get("output_sizes"), get("input_dtypes"), get("output_dtypes"))
        key = tuple([self._key(part) for part in parts])
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._signatures[key] = self._reader.signature(*parts)
        state, p2p = get("state"), get("is_p2p")
        return self._reader._row(
            record, kind, (name, description), sequence, p2p_sequence, signature, self._stacks.number(get("frames")),
            state if type(state) is str else "", get("retired") is True, p2p if type(p2p) is bool else None,
            integer(get("time_created_ns")), integer(get("time_discovered_completed_ns")),
        )  # fmt: skip

    def _key(self, value: Any) -> Any:
        """What tells a list of sizes or types from others; a long one is looked at once."""
        if type(value) is not list:
            return None
        if len(value) == 1:  # nearly always
            (one,) = value
            if type(one) is str:
                return one
            if type(one) is list and len(one) <= _SHORT and set(map(type, one)) <= _INTEGERS:
                return (tuple(one),)
        if len(value) <= _SHORT:
            return tuple([self._inner(one) if type(one) is list else _scalar(one) for one in value])
        made = self._lists.get(id(value))
        if made is None:
            few = value[:MAX_TENSORS]
            made = self._lists[id(value)] = tuple(
                [self._inner(one) if type(one) is list else _scalar(one) for one in few]
            )
        return made

    @staticmethod
    def _inner(sizes: list[Any]) -> Any:
        return tuple([_scalar(size) for size in sizes[:MAX_DIMENSIONS]])


def _scalar(value: Any) -> Any:
    return value if type(value) in (int, str) else None


def _frame(told: Any) -> Frame | None:
    if not isinstance(told, dict):
        return None
    file, line, function = told.get("filename"), integer(told.get("line")), told.get("name")
    if not isinstance(file, str) or not isinstance(function, str):
        return None
    return Frame(clean(file)[:4_096], line if line is not None and line > 0 else None, clean(function)[:MAX_NAME])


def _some(value: Any) -> list[Any]:
    return value[:MAX_FRAMES] if isinstance(value, list) else []


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    found = (one for one in (value if isinstance(value, list) else [])[:MAX_TENSORS])
    return tuple(
        tuple(size for size in one[:MAX_DIMENSIONS] if integer(size) is not None)
        for one in found
        if isinstance(one, list)
    )


def _dtypes(value: Any) -> tuple[str, ...]:
    found = (value if isinstance(value, list) else [])[:MAX_TENSORS]
    return tuple(clean(one)[:80] for one in found if isinstance(one, str))


def _version(value: Any) -> str:
    return clean(value)[:40] if isinstance(value, str) else ""


def _config(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _has_calls(status: Any) -> bool:
    """Whether the counters of any group say that calls were made."""
    rows = status.values() if isinstance(status, dict) else ()
    told = (whole_number(row.get("last_enqueued_collective")) for row in rows if isinstance(row, dict))
    return any(number is not None and number > 0 for number in told)


MAX_RANKS = 2**20  # of all communicators together
MAX_RAS_BYTES = 2**28
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
    if len(data) > MAX_RAS_BYTES:
        raise UnreadableInputError(f"{path}: it holds more than {MAX_RAS_BYTES >> 20} MiB; {advice}")
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
        return decode_json(text)
    except ValueError:
        return decode_json(_LOST_COMMA.sub(rb"\1,", text))


def _communicator(row: Any, most: int) -> tuple[Communicator | None, int]:
    size = within(row.get("size"), MAX_RANKS) if isinstance(row, dict) else None
    if size is None:
        return None, 1
    answered, missing = (rows if isinstance(rows := row.get(key), list) else [] for key in ("ranks", "missing_ranks"))
    told = [_ras_rank(one, missing=False) for one in answered[:most]]
    told += [_ras_rank(one, missing=True) for one in missing[: max(0, most - len(told))]]
    ranks = tuple(rank for rank in told if rank is not None)
    return Communicator(clean(string(row.get("hash")) or "")[:60], size, ranks), len(answered) + len(missing) - len(
        ranks
    )


def _ras_rank(row: Any, *, missing: bool) -> RasRank | None:
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


MAX_FILES = 100_000
MAX_ALL_CALLS = 40_000_000  # of all dumps together: some 50 bytes each
MAX_SAID = 20  # problems
_WORTH_BYTES = 32 * 2**20  # read in half a second; a process more costs as much
_NUMBERED = {"groups": "group", "kinds": "kind", "signatures": "signature", "stacks": "stack"}  # lists, and columns
_OTHERS = re.compile(
    r"\.(?:pt\.trace\.json(?:\.gz)?|raw|parquet|html|csv|py|txt|log|jsonl|toml|ya?ml|times\.json)$|\.tfevents\."
)
_SAMPLED = re.compile(r"\.raw$|\.speedscope\.json$|\.tfevents\.")
_OF_A_RUN = ("tables", "reduced", "notebook", "runs")  # folders in a run folder of ours
_IN_PARTS = re.compile(r"rank[-_]?\d+$|(?:trace|flight|fr)[-_]|ras", re.IGNORECASE)
_OWN = ("report.json", "experiment.json", "manifest.json", "rank.json", "last-word.json")


def hang_files_in(paths: Iterable[Path]) -> Iterator[Path]:
    """Dumps and reports among files and in folders; of run folders of ours that lie in one, none."""
    for path in paths:
        for file in files_in(path, MAX_FILES):
            ours = file == path or not (_OTHERS.search(file.name) or file.name in _OWN)
            if ours and is_hang_file(file):
                yield file


def read_hangs(paths: Sequence[Path]) -> tuple[HangRecording | None, tuple[Path, ...]]:
    """What flight recorders and RAS left in `paths`, None where nothing, and the other paths.

    A folder is among the others where it holds no dump and no report, or traces, stacks or event files beside them.
    Raises UnreadableInputError where none of the dumps can be read.
    """
    found: list[Path] = []
    others: list[Path] = []
    for path in paths:
        own = list(hang_files_in((path,)))
        found += own
        if not own or _holds_others(path):
            others.append(path)
    return (read_hang_files(found) if found else None), tuple(others)


def hang_files_of_run(folder: Path) -> list[Path]:
    """Dumps and reports in a run folder of ours: right in it, in folders that are not ours, and in those of ranks."""
    children = sorted(folder.iterdir())
    files = [child for child in children if child.is_file() and child.name not in _OWN]
    for child in children:
        if not child.is_dir() or child.is_symlink() or child.name in _OF_A_RUN:
            continue
        if RUN_PART.fullmatch(child.name):
            files += [file for file in child.iterdir() if _IN_PARTS.search(file.name) and file.name not in _OWN]
        else:
            files += files_in(child, MAX_FILES)
    return [file for file in files[:MAX_FILES] if not _OTHERS.search(file.name) and is_hang_file(file)]


def is_hang_file(path: Path) -> bool:
    """Whether a file is a dump or a report; False for what cannot be opened or is no regular file."""
    try:
        head = read_head(path)
    except OSError:
        return False
    return is_flight_recorder(head) or is_ras_report(head)


def _holds_others(path: Path) -> bool:
    """Whether a folder with dumps in it holds traces, sampled stacks or event files as well."""
    if not path.is_dir():
        return False
    return any(_SAMPLED.search(file.name) for file in files_in(path, MAX_FILES)) or holds_traces([path])


def read_hang_files(files: Iterable[Path]) -> HangRecording:
    """All of them together, each once; what cannot be read is said. Raises UnreadableInputError where nothing can."""
    each = list({os.path.realpath(file): file for file in files}.values())
    workers = _workers(each)
    if workers < 2:
        found = _read(each)
    else:
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import get_context

        edges = [len(each) * number // workers for number in range(workers + 1)]
        batches = [each[start:end] for start, end in pairwise(edges)]
        try:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                found = _joined(list(pool.map(_read, batches)))
        except BrokenProcessPool:  # one was killed, mostly for the memory of several at once
            found = _read(each)
    if not found.dumps and not found.ras:
        raise UnreadableInputError(found.problems[0])
    problems = list(found.problems)
    dumps = _numbered(found, problems)
    ras = tuple(sorted(found.ras, key=lambda report: report.timestamp))
    more = len(problems) - MAX_SAID
    said = (*problems[:MAX_SAID], f"and {more:,} more such files") if more > 0 else tuple(problems)
    return replace(found, dumps=tuple(dumps), ras=ras, problems=said)


def _workers(files: Sequence[Path]) -> int:
    if len(files) < 2 or not main_is_guarded():
        return 1
    size = 0
    for file in files:
        with contextlib.suppress(OSError):
            size += file.stat().st_size
    return min(len(files), usable_cores()) if size >= _WORTH_BYTES else 1


def _read(files: Sequence[Path]) -> HangRecording:
    """Files one after another, as they are: several dumps of a rank are all there, and every problem is said."""
    reader, problems = DumpReader(), list[str]()
    dumps: list[Dump] = []
    reports: list[RasReport] = []
    calls = 0
    for file in files:
        try:
            if is_ras_report(read_head(file)):
                report, lost = read_ras_report(file)
                reports.append(report)
            elif calls < MAX_ALL_CALLS:
                dump, lost = reader.read(file)
                dumps.append(dump)
                calls += len(dump.calls.group)
            else:
                problems.append(f"{file.name}: left unread, as more than {MAX_ALL_CALLS:,} calls were read before")
                continue
        except UnreadableInputError as error:
            problems.append(str(error))
            continue
        except OSError as error:
            problems.append(f"{file.name}: {error.strerror or error}")
            continue
        if lost:
            problems.append(f"{file.name}: {lost:,} records could not be read")
    return HangRecording(
        dumps=tuple(dumps),
        groups=tuple(reader.groups),
        kinds=tuple(reader.kinds),
        signatures=tuple(reader.signatures),
        stacks=tuple(reader.stacks),
        ras=tuple(reports),
        problems=tuple(problems),
    )


def _joined(parts: Sequence[HangRecording]) -> HangRecording:
    """What was read side by side, as if it had been read in one go: numbers of groups and the like are made one."""
    lists: dict[str, dict[Any, int]] = {name: {} for name in _NUMBERED}
    dumps: list[Dump] = []
    calls = 0
    problems = [text for part in parts for text in part.problems]
    for part in parts:
        codes = {
            column: np.array([*(lists[name].setdefault(one, len(lists[name])) for one in getattr(part, name)), -1])
            for name, column in _NUMBERED.items()
        }
        for dump in part.dumps:
            if calls >= MAX_ALL_CALLS:
                problems.append(f"{dump.file}: left out, as more than {MAX_ALL_CALLS:,} calls were read before")
                continue
            calls += len(dump.calls.group)
            same = {column: code[getattr(dump.calls, column)].astype(np.int32) for column, code in codes.items()}
            dumps.append(replace(dump, calls=replace(dump.calls, **same)))
    return HangRecording(
        tuple(dumps),
        **{name: tuple(numbers) for name, numbers in lists.items()},
        ras=tuple(report for part in parts for report in part.ras),
        problems=tuple(problems),
    )


def _numbered(found: HangRecording, problems: list[str]) -> list[Dump]:
    """One dump for each rank, by number: of two of one rank the later one, else the one with stacks."""
    kept: dict[int, Dump] = {}
    later: list[Dump] = []
    for dump in (_honest(dump, found.groups, problems) for dump in found.dumps):
        if dump is None:
            continue
        if dump.rank < 0:
            later.append(dump)
            continue
        other = kept.get(dump.rank)
        if other is not None:
            first, second = _worth(other), _worth(dump)
            if first[0] != second[0]:
                newer = dump if second > first else other
                problems.append(
                    f"rank {dump.rank} has two dumps of different moments: {newer.file} is taken, the later one"
                )
            if second < first:
                continue
        kept[dump.rank] = dump
    free = iter(range(len(found.dumps) + len(kept)))
    for dump in later:
        rank = next(number for number in free if number not in kept)
        problems.append(f"{dump.file}: its name tells no rank; taken for rank {rank}")
        kept[rank] = replace(dump, rank=rank)
    return [kept[rank] for rank in sorted(kept)]


def _worth(dump: Dump) -> tuple[int, bool, int]:
    """What decides between two dumps of a rank: its last moment, whether it has stacks, how much it holds."""
    calls = dump.calls
    last = int(calls.created_ns.max()) if len(calls.created_ns) else 0
    return last, bool((calls.stack >= 0).any()), len(calls.group)


def _honest(dump: Dump, groups: Sequence[GroupName], problems: list[str]) -> Dump | None:
    """The dump where its groups hold the rank that the file's name tells; with the one rank that is in all of them."""
    told = [groups[group].ranks for group in np.unique(dump.calls.group)]
    members = [set(ranks) for ranks in told if ranks is not None]
    if not members or dump.rank < 0 or all(dump.rank in ranks for ranks in members):
        return dump
    common = set.intersection(*members)
    if len(common) == 1:
        rank = common.pop()
        problems.append(
            f"{dump.file}: its groups are those of rank {rank}, not of rank {dump.rank}; taken for rank {rank}"
        )
        return replace(dump, rank=rank)
    problems.append(f"{dump.file}: its groups do not hold rank {dump.rank}, which its name tells; left out")
    return None
