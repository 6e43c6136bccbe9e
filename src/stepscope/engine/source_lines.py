"""From a function to the line in it: by sampled stacks where they saw it, else by the syntax tree of its source.

A trace names a function by the line its definition starts on; a finding has to name the line that makes the call.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache, cached_property

import polars as pl
from msgspec import Struct

from stepscope.engine.samples import Samples, short

MAX_SOURCE_BYTES = 4_000_000  # a larger file is generated; parsing it would take minutes
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_COMPREHENSION_NAMES = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_LOOPS = (ast.For, ast.AsyncFor, ast.While, *_COMPREHENSIONS)
_Loop = ast.For | ast.AsyncFor | ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
# Operators of torch that a line calls without naming them.
_SIGNS: dict[str, tuple[type[ast.AST], ...]] = {
    "matmul": (ast.MatMult,),
    "mul": (ast.Mult,),
    "add": (ast.Add,),
    "sub": (ast.Sub,),
    "div": (ast.Div,),
    "floor_divide": (ast.FloorDiv,),
    "remainder": (ast.Mod,),
    "pow": (ast.Pow,),
    "neg": (ast.USub,),
    "bitwise_and": (ast.BitAnd,),
    "bitwise_or": (ast.BitOr,),
    "bitwise_not": (ast.Invert,),
    "eq": (ast.Eq,),
    "ne": (ast.NotEq,),
    "lt": (ast.Lt,),
    "le": (ast.LtE,),
    "gt": (ast.Gt,),
    "ge": (ast.GtE,),
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class CallSite(Struct, frozen=True):
    """A line that makes a call, the loop around it if the source was at hand, and how the line was found."""

    line: int
    loop_line: int | None
    loop_end: int | None
    method: str


class Lines:
    """Finds the exact line of a call. `sources` maps absolute paths to their text; files not in it are not parsed."""

    def __init__(self, samples: Samples | None, sources: Mapping[str, str]) -> None:
        self._samples = samples
        self._sources = sources
        self._tree = cache(self._parsed)
        self._function = cache(self._find_function)
        self.only_line = cache(self._only_line)  # the same few calls are asked about slice by slice

    def call_site(self, file: str, function: str, def_line: int | None, callee: str, *, loop: bool) -> CallSite | None:
        """The line in `function` of `file` that calls `callee`; with `loop` one inside a loop is preferred.

        Args:
            def_line: the line the function's definition (or its first decorator) starts on, None if unknown.
            callee: the bare name called; an operator may be given as `aten::select`.
        """
        scope = self._function(file, function, def_line)
        name = callee.removeprefix("aten::")
        found = _calls(scope, name, loop=loop)
        sampled = self._sampled_line(file, function, name, [line for line, _ in found])
        if sampled is not None:
            inside = next((loop for line, loop in found if line == sampled and loop is not None), None)
            around: _Loop | None = None
            for node in _loops(scope):
                if inside is None and node.lineno <= sampled <= (node.end_lineno or node.lineno):
                    around = node
            return CallSite(sampled, *_span(inside or around), "sampled stacks")
        if found:
            line, inside = found[0]
            return CallSite(line, *_span(inside), "syntax of the source")
        only = _loops(scope) if loop else []
        if len(only) == 1:
            body = only[0].body if isinstance(only[0], ast.For | ast.AsyncFor | ast.While) else only
            return CallSite(body[0].lineno, *_span(only[0]), "the only loop of the function")
        return None

    def _only_line(self, file: str, function: str, def_line: int | None, callee: str) -> int | None:
        """The line in `function` that calls `callee`, None where it is not the only one or cannot be found.

        The arguments are those of `call_site`; an operator may also stand for its sign: `aten::mul` for `*`.
        """
        scope = self._function(file, function, def_line)
        name = callee.removeprefix("aten::")
        found = {line for line, _ in _calls(scope, name, loop=False)}
        if callee != name:
            found |= _signs(scope, name.rstrip("_"))
        calls = self._calls_sampled
        if not found and calls is not None:
            here = (pl.col("user_file") == file) & (pl.col("name") == function) & (pl.col("callee") == name)
            found = set(calls.filter(here & pl.col("line").is_not_null())["line"].to_list())
        return found.pop() if len(found) == 1 else None

    def definition(self, file: str, function: str, line: int | None) -> int | None:
        """The line that `function` begins on, where `line` lies in it; None where its source is not at hand.

        Of a function that ran before a recording began, traces give the line it was at, which made none of the calls.
        """
        scope = self._function(file, function, line)
        return _first_line(scope) if isinstance(scope, _FUNCTIONS) else None

    def text(self, file: str, line: int | None) -> str | None:
        if line is None or file not in self._sources:
            return None
        lines = self._sources[file].splitlines()
        return lines[line - 1].strip() if 0 < line <= len(lines) else None

    @cached_property
    def _calls_sampled(self) -> pl.DataFrame | None:
        """(user_file, function, line, callee, n): which line called what, in the steady main threads of ranks."""
        if self._samples is None:
            return None
        keep = self._samples.rank_steps().select("row", "samples")
        frames = self._samples.frames.join(keep, on="row").sort("row", "position")
        following = pl.col("function").shift(-1).over("row")
        return (
            frames.with_columns(short(following).alias("callee"), short(pl.col("function")).alias("name"))
            .filter(pl.col("user_file").is_not_null())
            .group_by("user_file", "name", "line", "callee")
            .agg(n=pl.col("samples").sum())
            .sort("n", "line", descending=[True, False])
        )

    def _sampled_line(self, file: str, function: str, name: str, candidates: list[int]) -> int | None:
        """The line sampled most with `name` next on the stack, or, for an operator, sampled on its own line."""
        calls = self._calls_sampled
        if calls is None:
            return None
        own = calls.filter((pl.col("user_file") == file) & (pl.col("name") == function))
        exact = own.filter(pl.col("callee") == name)
        if exact.height:
            return int(exact["line"][0])
        if candidates:
            own = own.filter(pl.col("line").is_in(candidates))
            return int(own["line"][0]) if own.height else None
        return None

    def _find_function(self, file: str, function: str, def_line: int | None) -> ast.AST | None:
        tree = self._tree(file)
        if tree is None:
            return None
        if function == "<module>":
            return tree
        best: ast.AST | None = None
        # of a function that ran before the recording began, traces give the line it was at
        around: ast.AST | None = None
        for node in ast.walk(tree):
            if isinstance(node, _FUNCTIONS):
                name = node.name if not isinstance(node, ast.Lambda) else "<lambda>"
                first = _first_line(node)
                if name != function:
                    continue
                if def_line is None or first <= def_line <= node.lineno:
                    best = best or node
                elif node.lineno < def_line <= (node.end_lineno or node.lineno):
                    around = node
            elif isinstance(node, _COMPREHENSIONS) and function in _COMPREHENSION_NAMES and node.lineno == def_line:
                best = best or node
        return best or around

    def _parsed(self, file: str) -> ast.Module | None:
        text = self._sources.get(file)
        if text is None or len(text) > MAX_SOURCE_BYTES:
            return None
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    """As Python counts: of the first decorator, if there is one."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _walk(scope: ast.AST | None) -> list[tuple[ast.AST, _Loop | None]]:
    """Nodes of a function in order of the text, without functions defined in it; with each the innermost loop."""
    found: list[tuple[ast.AST, _Loop | None]] = []
    stack: list[tuple[ast.AST, _Loop | None]] = [(scope, None)] if scope is not None else []
    while stack:
        node, loop = stack.pop()
        found.append((node, loop))
        inside = node if isinstance(node, _LOOPS) else loop
        children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, _FUNCTIONS)]
        stack.extend((child, inside) for child in reversed(children))
    return found


