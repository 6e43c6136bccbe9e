"""Files of one JSON value per line, as a writer that may be killed at any moment leaves them.

A last line without its newline that does not parse is torn: dropped and counted. Any other line that does not parse is
bad: skipped and counted. Sizes are bounded, so that no file can exhaust memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stepscope.files import open_regular
from stepscope.read.raw import Losses, Row
from stepscope.read.text import clean_value

MAX_LINE_BYTES = 8 * 2**20
MAX_FILE_BYTES = 2**30

_decoder = msgspec.json.Decoder()


def decode(text: bytes) -> Any:
    """The JSON value of `text`; raises ValueError when it is none.

    Lone surrogates and stray bytes, which a strict decoder refuses, are spelled out: command lines and paths hold them.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    try:
        return clean_value(json.loads(text.decode("utf-8", "surrogateescape"), parse_constant=lambda _: None))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_values(path: Path, losses: Losses, label: str) -> Iterator[Any]:
    """Yield the value of each line of `path`; an absent file has none. `label` names the file in `losses`."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    except OSError:
        losses.add("unreadable_files", label)
        return
    with file:
        left = MAX_FILE_BYTES
        while line := file.readline(MAX_LINE_BYTES):
            left -= len(line)
            if left < 0:
                losses.add("oversized_files", label)
                return
            ended = line.endswith(b"\n")
            if not ended and len(line) == MAX_LINE_BYTES:
                losses.add("bad_lines", label)
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                continue
            if not line.strip():
                continue
            try:
                yield decode(line)
            except ValueError:
                losses.add("bad_lines" if ended else "torn_lines", label)


def read_rows(path: Path, losses: Losses, label: str) -> list[Row]:
    """The objects of a JSON-lines file; a line that holds no object is bad."""
    rows: list[Row] = []
    for value in read_values(path, losses, label):
        if isinstance(value, dict):
            rows.append(value)
        else:
            losses.add("bad_lines", label)
    return rows


def read_object(path: Path, losses: Losses, label: str) -> Row | None:
    """The one object of a JSON file, or None when it is absent or cannot be read (counted)."""
    try:
        with open_regular(path) as file:
            value = decode(file.read(MAX_LINE_BYTES))
        if isinstance(value, dict):
            return value
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        pass
    losses.add("unreadable_files", label)
    return None
