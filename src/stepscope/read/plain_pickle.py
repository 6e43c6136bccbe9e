"""Pickles of plain data, read without running anything of theirs.

This machine knows only the opcodes that build dict, list, tuple, str, bytes, int, float, bool and None; every other
one, above all those that import, call or fetch, is refused. Sizes, memo numbers, nesting and memory are bounded. Keys
of dicts are scalars, because hashing nested tuples can take for ever. What comes out may hold itself.
"""

from __future__ import annotations

import io
import pickletools
import re
import struct
from collections.abc import Callable
from itertools import repeat
from typing import Any, NoReturn

import numpy as np
from msgspec import Struct

from stepscope.errors import UnreadableInputError

HIGHEST_PROTOCOL = 5
MAX_INT_BYTES = 1_024
MAX_INT_DIGITS = 2_000
MAX_LINE_BYTES = 2**24
MAX_MEMO_GAP = 1_024  # some writers leave numbers out, none more than a few
_STEPS = 8_192  # opcodes between two looks at the budget
_CONTAINER_BYTES = 96
_ITEM_BYTES = 16
_UNSET: Any = object()
_TEXTS = {str}
_KEYS = frozenset({str, int, float, bool, bytes, type(None)})
_SHORT_RUN = re.compile(rb"(?:h.){1,4096}", re.DOTALL)
_LONG_RUN = re.compile(rb"(?:j....){1,4096}", re.DOTALL)
_FLAT_DEPTH = 3  # of lists in a dict that is read at once
_FLAT_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_REFUSED = {
    **{ord(op): "imports or calls code" for op in "cRbioQP"},
    **dict.fromkeys((0x81, 0x82, 0x83, 0x84, 0x92, 0x93), "imports or calls code"),
    **dict.fromkeys(b"STU", "holds text of Python 2"),
    **dict.fromkeys((0x8F, 0x90, 0x91, 0x96, 0x97, 0x98), "builds an object that is no plain data"),
}
_ARGUMENTS: dict[int, Any] = {ord(op.code): op.arg for op in pickletools.opcodes}
_uint32 = struct.Struct("<I").unpack_from
_int32 = struct.Struct("<i").unpack_from


class _Source(io.BytesIO):
    """Bytes with lines of at most `longest`."""

    longest = MAX_LINE_BYTES

    def readline(self, _size: int | None = -1, /) -> bytes:
        return super().readline(self.longest)


class PickleLimits(Struct, frozen=True):
    """Bounds for one pickle. `memory_bytes` is an estimate of what is built, texts left out. `wanted`: what to give."""

    file_bytes: int = 2**30
    memory_bytes: int = 6 * 2**30
    nesting: int = 1_000
    wanted: str = "one that torch.cuda.memory._dump_snapshot wrote"


BOUNDS = PickleLimits()


class RefusedPickleError(UnreadableInputError):
    """The pickle is damaged, too large, or wants to do more than hold plain data."""


class _Refusal(Exception):
    """What is wrong with it."""


def loads(data: bytes, limits: PickleLimits = BOUNDS) -> Any:
    """The value that the pickle `data` (protocol 0 to 5) holds; bytes after its end are ignored.

    Raises RefusedPickleError, and nothing else, for whatever is no pickle of plain data within `limits`.
    """
    try:
        if len(data) > limits.file_bytes:
            _refuse(f"it holds {len(data)} bytes, more than {limits.file_bytes}")
        return _Machine(data, limits).run()
    except _Refusal as refusal:
        raise RefusedPickleError(f"the pickle was refused: {refusal}; give {limits.wanted}") from None
    except (IndexError, struct.error):
        raise RefusedPickleError("the pickle ends too early or is damaged; record it again") from None
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError):
        raise RefusedPickleError("the pickle is damaged; record it again") from None


def _refuse(what: str) -> NoReturn:
    raise _Refusal(what)


