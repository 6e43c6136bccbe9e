"""How much of making batches is opening and reading files, and how many files an item takes.

A data set of many small files pays for each of them: looking up the name, opening, reading a header. Stacks say which
part of the loading stands there; a window counts the files, where the training process opens them itself.
"""

from __future__ import annotations

import re

import polars as pl

from stepscope.engine.host_calls import BUILTIN, Window
from stepscope.engine.samples import short
from stepscope.engine.source_lines import Lines
from stepscope.model.run_facts import FileReads

# Files of libraries in which everything is about bringing a file in. Decoding what was read is not: PIL opens and reads
# a picture's header in `open`, and decodes it elsewhere.
_FILES = (
    r"(^|/)(pathlib(/\w+)?|genericpath|posixpath|ntpath|os|io|_pyio|codecs|glob|zipfile(/__init__)?|tarfile|shutil|"
    r"torch/serialization|numpy/lib/(_?npyio\w*|_?format\w*)|h5py/_hl/\w+|safetensors/\w+|lmdb/\w+|fsspec/.+|s3fs/.+)\.py$"
)
_OPENERS = ("open", "imread", "read_image", "read_file", "read_bytes", "read_text", "loadtxt", "load_file", "safe_open")
_TEXT = re.compile(
    r"\b(open|imread|read_image|read_file|loadtxt|fromfile|memmap|listdir|scandir|stat|exists|isfile|getsize)\(|"
    r"\bnp\.load\(|\.(read|read_bytes|read_text|readline|readlines)\("
)
_OPEN = re.compile(r"^<built-in (function|method) (open|io_open|open_code)\b|^<built-in function (open|io_open)>")


def facts(loading: pl.DataFrame, lines: Lines, opened_per_step: float | None, batch: int | None) -> FileReads | None:
    """None without samples of loading.

    Args:
        loading: picked stacks (see `sampled.picks`) of threads that make batches.
        opened_per_step: files the training process opened below its loader, by the window.
        batch: items of a step, None if unknown.
    """
    total = int(loading["samples"].sum()) if loading.height else 0
    if not total:
        return None
    below, leaf = short(pl.col("below_function")), short(pl.col("leaf_function"))
    by_name = (
        below.is_in(_OPENERS)
        | (leaf.is_in(_OPENERS) & pl.col("below_function").is_not_null())
        | pl.col("below_file").fill_null("").str.contains(_FILES)
        | pl.col("leaf_file").fill_null("").str.contains(_FILES)
    ).fill_null(False)
    alone = loading.filter(pl.col("below_function").is_null() & pl.col("user_file").is_not_null())
    texts = [
        (file, line, True)
        for file, line in alone.select("user_file", "user_line").unique().rows()
        if _TEXT.search(lines.text(file, line) or "")
    ]
    named = pl.DataFrame(
        texts, schema={"user_file": pl.String, "user_line": pl.Int64, "by_text": pl.Boolean}, orient="row"
    )
    marked = loading.join(named, on=["user_file", "user_line"], how="left").with_columns(
        reads=by_name | (pl.col("below_function").is_null() & pl.col("by_text").fill_null(False))
    )
    share = int(marked.filter("reads")["samples"].sum()) / total
    known = opened_per_step is not None and bool(batch)
    return FileReads(
        share=share,
        samples=total,
        files_per_item=opened_per_step / batch if known and opened_per_step is not None and batch else None,
    )


def opened_per_step(window: Window | None) -> float | None:
    """Files opened below the loader per step of the window; None where it recorded no Python functions."""
    if window is None or not window.has_functions or not window.step_times_known:
        return None
    among = ((part, (part.what == BUILTIN) & part.in_loader & part.inside) for part in window.parts)
    opens = (part.named(lambda name: _OPEN.search(name) is not None, own).sum() for part, own in among)
    return float(sum(opens)) / window.steps
