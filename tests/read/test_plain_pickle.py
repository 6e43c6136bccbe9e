"""The unpickler of plain data: everything plain comes back, nothing else does, and no bytes make it do worse."""

from __future__ import annotations

import collections
import math
import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import UnreadableInputError
from stepscope.read.plain_pickle import PickleLimits, RefusedPickleError, loads

PROTOCOLS = range(6)
SCALARS = st.none() | st.booleans() | st.integers(-(2**300), 2**300) | st.floats(allow_nan=False)
SCALARS |= st.text(max_size=20)
KEYS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=10)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.lists(inner, max_size=6).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=6)
        | inner.map(lambda value: [value, value, (value,)])  # shared parts go through the memo
    ),
    max_leaves=25,
)


def same(one: Any, other: Any) -> bool:
    """Equal with equal types: 1, 1.0 and True are told apart."""
    return repr(one) == repr(other)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(value=PLAIN)
@settings(max_examples=60, deadline=None)
def test_round_trip(protocol: int, value: Any):
    data = pickle.dumps(value, protocol)
    assert same(loads(data), value)
    assert same(loads(pickletools.optimize(data)), value)  # memo numbers with gaps


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_values_and_many_frames(protocol: int):
    value = {
        "text": "ä" * 200_000,
        "rows": [{"number": n, "big": -(2**40) - n, "name": f"n{n}"} for n in range(20_000)],
    }
    assert loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_parts_stay_shared(protocol: int):
    part = {"line": 3}
    many = [part] * 2_000
    ring: list[Any] = [math.nan]
    ring.append(ring)
    found = loads(pickle.dumps([many, [[n] for n in range(300)], many, part, ring], protocol) + b"behind the end")
    assert found[0] is found[2]
    assert all(item is found[3] for item in found[0])
    assert math.isnan(found[4][0])
    assert found[4][1] is found[4]


class Bomb:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_called(protocol: int, tmp_path: Path):
    data = pickle.dumps({"segments": [Bomb(tmp_path / "hit")]}, protocol)
    with pytest.raises(RefusedPickleError, match="imports or calls code"):
        loads(data)
    assert not (tmp_path / "hit").exists()
    pickle.loads(data)  # noqa: S301 - the bomb works: it is the reader that did not set it off
    assert (tmp_path / "hit").exists()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_other_objects_are_refused(protocol: int):
    others = (collections.OrderedDict(a=1), {1, 2}, frozenset({1}), bytearray(b"x"), 1j, Path("x"), len, Exception())
    for value in others:
        with pytest.raises(RefusedPickleError):
            loads(pickle.dumps(value, protocol))


ACTIVE = {
    "GLOBAL": b"cos\nsystem\n.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "REDUCE": b"\x80\x02NNR.",
    "BUILD": b"\x80\x02}}b.",
    "INST": b"(ios\nsystem\n.",
    "OBJ": b"(No.",
    "NEWOBJ": b"\x80\x02N)\x81.",
    "NEWOBJ_EX": b"\x80\x04N)}\x92.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT2": b"\x80\x02\x83\x01\x00.",
    "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "PERSID": b"Pid\n.",
    "BINPERSID": b"\x80\x02NQ.",
    "EMPTY_SET": b"\x80\x04\x8f.",
    "FROZENSET": b"\x80\x04(\x91.",
    "BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 1) + b"x.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "READONLY_BUFFER": b"\x80\x05\x97\x98.",
    "STRING": b"S'x'\n.",
    "SHORT_BINSTRING": b"U\x01x.",
}


def outcome(data: bytes) -> str | None:
    """The message of the refusal, None where the bytes were read. Any other exception is a failure of the test."""
    try:
        loads(data)
    except RefusedPickleError as error:
        return str(error)
    return None


def test_all_opcodes_are_decided_on():
    """Each opcode that Python knows is either read or refused by name; none is unknown."""
    named = ("imports or calls", "no plain data", "Python 2")
    refused = set()
    for data in ACTIVE.values():
        assert "refused" in (outcome(data) or "")
    for op in pickletools.opcodes:
        said = outcome(op.code.encode("latin-1") + b"\x00" * 12) or ""
        assert f"{ord(op.code):#04x} is no opcode" not in said, op.name
        if any(reason in said for reason in named):
            refused.add(op.name)
    assert refused == set(ACTIVE) | {"ADDITEMS", "BINSTRING"}


