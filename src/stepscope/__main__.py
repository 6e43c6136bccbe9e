"""`python -m stepscope`: the command line."""

from __future__ import annotations

from stepscope.cli import process

if __name__ == "__main__":
    process()
