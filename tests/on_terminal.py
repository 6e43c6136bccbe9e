"""What a terminal shows, as text without colours."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console

from stepscope.dashboard import terminal
from stepscope.model import Report


def rendered(render: Callable[[Console], None], width: int = 100) -> str:
    stream = io.StringIO()
    plain = {"color_system": None, "highlight": False, "markup": False, "emoji": False}
    render(Console(file=stream, width=width, force_terminal=True, **plain))  # type: ignore[arg-type]
    return stream.getvalue()


def on_terminal(report: Report, width: int = 100) -> str:
    return rendered(lambda console: terminal.render(report, console), width)


def joined(report: Report) -> str:
    """The same as one line, whatever was wrapped."""
    return " ".join(on_terminal(report).split())
