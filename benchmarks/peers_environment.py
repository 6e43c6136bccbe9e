"""The peers' own virtual environment: made once, used again. Standard library only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# pandas 3 refuses what HTA assigns on some traces; with 2 both peers work as released.
REQUIREMENTS = (
    "HolisticTraceAnalysis==0.5.0",
    "torch-tb-profiler==0.4.3",
    "pandas==2.3.3",
    "numpy==2.2.6",
)
PACKAGES = ("HolisticTraceAnalysis", "torch-tb-profiler", "pandas", "numpy")
MODULES = ("hta.common.trace", "torch_tb_profiler.profiler.run_generator")


def peers_python(folder: Path, given: Path | None) -> Path | None:
    """The interpreter that has the peers: `given`, or the one of an environment made in `folder`.

    None, with the reason on stderr, where they cannot be installed or imported; then only our own side is measured.
    """
    python = given if given is not None else folder / "bin" / "python"
    stamp = folder / "complete"
    if given is None and not (stamp.exists() and stamp.read_text() == "\n".join(REQUIREMENTS)):
        print(f"installing the peers into {folder}", file=sys.stderr, flush=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS]
        for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], pip):
            if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
                print("the peers could not be installed: measuring without them", file=sys.stderr)
                return None
        stamp.write_text("\n".join(REQUIREMENTS))
    check = subprocess.run(
        [str(python), "-c", "import " + ", ".join(MODULES)], capture_output=True, text=True, check=False
    )
    if check.returncode:
        reason = (check.stderr.strip().splitlines() or ["no reason given"])[-1]
        print(f"{python}: the peers cannot be imported ({reason}): measuring without them", file=sys.stderr)
        return None
    return python


def versions(python: Path) -> dict[str, str]:
    """Versions of what decides the peers' speed."""
    code = f"from importlib.metadata import version\nprint(*map(version, {PACKAGES!r}))"
    said = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout
    return dict(zip(PACKAGES, said.split(), strict=True))
