"""Ways to damage bytes, lines of text and JSON values, each drawn from a generator of random numbers."""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 0.1, -5.5, 1e15, 1e18, -1e18, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1),
    *(10**40, 10**400, "", "x", "\ud800", "\udfff a", "</script><script>alert(1)</script>", "../../../etc/passwd"),
    *("\x1b[2J\x1b]0;x\x07", "\x00", "a\nb", "a" * 5000, "=1+1", "[bold]x[/bold]", "\u202e\u2066", "é" * 50),
    *("NaN", "-5", "1e9", "12345678901234567890123", "cpu_op", "kernel", "gpu_memcpy", "python_function"),
    *("ProfilerStep#99999999999999999999", "ProfilerStep#-3", "ProfilerStep#1", "Memcpy DtoH (Device -> Pageable)"),
    *("M", "X", "i", "s", "f", "C", "train", "eval", "window", "site", "sources", [], {}, [[]], [1, 2], {"a": 1}),
)
NUMBERS = (
    *(b"-1", b"0", b"9" * 26, b"1e400", b"nan", b"inf", b"", b"1.5", b"-0", b"9223372036854775808", b"0x10"),
    *(b"\xd9\xa3", b"1" * 5000),
)
TAILS = (
    *(b";;;", b"\x00", b"\x1b[31m", b" (", b") 5", b";a (b:c)", b"\r", b"\xe2\x80\xa8"),
    b";" + b";".join([b"f (x.py:1)"] * 2000) + b" 3",
)
BITS = (
    *(b"\xff" * 8, b"\0" * 8, b"9" * 30, b"\xed\xa0\x80", b'"', b"{", b"]", b"\n", b"\xef\xbb\xbf", b"\xc0\x80"),
    *(b"\x1f\x8b", b"\xff\xfe", b" " * 100),
)
FEW_OR_MANY = (1, 1, 1, 2, 4, 20)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")


def of_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with some of its parts exchanged, doubled, removed or shuffled; it may be changed in place."""
    if rng.random() < 0.03:
        return rng.choice(ODD)
    for _ in range(rng.choice(FEW_OR_MANY)):
        _change(value, rng)
    if rng.random() < 0.25:
        _everywhere(value, rng)
    return value


def dumped(value: Any, rng: random.Random) -> bytes:
    """JSON text, now and then with something nested deeply."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.6)
    if rng.random() < 0.03:
        text = text.replace("}", ', "deep":' + "[" * rng.choice((100, 5000, 200_000)) + "}", 1)
    return text.encode("utf-8", "surrogatepass")


def of_json_lines(data: bytes, rng: random.Random) -> bytes:
    """Lines of JSON with some values damaged, or one column in all of them."""
    lines = data.split(b"\n")
    for _ in range(rng.choice(FEW_OR_MANY)):
        at = rng.randrange(len(lines))
        if lines[at].strip():
            lines[at] = dumped(of_value(_value(lines[at]), rng), rng)
    if rng.random() < 0.3:
        odd, key = rng.choice(ODD), None
        for at, line in enumerate(lines):
            value = _value(line)
            if isinstance(value, (dict, list)) and value:
                keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
                key = rng.choice(keys) if key is None else key
                if key in keys:
                    value[key] = odd
                    lines[at] = dumped(value, rng)
    return b"\n".join(lines)


def of_lines(data: bytes, rng: random.Random) -> bytes:
    """Text with lines removed, doubled, shuffled, and odd numbers in them."""
    lines = data.split(b"\n") if data.count(b"\n") > 2 else data.replace(b"}, {", b"},\n{").split(b"\n")
    for _ in range(rng.choice(FEW_OR_MANY)):
        at, way = rng.randrange(len(lines)), rng.randrange(7)
        if way == 0 and len(lines) > 1:
            del lines[at]
        elif way == 1:
            lines.insert(at, rng.choice(lines))
        elif way == 2:
            rng.shuffle(lines)
        elif way == 3:
            lines[at] = of_bytes(lines[at], rng)
        elif way == 4:
            lines[at] += rng.choice(TAILS)
        elif numbers := list(_NUMBER.finditer(lines[at])):
            found = rng.choice(numbers)
            lines[at] = lines[at][: found.start()] + rng.choice(NUMBERS) + lines[at][found.end() :]
    return b"\n".join(lines)


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, repeated, put in."""
    found = bytearray(data)
    for _ in range(rng.choice(FEW_OR_MANY)):
        if not found:
            break
        at, way = rng.randrange(len(found)), rng.randrange(7)
        if way == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif way == 1 and rng.random() < 0.3:
            del found[at:]
        elif way == 2:
            del found[at : at + rng.choice((1, 5, 100, 2000))]
        elif way == 3:
            found[at:at] = rng.randbytes(rng.choice((1, 4, 50)))
        elif way == 4:
            found[at:at] = found[at : at + rng.choice((1, 20, 1000))]
        elif way == 5:
            found[at : at + 8] = rng.choice(BITS)
        else:
            found[:0] = rng.choice(BITS)
    return bytes(found)


def packed(data: bytes, rng: random.Random) -> bytes:
    """As gzip: whole, cut, damaged, in two members, with a tail, twice, or not at all."""
    way = rng.randrange(7)
    half = rng.randrange(len(data) + 1)
    whole = gzip.compress(data)
    if way == 1:
        return whole[: rng.randrange(len(whole))]
    if way == 2:
        return of_bytes(whole, rng)
    ways = {3: gzip.compress(data[:half]) + gzip.compress(data[half:]), 4: whole + b"\0" * 512, 6: data}
    return gzip.compress(whole) if way == 5 else ways.get(way, whole)


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _change(value: Any, rng: random.Random) -> None:
    found = _place(value, rng)
    if found is None:
        return
    holder, key = found
    way = rng.random()
    if way < 0.55:
        holder[key] = copy.deepcopy(rng.choice(ODD))
    elif way < 0.65:
        del holder[key]
    elif way < 0.75 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(rng.choice(holder)))
    elif way < 0.82 and isinstance(holder[key], (int, float)):
        holder[key] = -holder[key]
    elif way < 0.88 and isinstance(holder[key], float):
        holder[key] *= rng.choice((1e3, 1e9, 1e-9))
    elif way < 0.92:
        holder[key] = str(holder[key])
    elif isinstance(holder, dict):
        holder[rng.choice(list(holder))] = holder[key]
    else:
        rng.shuffle(holder)


def _place(value: Any, rng: random.Random) -> tuple[Any, Any] | None:
    """A random part of a value: what holds it, and where."""
    found = None
    for _ in range(12):
        if isinstance(value, dict) and value:
            key: Any = rng.choice(list(value))
        elif isinstance(value, list) and value:
            key = rng.randrange(len(value))
        else:
            break
        found = (value, key)
        value = value[key]
        if rng.random() < 0.12:
            break
    return found


def _everywhere(value: Any, rng: random.Random) -> None:
    """One key of all events, or of all their arguments, becomes the same odd value."""
    events = value.get("traceEvents", value.get("profiles")) if isinstance(value, dict) else value
    rows = [row for row in events if isinstance(row, dict)] if isinstance(events, list) else []
    if rows and rng.random() < 0.5:
        rows = [row["args"] for row in rows if isinstance(row.get("args"), dict)]
    keys = sorted({str(key) for row in rows for key in row})
    if keys:
        key, odd, share = rng.choice(keys), rng.choice(ODD), rng.choice((0.1, 0.5, 1))
        for row in rows:
            if key in row and rng.random() < share:
                row[key] = odd
