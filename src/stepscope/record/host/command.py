"""What the command line starts: the executable, the Python interpreter, the script, and the user's own folders.

Everything is found by looking at argv and the file system; nothing is imported or run.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import StepscopeError

PYTHON = re.compile(r"(?:python|pypy)(?:\d+(?:\.\d+)*)?(?:t|d)?")
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh"}
_LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch", "horovodrun"}
_LAUNCHER_MODULES = _LAUNCHERS | {"accelerate.commands.launch", "accelerate.commands.accelerate_cli"}
_PYTHON_OPTIONS_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}
_INSTALLED = frozenset(("site-packages", "dist-packages"))
_SYSTEM = ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin")


class CommandNotStarted(StepscopeError):
    """The command could not be started; `exit_code` is what a shell gives: 127 not found, 126 not executable."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Script:
    """What runs: `kind` is script, module or other; `path` the file (a module's `__main__.py` or its own file)."""

    kind: str
    path: Path | None
    label: str
    python: str | None


def resolve_executable(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The file a shell would start for `command[0]`. Raises `CommandNotStarted` with its exit status."""
    name = command[0]
    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    if found is not None:
        return found
    if os.sep in name and os.path.isdir(name):
        raise CommandNotStarted(f"{name} is a folder; give the command to run after --", 126)
    if os.sep in name and os.path.exists(name):
        raise CommandNotStarted(f"{name} is not executable; make it so with chmod +x, or start it with python", 126)
    raise CommandNotStarted(f"{name}: command not found; check its spelling and PATH", 127)


def find_script(command: Sequence[str], environ: Mapping[str, str], cwd: Path) -> Script:
    """The script or module behind `command`, through `env`, `nice`, launchers and shells where they show."""
    search = _search_path(environ, cwd)
    for index, word in enumerate(command):
        base, rest = os.path.basename(word), command[index + 1 :]
        if base in _SHELLS:
            return _after_shell(base, rest, cwd)
        is_python, is_launcher = PYTHON.fullmatch(base), base in _LAUNCHERS
        path = shutil.which(word, path=environ.get("PATH")) if is_python or is_launcher or not index else None
        if is_python:
            return _after_python(rest, search, cwd, path)
        if is_launcher:
            return _after_launcher(base, rest, search, cwd, _shebang(path))
        if path:
            interpreter = os.path.basename(_shebang(path) or "")  # of a script started by its own first line
            if PYTHON.fullmatch(interpreter) or interpreter in _SHELLS:
                kind = "script" if path.endswith(".py") else "other"
                python = _shebang(path) if PYTHON.fullmatch(interpreter) else None
                return Script(kind, Path(path).absolute(), Path(path).stem, python)
    return Script("other", None, os.path.basename(command[0]), None)


def first_argument(command: Sequence[str], environ: Mapping[str, str], cwd: Path) -> int:
    """Where in `command` the arguments of its script begin; after the program where no script shows."""
    search = _search_path(environ, cwd)
    script = find_script(command, environ, cwd)
    for index, word in enumerate(command):
        if index and word in ("-c", "-m", "--module") and index + 1 < len(command):
            module = None if word == "-c" else find_module(command[index + 1], search)
            if script.path is None or module == script.path:
                return index + 2
        elif script.path is not None and _absolute(word, cwd) == script.path:
            return index + 1
    return 1


def _search_path(environ: Mapping[str, str], cwd: Path) -> list[Path]:
    return [cwd, *(cwd / part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part)]


def _after_python(rest: Sequence[str], search: Sequence[Path], cwd: Path, python: str | None) -> Script:
    index = 0
    while index < len(rest):
        word = rest[index]
        if word.startswith("-m"):
            module = word[2:] or (rest[index + 1] if index + 1 < len(rest) else "")
            after = rest[index + (1 if word[2:] else 2) :]
            if module in _LAUNCHER_MODULES:
                return _after_launcher(module, after, search, cwd, python)
            return Script("module", find_module(module, search), module.rpartition(".")[2] or "module", python)
        if word.startswith("-c") or word == "-":
            return Script("other", None, "python", python)
        if not word.startswith("-"):
            return Script("script", _absolute(word, cwd), Path(word).stem, python)
        index += 2 if word in _PYTHON_OPTIONS_WITH_VALUE else 1
    return Script("other", None, "python", python)


def _after_launcher(name: str, rest: Sequence[str], search: Sequence[Path], cwd: Path, python: str | None) -> Script:
    """Launchers have dozens of options; the training script is the first word that is an existing Python file."""
    for word in rest:
        if not word.startswith("-") and word.endswith(".py") and (cwd / word).is_file():
            return Script("script", _absolute(word, cwd), Path(word).stem, python)
    if "-m" in rest or "--module" in rest:
        for word in rest:
            if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", word) and (path := find_module(word, search)) is not None:
                return Script("module", path, word.rpartition(".")[2], python)
    return Script("other", None, name.rpartition(".")[2], python)


def _after_shell(shell: str, rest: Sequence[str], cwd: Path) -> Script:
    for word in rest:
        if re.fullmatch(r"-\w*c\w*", word):
            break
        if not word.startswith("-") and (cwd / word).is_file():
            return Script("other", _absolute(word, cwd), Path(word).stem, None)
    return Script("other", None, shell, None)


def find_module(name: str, search: Sequence[Path]) -> Path | None:
    """The file `python -m name` would run, looked for in `search` only."""
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        return None
    parts = name.split(".")
    for folder in search:
        base = folder.joinpath(*parts)
        for candidate in (base / "__main__.py", base.with_suffix(".py")):
            if candidate.is_file():
                return Path(os.path.abspath(candidate))
    return None


def _absolute(word: str, cwd: Path) -> Path:
    return Path(os.path.abspath(cwd / word))


def _shebang(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            line = file.read(512).split(b"\n", 1)[0]
    except OSError:
        return None
    if not line.startswith(b"#!"):
        return None
    words = line[2:].decode("utf-8", "replace").split()
    if words and os.path.basename(words[0]) == "env":
        names = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        return shutil.which(names[0]) or names[0] if names else None
    return words[0] if words else None


def user_roots(script: Script, cwd: Path, git_root: Path | None) -> list[str]:
    """Folders whose files are the user's own: the script's, the working directory, and its git root.

    A module's folder is its top-level package. Never the file system's root, an installed package's folder or the
    standard library: those would turn every library frame into the user's.
    """
    folders = [cwd, git_root]
    if script.path is not None and (script.kind != "other" or script.path.suffix in (".sh", ".bash", ".slurm", "")):
        own = script.path.parent
        while script.kind == "module" and (own.parent / "__init__.py").is_file() and own.parent != own:
            own = own.parent
        folders.insert(0, own)
    others = {"/", *_SYSTEM, sysconfig.get_path("scripts"), sysconfig.get_path("stdlib")}
    found = (
        folder for folder in folders if folder is not None and not any(part in _INSTALLED for part in folder.parts)
    )
    return list(dict.fromkeys(str(folder) for folder in found if str(folder) not in others))
