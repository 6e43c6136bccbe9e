"""From a function to the line in it: by sampled stacks where they saw it, else by the syntax tree of its source.

A trace names a function by the line its definition starts on; a finding has to name the line that makes the call.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import polars as pl
from msgspec import Struct

from stepscope.engine.samples import Samples, short
from stepscope.engine.user_code import LIBRARY_PARTS, MODULE_CALL

MODULE_BODY = "<module>"  # what traces call the code of a file outside of its functions
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
    "eq": (ast.Eq, ast.In, ast.NotIn),
    "ne": (ast.NotEq,),
    "lt": (ast.Lt,),
    "le": (ast.LtE,),
    "gt": (ast.Gt,),
    "ge": (ast.GtE,),
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# What may leave out a part of itself.
_CHOICES = (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.Match, ast.Compare, ast.Assert)
# Methods that give back the module they are called on; these and other methods of modules, which hide a module of their
# name, and of tensors and optimizers, what no layer is called.
_SAME = "to cuda cpu xpu half float double bfloat16 eval train type requires_grad_ share_memory apply"
_OTHERS = (
    "forward zero_grad parameters named_parameters buffers named_buffers modules named_modules children named_children "
    "state_dict load_state_dict register_buffer step backward detach item clone size dim numel view reshape contiguous "
    "append items keys values update unscale_"
)
_SELF_RETURNING = frozenset(_SAME.split())
_NO_LAYERS = _SELF_RETURNING | frozenset(_OTHERS.split())
_BREAKS = (ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await)  # after them a loop may begin anew
_SPACES = ("linalg", "fft", "special")  # of torch: what `torch.linalg.qr` calls is named `linalg_qr`
_CALLING = ("map", "filter")  # built-in names whose calls call modules and functions
_KEEPING = ("append", "appendleft", "extend", "insert", "update", "push", "put")  # methods that keep what they get


MANY = 64  # calls of a function that is asked about: more are a loop's, whose number says no more


class Call(NamedTuple):
    """A call that a function made in a trace, and what tells the line of it.

    `name` is the bare name called; that of an operator may be `aten::select`, that of a module `nn.Module: Linear`.
    In the same run of the function it is number `turn` (from 0) of `turns` calls of the name, a module's of any
    module, and one of `repeats` of the same slice name; `modules` are different modules called. No number is more than
    `MANY`; 0 `turns` are not known. `others` are all names that the function called, with how often it did in one run
    at most.
    """

    name: str
    turn: int = 0
    turns: int = 0
    repeats: int = 0
    modules: int = 0
    others: frozenset[tuple[str, int]] = frozenset()


class CallSite(Struct, frozen=True):
    """A line that makes a call, the loop around it if the source was at hand, and how the line was found.

    `carried` is what the call takes that was made of what it gave in the loop's iteration before: `state`, `self.h`.
    """

    line: int
    loop_line: int | None
    loop_end: int | None
    carried: str | None
    method: str


class Lines:
    """Finds the exact line of a call. `sources` maps absolute paths to their text; files not in it are not parsed."""

    def __init__(self, samples: Samples | None, sources: Mapping[str, str]) -> None:
        self._samples = samples
        self._sources = sources
        self.tree = cache(self._parsed)
        self._names = cache(lambda file: _Names(self.tree(file)))
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
        known = self._names(file)
        # what was made of a class goes by a name of its own: the line that calls the class makes it
        found = _calls(scope, lambda node: known.calls(node, name) and not _is_call(node, name), loop=loop)
        found = found or _calls(scope, lambda node: _is_call(node, name), loop=loop)
        if name != callee:
            found = found or _calls(scope, lambda node: _is_sign(node, name), loop=loop)
        lines = [line for line, _ in found]
        if loop and not found:  # an assignment to an item names nothing: the busiest line of the loops
            lines = [line for node in _loops(scope) for line in range(node.lineno, (node.end_lineno or 0) + 1)]
        sampled = self._sampled_line(file, function, name, lines)
        if sampled is not None:
            inside = next((loop for line, loop in found if line == sampled and loop is not None), None)
            around: _Loop | None = None
            for node in _loops(scope):
                if inside is None and node.lineno <= sampled <= (node.end_lineno or node.lineno):
                    around = node
            return CallSite(sampled, *_span(inside or around, sampled, name), "sampled stacks")
        if found:
            line, inside = found[0]
            return CallSite(line, *_span(inside, line, name), "syntax of the source")
        only = _loops(scope) if loop else []
        if len(only) == 1:
            body = only[0].body if isinstance(only[0], ast.For | ast.AsyncFor | ast.While) else only
            line = body[0].lineno
            return CallSite(line, *_span(only[0], line, name), "the only loop of the function")
        return None

    def _only_line(self, file: str, function: str, def_line: int | None, call: Call) -> int | None:
        """The line in `function` that makes a call, None where several might or none is found.

        The arguments are else those of `call_site`; an operator may also stand for its sign: `aten::mul` for `*`.
        """
        scope, known = self._function(file, function, def_line), self._names(file)
        if scope is None:
            return None
        is_module = call.name.startswith(MODULE_CALL)
        sites, plain = (_module_sites if is_module else _function_sites)(scope, known, call)
        at = None if def_line is None or _begins(scope, def_line) else def_line
        sites = sites if at is None else _still_ahead(scope, sites, at)
        outside = [site for site in sites if site.loop is None]
        if len(outside) < call.turns:
            sites = _staying(scope, sites)
            outside = [site for site in sites if site.loop is None]
        if len(outside) == len(sites) < call.turns:
            return None  # something else makes such calls too
        if len({site.line for site in sites}) > 1:
            line = _in_order(scope, sites, call, at) if plain or len(outside) == len(sites) else None
            if line is not None or not is_module:
                return line
            # a module goes by one name in a function: none whose lines make fewer calls than there were of it
            lines = Counter(_key(site.called) for site in outside)
            lines.update({_key(site.called): MANY for site in sites if site.loop is not None})
            sites = [site for site in sites if not _key(site.called) or lines[_key(site.called)] >= call.repeats]
            sites = known.made_of(sites, call.name.removeprefix(MODULE_CALL))
        return sites[0].line if len({site.line for site in sites}) == 1 else None

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
        tree = self.tree(file)
        if tree is None:
            return None
        if function == MODULE_BODY:
            return tree
        found: list[ast.expr | ast.stmt] = []
        # of a function that ran before the recording began, traces give the line it was at
        around: ast.AST | None = None
        for node in ast.walk(tree):
            if isinstance(node, _FUNCTIONS):
                name = node.name if not isinstance(node, ast.Lambda) else "<lambda>"
                first = _first_line(node)
                if name != function:
                    continue
                if def_line is None or first <= def_line <= node.lineno:
                    found.append(node)
                elif node.lineno < def_line <= (node.end_lineno or node.lineno):
                    around = node
            elif isinstance(node, _COMPREHENSIONS) and function in _COMPREHENSION_NAMES and node.lineno == def_line:
                found.append(node)
        if len({(node.lineno, node.end_lineno) for node in found}) > 1 and def_line is not None:
            return None  # several lambdas or comprehensions that begin on this line
        return found[0] if found else around

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


class _Node(NamedTuple):
    """A node of a function with the innermost loop around it, and whether it is run each time that loop's body is."""

    node: ast.AST
    loop: _Loop | None
    sure: bool