def _loops(scope: ast.AST | None) -> list[_Loop]:
    return [node for node, _ in _walk(scope) if isinstance(node, _LOOPS)]


def _calls(scope: ast.AST | None, name: str, *, loop: bool) -> list[tuple[int, _Loop | None]]:
    found: list[tuple[int, _Loop | None]] = []
    for node, inside in _walk(scope):
        called = node.func if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or name not in (getattr(called, "attr", None), getattr(called, "id", None)):
            continue
        # the line Python reports: of a method call over several lines, the attribute's
        line = called.end_lineno if isinstance(called, ast.Attribute) else None
        found.append((line or node.lineno, inside))
    if loop:
        found.sort(key=lambda pair: pair[1] is None)
    return found


def _signs(scope: ast.AST | None, operator: str) -> set[int]:
    wanted = _SIGNS.get(operator, ())
    found: set[int] = set()
    for node, _ in _walk(scope):
        signs = node.ops if isinstance(node, ast.Compare) else [getattr(node, "op", None)]
        if any(isinstance(sign, wanted) for sign in signs):
            found.add(int(getattr(node, "lineno", 0)))
    return found


def _span(loop: _Loop | None) -> tuple[int | None, int | None]:
    return (loop.lineno, loop.end_lineno) if loop is not None else (None, None)
