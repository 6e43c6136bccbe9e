"""The git state of the folder a run starts in, read without taking any lock there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

_TIMEOUT_SECONDS = 2.0  # a huge or remote repository must not hold up the manifest


def git_root(folder: Path) -> Path | None:
    """The nearest parent that holds `.git` (a folder, or a file in a worktree); asks the file system, not git."""
    for parent in (folder, *folder.parents):
        if (parent / ".git").exists():
            return parent
    return None


def git_state(root: Path | None) -> dict[str, Any] | None:
    """`{"root", "commit", "branch", "dirty"}`; a part is None when git cannot tell within two seconds."""
    if root is None:
        return None
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    return {
        "root": str(root),
        "commit": _git(root, "rev-parse", "--verify", "HEAD"),
        "branch": None if branch == "HEAD" else branch,
        "dirty": None if status is None else bool(status),
    }


def _git(root: Path, *arguments: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None
