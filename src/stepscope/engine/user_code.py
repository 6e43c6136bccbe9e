"""Which files are the user's own code, which file a name in a trace means, and what the name of a slice says.

A file is the user's when it lies under one of the run's roots and is no installed package, standard library, torch or
this package. torch.profiler shortens names by the entries of `sys.path`, so `train.py` is looked for among the files
that other sources name in full. What the reader says (`CodeOptions`) wins. Nothing here touches the file system.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import polars as pl
from msgspec import Struct

from stepscope.engine.journal import event_data
from stepscope.read.raw import Frame
from stepscope.tables.categories import FUNCTION, STEP
from stepscope.tables.schema import Tables

# Folders of installed code. A virtual environment may lie below the project, so they win over the roots.
_INSTALLED = re.compile(r"/(site-packages|dist-packages|lib(64)?/python\d+(\.\d+)?t?)/|/lib/python\d+\.zip/")
# written by torch's inductor, wherever its cache lies: a folder of two letters and a long hash that begins with them
_GENERATED = re.compile(r"(^|/)([a-z2-7]{2})/c\2[a-z2-7]{30,}\.py$")
_NATIVE = re.compile(r"(\.(so|dylib|dll|pyd|exe)(\.\d+)*|^\?)$")  # where samplers that unwind native code find a frame
_PACKAGES = re.compile(r"^.*/(?:site-packages|dist-packages)/")
INSTALLED = re.compile(rf"{_PACKAGES.pattern}|^.*/lib(?:64)?/python\d+(?:\.\d+)?t?/")  # what names of files begin with
_RECORDER = re.compile(r"(^|/)stepscope/record/agent/")  # of whichever installation recorded the run
_OWN_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"  # this package itself


class CodeOptions(Struct, frozen=True):
    """What the user says of their code. Paths are as the trace would name them, after `maps`.

    `source_roots`: folders of the user's code, also where a name looks like a library. `maps`: (old, new) beginnings of
    paths, for traces of another machine. `libraries`: names of path components, or beginnings of paths, that are not
    the user's. `files`: source files known to lie under the roots, absolute.
    """

    source_roots: tuple[str, ...] = ()
    maps: tuple[tuple[str, str], ...] = ()
    libraries: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


NO_OPTIONS = CodeOptions()


class UserCode:
    """Answers "is this the user's?" for file names of stacks and traces; remembers its answers."""

    def __init__(
        self,
        roots: Iterable[str],
        known_files: Iterable[str],
        main_file: str | None = None,
        options: CodeOptions = NO_OPTIONS,
    ) -> None:
        """`known_files` are absolute paths other sources name; `main_file` is the started script."""
        self._chosen = tuple(_with_slash(root) for root in options.source_roots if root)
        self._roots = (*(_with_slash(root) for root in roots if root), *self._chosen)
        # the longest old beginning first: the more exact statement wins
        self._maps = tuple(sorted(options.maps, key=lambda pair: -len(pair[0])))
        known_files = tuple(known_files)
        self._libraries = tuple(name.rstrip("/") for name in options.libraries if name.strip("/"))
        self._main_folder = posixpath.dirname(main_file) if main_file else None
        self._by_name: dict[str, list[str]] = {}
        named = (_PACKAGES.sub("", path) for path in known_files if _PACKAGES.match(path))
        self._packages = {path.split("/", 1)[0] for path in named}  # installed, as other sources name them in full
        for path in sorted({self._mapped(file) for file in (*known_files, *options.files, main_file) if file}):
            if path.startswith("/") and self._below_root(path):
                self._by_name.setdefault(posixpath.basename(path), []).append(path)
        self._answers: dict[str, str | None] = {}

    def resolve(self, file: str | None) -> str | None:
        """The absolute path of a user's file, given its name in a stack or a trace; None for all other code."""
        if not file:
            return None
        if file not in self._answers:
            self._answers[file] = self._resolve(file)
        return self._answers[file]

    def library(self, file: str | None) -> str | None:
        """The short name of a file of a library outside torch and the standard library, None for all other code."""
        if not file or file.startswith("<") or self.resolve(file) is not None:
            return None
        name = _PACKAGES.sub("", file).removeprefix("./")
        name = _checkout(name) or name
        first = name.split("/", 1)[0].removesuffix(".py")
        if first in FRAMEWORKS or first in STANDARD or name.startswith(("/", "nn.Module: ")):
            return None
        return name

    def _below_root(self, path: str) -> bool:
        if path.startswith(self._chosen):
            return True
        if _INSTALLED.search(path) or path.startswith(_OWN_PACKAGE) or _RECORDER.search(path):
            return False
        return path.startswith(self._roots) if self._roots else _checkout(path) is None

    def _mapped(self, file: str) -> str:
        for old, new in self._maps:
            if file == old or file.startswith(_with_slash(old)):
                return new.rstrip("/") + file[len(old.rstrip("/")) :]
        return file

    def _resolve(self, file: str) -> str | None:
        if file.startswith("<") or _NATIVE.search(file) or _GENERATED.search(file):
            return None
        file = self._mapped(file.removeprefix("./"))
        *folders, name = file.split("/")
        parts = (*folders, name.removesuffix(".py"))
        if any(lib in parts if "/" not in lib else f"{file}/".startswith(f"{lib}/") for lib in self._libraries):
            return None
        if file.startswith(("/", *self._chosen)):
            return file if self._below_root(file) else None
        for path in self._by_name.get(posixpath.basename(file), ()):
            if path.endswith("/" + file):
                return path
        first = file.split("/", 1)[0].removesuffix(".py")
        if (
            first in LIBRARY_PARTS
            or first in self._packages
            or _INSTALLED.search("/" + file)
            or "." not in posixpath.basename(file)
        ):
            return None  # samplers name some frames of C by a type or a function
        # A guess: the folder of the started script comes first on `sys.path`.
        folder = self._main_folder or (self._roots[0].rstrip("/") if self._roots else None)
        return posixpath.join(folder, file) if folder else file