@lru_cache(maxsize=64)  # many calls of one function are asked about together
def _walk(scope: ast.AST | None, *, last_first: bool = False) -> list[_Node]:
    """Nodes of a function as they are evaluated, outer ones first, without functions defined in it."""
    found: list[_Node] = []
    stack = [_Node(scope, None, True)] if scope is not None else []
    while stack:
        found.append(stack.pop())
        node, loop, sure = found[-1]
        body: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.IfExp):
            body = [node.test, node.body, node.orelse]
        elif isinstance(node, ast.Assign):
            body = [node.value, *node.targets]
        repeated: list[ast.stmt] = node.body if isinstance(node, ast.For | ast.AsyncFor | ast.While) else []
        children = [
            _Node(
                child,
                node if isinstance(node, _LOOPS) else loop,
                child in repeated if isinstance(node, _LOOPS) else sure and not isinstance(node, _CHOICES),
            )
            for child in body
            if not isinstance(child, _FUNCTIONS)
        ]
        stack.extend(children if last_first else reversed(children))
    return found


def _loops(scope: ast.AST | None) -> list[_Loop]:
    return [node for node, _, _ in _walk(scope) if isinstance(node, _LOOPS)]


class _Site(NamedTuple):
    line: int
    loop: _Loop | None
    called: ast.expr | None
    sure: bool


def _sites(scope: ast.AST | None, wanted: Callable[[ast.AST], bool]) -> list[_Site]:
    """The nodes of a function that are wanted, in the order in which they are evaluated: inner ones first."""
    found = []
    for node, loop, sure in reversed(_walk(scope, last_first=True)):
        if isinstance(node, ast.expr | ast.stmt) and wanted(node):
            called = node.func if isinstance(node, ast.Call) else None
            # the line Python reports: of a method call over several lines, the attribute's
            line = called.end_lineno if isinstance(called, ast.Attribute) else None
            found.append(_Site(line or node.lineno, loop, called, sure))
    return found


