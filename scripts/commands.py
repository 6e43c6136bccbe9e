"""Print docs/commands.md: every command with its options, from the command line's own help."""

from __future__ import annotations

from stepscope.cli import COMMANDS, load

HEAD = """# Commands and options

What `stepscope COMMAND --help` prints, for every command. `--help` is an option of all of them; `stepscope --version`
prints the version. This page is made by `python scripts/commands.py`, and a test keeps it equal to the help.

Exit status: 0 success, 1 a check failed, 2 wrong usage, 3 unreadable input, 4 this machine lacks or refuses something,
130 after Ctrl-C. `run` ends with the status of the training command where that is not 0
([recording.md](recording.md#exit-status)).

"""


def page() -> str:
    index = "".join(f"| [`{name}`](#{name}) | {command.summary} |\n" for name, command in COMMANDS.items())
    text = f"{HEAD}| command | |\n|---|---|\n{index}"
    for name, command in COMMANDS.items():
        parser, examples = load(name, command), "\n".join(command.examples)
        text += f"\n## {name}\n{parser.help}\n\n```\n{examples}\n```\n\n| argument or option | |\n|---|---|\n"
        for parameter in parser.params:
            # None where the help leaves the option out: an older spelling that is still accepted
            record = parameter.get_help_record(parser.context_class(parser))
            record = record or (", ".join(parameter.opts), "An older name, still accepted.")
            names, meaning = (part.replace("|", r"\|") for part in record)
            spelled = ", ".join(f"`{each}`" for each in names.replace(" / ", ", ").split(", "))
            text += f"| {spelled} | {' '.join(meaning.split())} |\n"
    return text


if __name__ == "__main__":
    print(page(), end="")