def _checkout(path: str) -> str | None:
    """The end of an absolute path from the folder of a known library on, if it lies in one; a guess."""
    if not path.startswith("/"):
        return None
    parts = path.split("/")
    # a file right in a folder of that name is as likely a script of the user's
    found = [at for at, part in enumerate(parts[:-1]) if part in CHECKOUTS]
    return "/".join(parts[found[-1] :]) if found and found[0] < len(parts) - 2 else None


TORCH_FILE = r"(^|/)(torch|torch_xla|functorch|triton)/"


def is_torch(file: pl.Expr) -> pl.Expr:
    """Whether a column of file names, full or shortened, points into torch itself."""
    return file.str.contains(TORCH_FILE)


def knows_no_tensors(file: str) -> bool:
    """Whether a file, full or shortened, is the standard library's, or of a library that calls no operator of torch."""
    parts = _PACKAGES.sub("", file).removeprefix("./").split("/")
    installed = _INSTALLED.search(file) is not None
    if (installed and not _PACKAGES.match(file)) or file.startswith("<frozen "):
        return True
    return parts[0].removesuffix(".py") in (WITHOUT_TENSORS if installed else WITHOUT_TENSORS | STANDARD)


def user_code(tables: Tables, sources: Mapping[str, str], options: CodeOptions = NO_OPTIONS) -> UserCode:
    """The run's user code, from its roots and every full name its stacks and journals hold."""
    main_file = next((rank.main_file for rank in tables.ranks if rank.main_file), None)
    return UserCode(tables.run.user_roots, [*_named_files(tables), *sources], main_file, options)


def user_files(tables: Tables, options: CodeOptions = NO_OPTIONS) -> tuple[str, ...]:
    """Files of the user's whose text would sharpen the analysis; some may not exist. Sorted, absolute paths."""
    code = user_code(tables, {}, options)
    found = {path for path in map(code.resolve, _named_files(tables)) if path}
    names = (
        tables.events.lazy()
        .filter(pl.col("category") == FUNCTION)
        .select("name")
        .unique()
        .select(pl.col("name").str.extract(r"^(.*)\(\d+\): ").alias("file"))
        .unique()
        .drop_nulls()
        .collect()["file"]
        .to_list()
    )
    for name in names:
        path = code.resolve(name)
        if path is None:
            continue
        found.add(path)
        if not name.startswith("/"):
            found.update(posixpath.join(root, name) for root in (*tables.run.user_roots, *options.source_roots))
    return tuple(sorted(path for path in found if path.startswith("/") and ".." not in path.split("/")))


def _named_files(tables: Tables) -> set[str]:
    files: set[str] = set()
    columns = [tables.frames["file"], *(tables.compiles[name] for name in ("file", "def_file", "call_file"))]
    for column in filter(len, columns):
        files.update(column.unique().drop_nulls().to_list())
    for kind in ("site", "save", "gc"):
        files.update(file for _, data in event_data(tables, kind) if isinstance(file := data.get("file"), str))
    files.update(rank.main_file for rank in tables.ranks if rank.main_file)
    return {file for file in files if file.startswith("/")}