def _begins(scope: ast.AST, line: int | None) -> bool:
    """Whether a trace that gives `line` for a function saw it begin; else it ran before, and was at that line."""
    if isinstance(scope, _FUNCTIONS):
        return line is None or line <= scope.lineno
    return line is None or line <= 1 or not isinstance(scope, ast.Module)


def _still_ahead(scope: ast.AST, sites: list[_Site], at: int) -> list[_Site]:
    """Without what lies before the line that a function was at, and before the loops around that line."""
    nodes = [node for node, _, _ in _walk(scope) if isinstance(node, ast.stmt) and node is not scope]
    around = [node for node in nodes if node.lineno <= at <= (node.end_lineno or at)]
    loops = [node.lineno for node in around if isinstance(node, _LOOPS)]
    first = min([*loops, max((node.lineno for node in around), default=at)])
    return [site for site in sites if site.line >= first]


def _module_sites(scope: ast.AST, known: _Names, call: Call) -> tuple[list[_Site], bool]:
    """What may call a module: all that nothing else in the trace is."""
    sites = _sites(scope, lambda node: isinstance(node, ast.Call))
    named = Counter(_key(site.called).removeprefix(".") for site in sites)
    looped = {_key(site.called).removeprefix(".") for site in sites if site.loop is not None}
    # where every call of a name in the text is one of that name in the trace, none is a module's
    told = [name for name, most in call.others if named[name] <= (1 if name in looped else most)]
    sites = [site for site in sites if site.called is not None and known.may_be_module(site.called, told)]
    # what a generator calls has the generator for its function
    return [site for site in sites if site.loop is scope or not isinstance(site.loop, ast.GeneratorExp)], True


def _function_sites(scope: ast.AST, known: _Names, call: Call) -> tuple[list[_Site], bool]:
    """What may call a function or an operator, and whether each names it."""
    name = call.name.removeprefix("aten::")
    for space in _SPACES:
        name = name.removeprefix(f"{space}_")
    sign = name.rstrip("_") if call.name.startswith("aten::") else ""
    named = _sites(scope, lambda node: known.calls(node, name))
    free = name in known.handed_on  # so that other names may call it

    def may_be(node: ast.AST) -> bool:
        may_call = known.reads(node, name) or (free and known.may_be_call(node, name))
        return may_call or known.calls(node, name) or _is_sign(node, sign)

    sites = _sites(scope, may_be)
    return sites, sites == named


def _staying(scope: ast.AST, sites: list[_Site]) -> list[_Site]:
    """Without what a function calls before it leaves early, ahead of all loops: it then makes no call in a loop."""
    looped = min((site.line for site in sites if site.loop is not None), default=0)
    branches = [node for node, loop, _ in _walk(scope) if isinstance(node, ast.If) and loop is None]
    blocks = [block for node in branches for block in (node.body, node.orelse) if block]
    leaving = [block for block in blocks if isinstance(block[-1], ast.Return | ast.Raise)]
    spans = [(block[0].lineno, block[-1].end_lineno or looped) for block in leaving]
    return [site for site in sites if not any(first <= site.line <= last < looped for first, last in spans)]


def _in_order(scope: ast.AST, sites: list[_Site], call: Call, at: int | None) -> int | None:
    """The line of a call where each of the sites made one of those that there were, or as many in turns in a loop."""
    loop, count = sites[0].loop, len(sites)
    if not 0 < call.turns < MANY or any(site.loop is not loop for site in sites):
        return None
    if loop is None:
        return sites[call.turn].line if call.turns == count else None
    outer = next(node for node in _loops(scope) if node.lineno <= loop.lineno <= (node.end_lineno or node.lineno))
    inside = list(ast.walk(outer))
    breaks = any(isinstance(node, _BREAKS) for node in inside)
    if breaks or not all(site.sure for site in sites) or any(site.line == at for site in sites):
        return None
    # of a function that ran already, the first calls are those behind its line
    begun = sum(site.line < at for site in sites) if at is not None and at >= loop.lineno else 0
    ordered = [sites[(turn + begun) % count] for turn in range(call.turns)]
    site = ordered[call.turn]
    if not call.name.startswith(MODULE_CALL):
        return site.line
    # if one of the sites calls no module, there are fewer modules than names
    names = {_key(each.called) for each in sites}
    stored = {_key(node) for node in inside if isinstance(getattr(node, "ctx", None), ast.Store)} | {""}
    steady = not stored & (names | {_root(each.called) for each in sites})
    same = sum(_key(each.called) == _key(site.called) for each in ordered)
    return site.line if steady and call.modules == len(names) and call.repeats == same else None


