"""Print docs/commands.md: every command with its options, from the command line's own help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepscope.cli import COMMANDS, Command, load

HEAD = """# Commands and options

What `stepscope COMMAND --help` prints, for every command. `--help` is an option of all of them; `stepscope --version`
prints the version. This page is made by `python -m stepscope.cli.reference`, and a test keeps it equal to the help.

Exit status: 0 success, 1 a check failed, 2 wrong usage, 3 unreadable input, 4 this machine lacks or refuses something,
130 after Ctrl-C. `run` ends with the status of the training command where that is not 0
([recording.md](recording.md#exit-status)).

"""


def page() -> str:
    """The whole page."""
    index = "".join(f"| [`{name}`](#{name}) | {command.summary} |\n" for name, command in COMMANDS.items())
    return f"{HEAD}| command | |\n|---|---|\n{index}" + "".join(_section(*item) for item in COMMANDS.items())


def _section(name: str, command: Command) -> str:
    parser = load(name, command)
    examples = "\n".join(command.examples)
    rows = "".join(f"| {names} | {meaning} |\n" for names, meaning in _rows(parser))
    return f"\n## {name}\n{parser.help}\n\n```\n{examples}\n```\n\n| argument or option | |\n|---|---|\n{rows}"


def _rows(parser: Any) -> Iterator[tuple[str, str]]:
    context = parser.context_class(parser)
    for parameter in parser.params:
        # None where the help leaves the option out: an older spelling that is still accepted
        record = parameter.get_help_record(context) or (", ".join(parameter.opts), "An older name, still accepted.")
        names, meaning = (text.replace("|", r"\|") for text in record)
        yield ", ".join(f"`{name}`" for name in names.replace(" / ", ", ").split(", ")), " ".join(meaning.split())


if __name__ == "__main__":
    print(page(), end="")