def _with_slash(root: str) -> str:
    return root if root.endswith("/") else root + "/"


class _Packages(Struct):
    """packages.json: names of packages that are nobody's own code.

    `checkouts` are often built from one, so that they lie in a folder of their name and not among installed packages.
    Functions of those `without_tensors` call no operator of torch, also not in C, where a sampler would not see it.
    """

    frameworks: frozenset[str]
    distributions: frozenset[str]
    checkouts: frozenset[str]
    without_tensors: frozenset[str]
    formerly_standard: frozenset[str]  # of the standard library, once


_KNOWN = msgspec.json.decode(Path(__file__).with_name("packages.json").read_bytes(), type=_Packages)
FRAMEWORKS, CHECKOUTS, WITHOUT_TENSORS = _KNOWN.frameworks, _KNOWN.checkouts, _KNOWN.without_tensors
STANDARD = frozenset(sys.stdlib_module_names) | _KNOWN.formerly_standard
LIBRARY_PARTS = FRAMEWORKS | _KNOWN.distributions | STANDARD

MAX_FRAMES = 2_000  # of one recorded call stack
MODULE_CALL = "nn.Module: "  # what the names of calls of modules begin with
# The recorder's own functions are no part of the run; through its wrapper around torch's functions the caller shows.
RECORDER = re.compile(r"(^|/)stepscope/record/")
RECORDER_WRAPPER = re.compile(r"(^|/)stepscope/record/agent/(probes/)?wrapper_importlib_bootstrap\.py")
_PYTHON_NAME = re.compile(r"(.*)\((\d{1,9})\): (.*)", re.DOTALL)
# Traces of 2021 call these annotations operators.
_ANNOTATIONS = (STEP, "enumerate(DataLoader)#", "enumerate(DataPipe)#", "Optimizer.")
_OPTIMIZER_STEP = ("wrapper", "profile_hook_step")  # torch puts them around every optimizer's step
_ADDRESS = re.compile(r"( of \S+( \S+)*? object)? at 0x[0-9a-fA-F]+>?$|^<|>$")


def is_annotation(name: str) -> bool:
    """Whether a slice that an old trace calls an operator is a range that torch itself names."""
    return name.startswith(_ANNOTATIONS)


def python_frame(name: str) -> Frame | None:
    """The frame that a Python function of a trace is, or a line of a recorded call stack; None for all other slices."""
    match = _PYTHON_NAME.fullmatch(name)
    return Frame(match[3], match[1], int(match[2])) if match else None


def callee_name(name: str) -> str:
    """A name for people: `torch/nn/functional.py(3472): cross_entropy` is `cross_entropy`."""
    frame = python_frame(name)
    if frame:
        return "step" if frame.function in _OPTIMIZER_STEP and "torch/optim/" in frame.file else frame.function
    if name.startswith("<built-in"):
        words = _ADDRESS.sub("", name.removeprefix("<built-in function ").removeprefix("<built-in method "))
        return words.split(" ")[0].rstrip(">")
    if name.startswith(MODULE_CALL):
        return name.removeprefix(MODULE_CALL).rsplit("_", 1)[0]
    return name


def called_by_name(name: str) -> str:
    """What source calls a slice by; of a module, which has a name of the user's there, `nn.Module: ` and its class."""
    return MODULE_CALL * name.startswith(MODULE_CALL) + callee_name(name)


class Origin(NamedTuple):
    """A function or line found on the way up. `exact`: the line is the call's, not the definition's."""

    file: str
    function: str
    line: int | None
    exact: bool
    guess: bool


def origin_of(text: str, code: UserCode, *, exact: bool = False) -> Origin | None:
    """The user's function, or as a guess a library's outside torch; None for all others."""
    frame = python_frame(text)
    file = code.resolve(frame.file) if frame else None
    short = code.library(frame.file) if frame and file is None else None
    if frame is None or (file or short) is None:
        return None
    return Origin(file or short or "", frame.function, frame.line, exact, file is None)


def origins_of_stack(stack: str, code: UserCode) -> tuple[Origin | None, Origin | None]:
    """The innermost of the user's frames in a call stack as old traces hold it, and of a library's up to there."""
    library: Origin | None = None
    for text in stack.split(";", MAX_FRAMES)[:MAX_FRAMES]:
        found = origin_of(text.strip(), code, exact=True)
        if found is not None and not found.guess:
            return found, library
        library = library or found
    return None, library
