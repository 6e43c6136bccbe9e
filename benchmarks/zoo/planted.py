"""Where the planted line of a script lies, and whether a place that was named is it. Standard library only."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

MARKER = "# planted"
NEXT_TO = 1  # lines: a decorator and its `def`, or the two ends of a call, are told differently by different recorders
LOOP_BODY = "watch.step("  # what the training loop of every script contains
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Planted:
    """The lines of the planted statement, and its function, None where that holds the training loop."""

    file: Path
    first_line: int
    last_line: int
    function: str | None

    def is_named_by(self, file: str, line: int | None, function: str | None) -> bool:
        """Whether a place is the planted statement (give or take a line) or lies in its function."""
        named = Path(file)
        if named.name != self.file.name or (named.is_absolute() and named.resolve() != self.file.resolve()):
            return False
        if line is not None and self.first_line - NEXT_TO <= line <= self.last_line + NEXT_TO:
            return True
        return self.function is not None and function is not None and function.split(".")[-1] == self.function


def find(script: Path) -> Planted:
    """The one planted statement of `script`; ValueError where there is none, or more than one."""
    text = script.read_text()
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.rstrip().endswith(MARKER)]
    if len(marked) != 1:
        raise ValueError(f"{script}: one line must end with '{MARKER}', {len(marked)} do")
    tree = ast.parse(text)
    # Of `for x in y: ...` the loop, not its parts; of a statement that ends on the marked line, all its lines.
    held = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _holds(node, marked[0])]
    statement = max(held, key=_first_line, default=None)
    if statement is None:
        raise ValueError(f"{script}: no statement on line {marked[0]}")
    function = statement if isinstance(statement, Function) else _function_around(held)
    name = None if function is None or LOOP_BODY in (ast.get_source_segment(text, function) or "") else function.name
    return Planted(script, _first_line(statement), statement.end_lineno or marked[0], name)


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, Function | ast.ClassDef) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _holds(node: ast.stmt, line: int) -> bool:
    return _first_line(node) <= line <= (node.end_lineno or node.lineno)


def _function_around(statements: list[ast.stmt]) -> Function | None:
    """The innermost function among statements that hold one line."""
    functions = [node for node in statements if isinstance(node, Function)]
    return max(functions, key=_first_line, default=None)