HOSTILE = {
    "empty": b"",
    "no end": b"\x80\x04]",
    "bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
    "text that is not there": b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"x.",
    "frame that is not there": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.",
    "huge memo number": b"\x80\x02Nr\xff\xff\xff\xff.",
    "memo number of many digits": b"Np" + b"9" * 1_900 + b"\n.",
    "negative memo number": b"Np-1\n.",
    "unset memo number": b"\x80\x02Nr\x05\x00\x00\x00h\x02.",
    "unset memo numbers": b"\x80\x02](Nr\x05\x00\x00\x00h\x02h\x02h\x02h\x02e.",
    "unset memo number as text": b"Np5\ng3\n.",
    "deep marks": b"(" * 100_000 + b"t" * 100_000 + b".",
    "huge integer": b"\x8b" + struct.pack("<i", 2**30) + b"\x00" * 64 + b".",
    "negative length": b"\x8b" + struct.pack("<i", -1) + b".",
    "integer of many digits": b"I" + b"1" * 5_000 + b"\n.",
    "long of many digits": b"L" + b"1" * 5_000 + b"L\n.",
    "tuple as key": b"\x80\x02})Ns.",
    "list as key": b"\x80\x02}]Ns.",
    "huge key": b"\x80\x02}\x8a\x20" + b"\x01" * 32 + b"Ns.",
    "odd items": b"\x80\x02}(Nu.",
    "items into a list": b"\x80\x02](NNu.",
    "append to a dict": b"\x80\x02}Na.",
    "append to nothing": b"\x80\x02Na.",
    "bad text": b"\x80\x02X\x02\x00\x00\x00\xff\xff.",
    "bad escape": b"V\\uZZZZ\n.",
    "bad float": b"Fabc\n.",
    "bad integer": b"Iabc\n.",
    "too much left": b"\x80\x02NN.",
    "open mark": b"\x80\x02(N.",
    "newer protocol": b"\x80\x06N.",
    "line without end": b"V" + b"x" * 100,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_in_one_line(name: str):
    with pytest.raises(RefusedPickleError) as caught:
        loads(HOSTILE[name])
    assert isinstance(caught.value, UnreadableInputError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", [b"]", b"}", b"N", b"h\x00", b")"])
def test_memory_is_bounded(code: bytes):
    limits = PickleLimits(memory_bytes=2_000_000)
    with pytest.raises(RefusedPickleError, match="memory"):
        loads(b"\x80\x04]\x94(" + code * 300_000 + b"e.", limits)
    with pytest.raises(RefusedPickleError, match="bytes"):
        loads(b"\x80\x04N.", PickleLimits(file_bytes=3))


def test_deep_lists_and_equal_hashes_are_no_danger():
    assert outcome(b"]" * 300_000 + b"a" * 299_999 + b".") is None
    step = 2**61 - 1  # integers that differ by it have one hash; of 64 bits there are but few of them
    keys = [number for base in range(2_000) for number in (base, base + step, base + 2 * step, base - step)]
    assert len(loads(pickle.dumps(dict.fromkeys(keys)))) == len(keys)
    with pytest.raises(RefusedPickleError):
        loads(pickle.dumps({step * factor: None for factor in range(100)}))


BASE = pickle.dumps({"segments": [{"address": 2**40 + n, "blocks": [(n, n * 0.5, None, b"x")] * 3} for n in range(40)]})


@given(
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.integers(0, 10_000) | st.none(),
)
@settings(max_examples=400, deadline=None)
def test_damaged_bytes_raise_nothing_else(changes: list[tuple[int, int]], cut: int | None):
    data = bytearray(BASE)
    for place, value in changes:
        data[place % len(data)] = value
    survives(bytes(data[:cut]))


@given(st.lists(st.sampled_from(b"(]}tlde.usa0125hjqrNK\x94\x85\x86\x87\x88\x8a)"), max_size=60))
@settings(max_examples=500, deadline=None)
def test_any_opcodes_raise_nothing_else(ops: list[int]):
    survives(bytes(ops) + b".")


def survives(data: bytes) -> None:
    assert "\n" not in (outcome(data) or "")