class _Machine:
    """The state of one reading. `stack` holds what was built since the last mark, `marked` the stacks below it."""

    def __init__(self, data: bytes, limits: PickleLimits) -> None:
        self.data = data
        self.source = _Source(data)
        self.limits = limits
        self.position = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: list[Any] = []
        self.gaps = False  # some memo numbers were left out
        self.containers = 0
        self.items = 0

    def run(self) -> Any:
        ended = False
        while not ended:
            ended = self._some()
            held = len(self.stack) + sum(map(len, self.marked)) + len(self.memo) + self.items
            if self.containers * _CONTAINER_BYTES + held * _ITEM_BYTES > self.limits.memory_bytes:
                _refuse(f"it needs more than {self.limits.memory_bytes} bytes of memory")
        if self.marked or len(self.stack) != 1:
            _refuse("it ends with open marks or left-over values")
        return self.stack[0]

    def _some(self) -> bool:
        """Take some steps; True when the end was reached. What a snapshot is made of is done right here, for speed."""
        data, stack, memo = self.data, self.stack, self.memo
        position = self.position
        for _ in repeat(None, _STEPS):
            op = data[position]
            position += 1
            if op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                numbers, position = self._numbers(op, position)
                stack.extend([memo[number] for number in numbers])
            elif op == 0x4B:  # BININT1
                stack.append(data[position])
                position += 1
            elif op == 0x8A:  # LONG1
                end = position + 1 + data[position]
                stack.append(int.from_bytes(data[position + 1 : end], "little", signed=True))
                position = end  # beyond the end of the data the next step fails
            elif op == 0x7D:  # EMPTY_DICT
                value, end = self._flat_dict(position)
                stack.append(value)
                if end:
                    position = end
                else:
                    self.containers += 1
            elif op == 0x4A:  # BININT
                stack.append(_int32(data, position)[0])
                position += 4
            elif op == 0x2E:  # STOP
                return True
            else:
                self.position = position
                action = _ACTIONS.get(op)
                if action is None:
                    _refuse(_REFUSED.get(op, f"{op:#04x} is no opcode of a pickle"))
                action(self, None if _ARGUMENTS[op] is None else self._argument(op))
                stack, position = self.stack, self.position
        self.position = position
        return False

    def _flat_dict(self, start: int) -> tuple[dict[Any, Any], int]:
        """The dict whose EMPTY_DICT ends before `start`, and where its SETITEMS ends; (an empty one, 0) for most kinds.

        What dumps hold a million of, read without a stack: texts as keys, and as values what `_flat` reads. At anything
        else it is as if nothing had been read.
        """
        data, memo, begun = self.data, self.memo, len(self.memo)
        found: dict[Any, Any] = {}
        position = self._memoized(found, start)
        if position < 0 or self.gaps or data[position] != 0x28:  # MARK
            del memo[begun:]
            return {}, 0
        position += 1
        flat, before = self._flat, None
        while (op := data[position]) != 0x75:  # SETITEMS
            if op == 0x68:  # BINGET
                key = memo[data[position + 1]]
                position += 2
            else:
                key, position = flat(position, 0)
            if type(key) is not str or position < 0:
                break
            op = data[position]
            if op == 0x68:  # BINGET
                found[key] = memo[data[position + 1]]
                position += 2
            elif op == 0x4B:  # BININT1
                found[key] = data[position + 1]
                position += 2
            elif op == 0x4D:  # BININT2
                found[key] = data[position + 1] | data[position + 2] << 8
                position += 3
            elif op in _FLAT_CONSTANTS:
                found[key] = _FLAT_CONSTANTS[op]
                position += 1
            elif op == 0x86 and before is not None:  # TUPLE2: what looked like a key was its second part
                found[before] = value = (found[before], key)
                self.containers += 1
                position = self._memoized(value, position + 1)
                if position < 0:
                    break
                continue
            else:
                found[key], position = flat(position, 0)
                if position < 0:
                    break
            before = key
        else:
            self.containers += 1
            self.items += 2 * len(found)
            return found, position + 1
        del memo[begun:]
        return {}, 0

    def _flat(self, position: int, depth: int) -> tuple[Any, int]:
        """A scalar, text or list of such from `position` on, and where it ends, -1 where it is of another kind."""
        data = self.data
        op = data[position]
        if op == 0x4B:  # BININT1
            return data[position + 1], position + 2
        if op == 0x4D:  # BININT2
            return data[position + 1] | data[position + 2] << 8, position + 3
        if op == 0x5D and depth < _FLAT_DEPTH:  # EMPTY_LIST
            return self._flat_list(position + 1, depth + 1)
        if op in _FLAT_CONSTANTS:
            return _FLAT_CONSTANTS[op], position + 1
        if op == 0x4A:  # BININT
            return _int32(data, position + 1)[0], position + 5
        if op == 0x8A:  # LONG1
            end = position + 2 + data[position + 1]
            return int.from_bytes(data[position + 2 : end], "little", signed=True), end
        if op == 0x6A:  # LONG_BINGET
            return self.memo[_uint32(data, position + 1)[0]], position + 5
        if op == 0x58 or op == 0x8C:  # BINUNICODE, SHORT_BINUNICODE
            begin = position + (5 if op == 0x58 else 2)
            end = begin + (_uint32(data, position + 1)[0] if op == 0x58 else data[position + 1])
            if end > len(data):
                return None, -1
            text = str(data[begin:end], "utf-8", "surrogatepass")
            return text, self._memoized(text, end)
        return None, -1

    def _flat_list(self, position: int, depth: int) -> tuple[list[Any], int]:
        """A list, as `_flat`."""
        data, memo = self.data, self.memo
        found: list[Any] = []
        op = data[position]
        if op == 0x72 and _uint32(data, position + 1)[0] == len(memo):  # LONG_BINPUT
            memo.append(found)
            position += 5
        elif op != 0x28 and (position := self._memoized(found, position)) < 0:
            return found, -1
        several = data[position] == 0x28  # MARK
        position += several
        while (op := data[position]) != 0x65:  # APPENDS
            if several and op == 0x68 and data[position + 2] == 0x68:  # BINGET, some
                run = _SHORT_RUN.match(data, position)
                if run is None:
                    return found, -1
                found += [memo[number] for number in data[position + 1 : run.end() : 2]]
                position = run.end()
                continue
            if op == 0x68:
                found.append(memo[data[position + 1]])
                position += 2
            elif op == 0x4D:  # BININT2
                found.append(data[position + 1] | data[position + 2] << 8)
                position += 3
            else:
                item, position = self._flat(position, depth)
                found.append(item)
                if position < 0:
                    return found, -1
            if not several:
                if data[position] != 0x61:  # APPEND
                    return found, -1
                break
        self.containers += 1
        self.items += len(found)
        return found, position + 1

    def _memoized(self, value: Any, position: int) -> int:
        """Where what stands at `position` goes on behind the opcode that memoizes `value`, if there is one; else -1."""
        op = self.data[position]
        if op == 0x94:  # MEMOIZE
            self.memo.append(value)
            return position + 1
        if op == 0x71 or op == 0x72:  # BINPUT, LONG_BINPUT
            if (self.data[position + 1] if op == 0x71 else _uint32(self.data, position + 1)[0]) != len(self.memo):
                return -1
            self.memo.append(value)
            return position + (2 if op == 0x71 else 5)
        return position

    def _numbers(self, op: int, position: int) -> tuple[bytes | list[int], int]:
        """The memo numbers read one after another from `position` on (most of a snapshot), and where they end."""
        data = self.data
        if op == 0x68:
            run = _SHORT_RUN.match(data, position - 1)
            end = run.end() if run else len(data) + 1
            numbers: bytes | list[int] = data[position:end:2]
        elif data[position + 4] != 0x6A:
            end = position + 4
            numbers = [_uint32(data, position)[0]]
        else:
            run = _LONG_RUN.match(data, position - 1)
            end = run.end() if run else len(data) + 1
            cells = np.frombuffer(data, np.uint8, (end - position + 1) // 5 * 5, position - 1).reshape(-1, 5)
            numbers = cells[:, 1:].copy().view("<u4").ravel().tolist()
        if self.gaps and any(self.memo[number] is _UNSET for number in numbers):
            raise KeyError
        return numbers, end

    def mark(self, _: None) -> None:
        self.marked.append(self.stack)
        self.stack = []
        if len(self.marked) > self.limits.nesting:
            _refuse(f"it is nested more than {self.limits.nesting} times")

    def to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marked.pop()
        return items

    def last(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def _argument(self, op: int) -> Any:
        argument, source = _ARGUMENTS[op], self.source
        if op == 0x8B and _int32(self.data, self.position)[0] > MAX_INT_BYTES:
            _refuse("an integer is too long")
        source.longest = MAX_INT_DIGITS if argument.name.startswith("decimal") else MAX_LINE_BYTES
        source.seek(self.position)
        value = argument.reader(source)
        self.position = source.tell()
        return value

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def add(self, container: Any) -> None:
        self.stack.append(container)
        self.containers += 1
        self.items += len(container)

    def set_items(self, items: list[Any], *, new: bool = False) -> None:
        if new:
            self.add({})
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError
        keys = items[::2]
        kinds = set(map(type, keys))
        if not kinds <= _KEYS:
            _refuse("a dict has a key that is no scalar")
        if kinds != _TEXTS and any(type(key) is int and not -(2**63) <= key < 2**64 for key in keys):
            _refuse("a dict has a key over 64 bits")
        target.update(zip(keys, items[1::2], strict=True))
        self.items += len(items)

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(items)
        self.items += len(items)

    def proto(self, number: int) -> None:
        if number > HIGHEST_PROTOCOL:
            _refuse(f"its protocol is newer than {HIGHEST_PROTOCOL}")

    def frame(self, size: int) -> None:
        if size > len(self.data) - self.position:
            raise IndexError

    def pop(self, _: None) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.stack = self.marked.pop()

    def put(self, number: int) -> None:
        memo = self.memo
        if not 0 <= number <= len(memo) + MAX_MEMO_GAP:
            _refuse(f"memo number {number} is out of order")
        self.gaps |= number > len(memo)
        memo.extend(repeat(_UNSET, number + 1 - len(memo)))
        memo[number] = self.stack[-1]

    def get(self, number: int) -> None:
        value = self.memo[number] if number >= 0 else _UNSET
        if value is _UNSET:
            raise KeyError
        self.stack.append(value)


_ACTIONS: dict[int, Callable[[_Machine, Any], Any]] = {
    **dict.fromkeys(b"GFILM\x8bX\x8c\x8dVCB\x8e", _Machine.push),  # numbers, texts and bytes
    0x80: _Machine.proto,
    0x95: _Machine.frame,
    ord("("): _Machine.mark,
    ord("N"): lambda m, _: m.push(None),
    0x88: lambda m, _: m.push(True),
    0x89: lambda m, _: m.push(False),
    ord(")"): lambda m, _: m.add(()),
    0x85: lambda m, _: m.add(tuple(m.last(1))),
    0x86: lambda m, _: m.add(tuple(m.last(2))),
    0x87: lambda m, _: m.add(tuple(m.last(3))),
    ord("t"): lambda m, _: m.add(tuple(m.to_mark())),
    ord("]"): lambda m, _: m.add([]),
    ord("l"): lambda m, _: m.add(m.to_mark()),
    ord("a"): lambda m, _: m.extend(m.last(1)),
    ord("e"): lambda m, _: m.extend(m.to_mark()),
    ord("d"): lambda m, _: m.set_items(m.to_mark(), new=True),
    ord("s"): lambda m, _: m.set_items(m.last(2)),
    ord("u"): lambda m, _: m.set_items(m.to_mark()),
    ord("0"): _Machine.pop,
    ord("1"): lambda m, _: m.to_mark(),
    ord("2"): lambda m, _: m.push(m.stack[-1]),
    **dict.fromkeys(b"qrp", _Machine.put),
    ord("g"): _Machine.get,
}


class StackNumbers:
    """Numbers for equal stacks of what was read, in `stacks`; `frame_of` makes a frame, None of what is none.

    Frames and lists are told apart by identity, which is why they must stay alive.
    """

    def __init__(self, stacks: dict[Any, int], frame_of: Callable[[Any], Any], most_frames: int) -> None:
        self.stacks = stacks
        self._frame_of, self._most = frame_of, most_frames
        self._numbers: dict[Any, int] = {}  # by the identity of a list, and by those of its frames
        self._frames: dict[int, Any] = {}

    def number(self, frames: Any) -> int:
        """The number of a list of frames, -1 where it holds none."""
        if type(frames) is not list or not frames:
            return -1
        number = self._numbers.get(id(frames))
        if number is None:
            key = tuple(map(id, frames[: self._most]))
            number = self._numbers.get(key)
            if number is None:
                known = self._frames
                new = {one: frame for one, frame in zip(key, frames, strict=False) if one not in known}
                known.update((one, self._frame_of(frame)) for one, frame in new.items())
                made = tuple(known[one] for one in key if known[one] is not None)
                number = self._numbers[key] = self.stacks.setdefault(made, len(self.stacks)) if made else -1
            self._numbers[id(frames)] = number
        return number