class _Names:
    """What the names of a file stand for, as far as its text says. Attributes begin with a dot.

    `handed_on` are functions that the text names without calling them.
    """

    def __init__(self, tree: ast.Module | None) -> None:
        self._functions: set[str] = set(dir(builtins))  # and classes, and modules' names: no modules of torch
        self._defined: set[str] = set()
        self._stored: Counter[str] = Counter()
        self._made: defaultdict[str, list[str]] = defaultdict(list)  # the classes of the values assigned
        nodes = list(ast.walk(tree)) if tree is not None else []
        aliases: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._defined.add(node.name)
                if any(_key(each).endswith("property") for each in node.decorator_list):
                    self._stored[f".{node.name}"] += 1
            elif isinstance(node, ast.Import | ast.ImportFrom):
                aliases.update({alias.asname: alias.name for alias in node.names if alias.asname is not None})
                for alias in node.names:
                    package = (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
                    if package.split(".")[0] in LIBRARY_PARTS:
                        self._functions.add((alias.asname or alias.name).split(".")[0])
            elif isinstance(node, ast.arg):
                self._stored[node.arg] += 1
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                self._stored[_key(node)] += 1
        self._functions |= self._defined
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                name = _class_of(node.value)
                names = [name] if name and not {name, f".{name}"} & self._stored.keys() else self._named(node.value)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._made[_key(target)].extend(aliases.get(each, each).removeprefix("Lazy") for each in names)
        self._called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        self.handed_on = {name for node in nodes if id(node) not in self._called for name in self._named(node)}

    def _named(self, node: ast.AST) -> list[str]:
        """The function that a node names, or asks for by a text."""
        if isinstance(node, ast.Call) and _key(node.func) == "getattr":
            return [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
        key = _key(node)
        name = key.removeprefix(".")
        if not key or not isinstance(getattr(node, "ctx", None), ast.Load):
            return []
        of_library = key != name and _root(node) in self._functions - self._stored.keys()
        return [name] if of_library or name in self._defined or key in self._functions else []

    def calls(self, node: ast.AST, name: str) -> bool:
        """Whether a node calls a function, by its name or one that it alone was given."""
        if not isinstance(node, ast.Call):
            return False
        key = _key(node.func)
        return key.removeprefix(".") == name or set(self._classes(key) or ()) == {name}

    def reads(self, node: ast.AST, name: str) -> bool:
        """Whether a node reads an attribute, which may be a property of that name."""
        return isinstance(node, ast.Attribute) and node.attr == name and id(node) not in self._called

    def may_be_call(self, node: ast.AST, name: str) -> bool:
        """Whether a node may call a function that is handed on: it names it, or calls something that it may be."""
        if name in self._named(node):
            return True
        return (
            isinstance(node, ast.Call) and self._classes(_key(node.func)) is None and self.may_be_module(node.func, ())
        )

    def may_be_module(self, called: ast.expr, others: Collection[str]) -> bool:
        """Whether a module may be called so, in a function that called `others` in the trace by these names alone."""
        key = _key(called)
        if not key or key in self._stored or key in _CALLING:
            made = self._classes(key)
            return not made or any(name[:1].isupper() for name in made)
        name = key.removeprefix(".")
        if name in others or _root(called) in self._functions - self._stored.keys():
            return False
        if key == name:
            return name not in self._functions and not name[:1].isupper()
        return name not in _NO_LAYERS and name not in self._defined

    def made_of(self, sites: list[_Site], name: str) -> list[_Site]:
        """Without those that call what was made of another class, where at least one calls what is of class `name`."""
        classes = [self._classes(_key(site.called)) for site in sites]
        kept = [site for site, known in zip(sites, classes, strict=True) if known is None or name in known]
        return kept if any(name in known for known in classes if known) else sites

    def _classes(self, key: str) -> list[str] | None:
        return self._made[key] if key in self._made and len(self._made[key]) == self._stored[key] else None


def _key(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _root(node: ast.AST | None) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return _key(node)


def _class_of(value: ast.expr | None) -> str | None:
    """`Net` of `Net(1)` and of `nets.Net(1).to(device)`."""
    while isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call):
            if value.func.attr not in _SELF_RETURNING:
                return None
            value = value.func.value
            continue
        name = _key(value.func).removeprefix(".")
        return name if name[:1].isupper() else None
    return None


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and _key(node.func).removeprefix(".") == name


def _is_sign(node: ast.AST, operator: str) -> bool:
    """Whether a node is an operator of torch by its sign."""
    signs = node.ops if isinstance(node, ast.Compare) else [getattr(node, "op", None)]
    return any(isinstance(sign, _SIGNS.get(operator, ())) for sign in signs)


def _calls(scope: ast.AST | None, wanted: Callable[[ast.AST], bool], *, loop: bool) -> list[tuple[int, _Loop | None]]:
    found = [(site.line, site.loop) for site in _sites(scope, wanted)]
    if loop:
        found.sort(key=lambda pair: pair[1] is None)
    return found


def _span(loop: _Loop | None, line: int, name: str) -> tuple[int | None, int | None, str | None]:
    """The first and the last line of a loop, and what the call of `name` in `line` takes from the iteration before."""
    return (loop.lineno, loop.end_lineno, _carried(loop, line, name)) if loop is not None else (None, None, None)


class _Flow(NamedTuple):
    """What a node of a loop's body reads, what it assigns of that, and the node if it is a statement that assigns."""

    read: set[str]
    stored: set[str]
    node: ast.stmt | None = None


def _carried(loop: _Loop, line: int, name: str) -> str | None:
    """What a call in a loop takes that was made of what it gave one iteration earlier; None where none is seen.

    By assignments in the loop alone: what functions and objects keep for themselves is not seen.
    """
    nodes = [node for node, _, _ in _walk(loop)]
    varying = {path for node in nodes for path in _stored(node)}
    items = [node for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    # `x[i] = f(x[i])` takes nothing of the iteration before
    own = frozenset(ast.unparse(item) for item in items if varying & _read(item.slice))
    flows = [_flow(node, own) for node in nodes]
    around = [
        (flow.node, flow.stored)
        for flow in flows
        if flow.node is not None and flow.node.lineno <= line <= (flow.node.end_lineno or line)
    ]
    if not around:
        return None
    statement, gives = around[-1]
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    calls = [node for node in calls if _is_call(node, name)] or calls
    takes = set[str]().union(*(_read(node, own) for node in calls))
    while more := set().union(*(flow.read for flow in flows if flow.stored & takes)) - takes:
        takes |= more
    while more := set().union(*(flow.stored for flow in flows if flow.read & gives)) - gives:
        gives = gives | more
    begun: set[str] = set()
    for flow in flows:
        if carried := (flow.read & takes & gives) - begun:
            return min(carried)
        begun |= flow.stored
    return None


def _flow(node: ast.AST, own: Collection[str]) -> _Flow:
    """Of a node by itself, or of a statement that assigns with all in it."""
    match node:
        case ast.Assign(value=value, targets=targets):
            pass
        case ast.AugAssign(value=value, target=target) | ast.AnnAssign(value=ast.expr() as value, target=target):
            targets = [target]
        case ast.For(iter=value, target=target) | ast.AsyncFor(iter=value, target=target):
            return _Flow(_read(value, own), _stored(target))
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=kept, attr=attribute), args=args)) if (
            attribute in _KEEPING
        ):
            return _Flow(set().union(*(_read(each, own) for each in args)), {_path(kept)})
        case ast.Name() | ast.Attribute() | ast.Subscript() if isinstance(node.ctx, ast.Store):
            return _Flow(set(), _stored(node))
        case ast.Name() | ast.Attribute():
            return _Flow({_path(node)} - {""}, set())
        case _:
            return _Flow(set(), set())
    stored = set().union(*map(_stored, targets))
    return _Flow(_read(value, own) | (stored if isinstance(node, ast.AugAssign) else set()), stored, node)


def _read(node: ast.AST, own: Collection[str] = ()) -> set[str]:
    """The names and attributes that an expression reads, but for items in `own`."""
    if isinstance(node, ast.Subscript) and ast.unparse(node) in own:
        return _read(node.slice)
    path = _path(node) if isinstance(getattr(node, "ctx", None), ast.Load) else ""
    return ({path} - {""}).union(*(_read(child, own) for child in ast.iter_child_nodes(node)))


def _stored(node: ast.AST) -> set[str]:
    """What a target assigns; of an item the whole."""
    found = [each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store)]
    return {_path(each.value if isinstance(each, ast.Subscript) else each) for each in found} - {""}


def _path(node: ast.AST) -> str:
    """`self.cell.h` of names and attributes; nothing of what is none."""
    if isinstance(node, ast.Attribute):
        root = _path(node.value)
        return f"{root}.{node.attr}" if root else ""
    return node.id if isinstance(node, ast.Name) else ""
