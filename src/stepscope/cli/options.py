"""Option types that several commands share, so that one name means one thing everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is stdout.")]
HtmlFile = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Write the report as a page; - is stdout.")
]
NoSource = Annotated[bool, typer.Option("--no-source", help="Quote no line of source text anywhere.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing of ours.")]
