"""A source file as a tree that is changed in places, the rest kept byte for byte; and where a value is written.

Changes are collected on the nodes of the parsed file and made at once, so that lines stay those of the file until then.
Whatever is not certain raises `NotMechanical` with what decides it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

import libcst as cst
from libcst import metadata

from stepscope.fix.sources import NotMechanical

Change = Callable[[Any], Any]
_Lines = dict[cst.CSTNode, list[Any]]
Held = Callable[[object], bool]
UNKNOWN = object()  # the value of what is no literal
MAX_NODES = 400_000
# of the names that a call gives by position; those of other constructors are given by keyword
POSITIONS = {
    "DataLoader": [
        "dataset",
        *("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    ],
    "zero_grad": ["set_to_none"],
}


class Tree:
    """`option_of` names the option of a command line that sets an attribute, where the user's files say so."""

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        self.option_of: Callable[[str], str | None] = lambda _name: None
        self.notes: list[str] = []
        self.data = data
        try:
            module = cst.parse_module(data)
            kept = module.bytes == data
        except (cst.ParserSyntaxError, SyntaxError, UnicodeError, LookupError, RecursionError, ValueError) as error:
            raise NotMechanical(f"{name} cannot be parsed: {str(error).splitlines()[0]}") from None
        if not kept:
            raise NotMechanical(f"{name} has line ends or form feeds that an edit would not keep; edit it by hand")
        wrapper = metadata.MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = wrapper.module
        kinds: Any = (metadata.PositionProvider, metadata.ParentNodeProvider, metadata.ScopeProvider)
        known: Any = wrapper.resolve_many((*kinds, metadata.QualifiedNameProvider))  # in one walk
        self._lines, self._parents, self._scopes = (known[kind] for kind in kinds)
        self._names = known[metadata.QualifiedNameProvider]
        self._nodes: list[cst.CSTNode] = []
        self._changes: dict[cst.CSTNode, list[Change]] = {}
        self._ahead: dict[cst.CSTNode, list[Any]] = {}
        self._behind: dict[cst.CSTNode, list[Any]] = {}
        stack: list[cst.CSTNode] = [self.module]
        while stack and len(self._nodes) < MAX_NODES:
            node = stack.pop()
            self._nodes.append(node)
            stack.extend(reversed(node.children))

    # --- looking

    def all(self, kind: Any, inside: cst.CSTNode | None = None) -> Iterator[Any]:
        """Nodes of a kind in the order of the file, those in `inside` alone where it is given."""
        for node in self._nodes:
            if isinstance(node, kind) and (inside is None or inside in self.above(node)):
                yield node

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """What holds a node, from the inside out."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def around(self, node: cst.CSTNode, *kinds: type[Any]) -> Any:
        return next((held for held in self.above(node) if isinstance(held, kinds)), None)

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        place = self._lines[node]
        return place.start.line, place.end.line

    def line(self, node: cst.CSTNode) -> int:
        return self.span(node)[0]

    def on(self, kind: Any, line: int | None) -> list[Any]:
        """Nodes of a kind that hold a line, the innermost first."""
        if line is None:
            return []
        found = [node for node in self.all(kind) if self.span(node)[0] <= line <= self.span(node)[1]]
        return sorted(found, key=lambda node: self.span(node)[1] - self.span(node)[0])

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def names(self, node: cst.CSTNode) -> set[str]:
        """Full names that a node may stand for: `torch.utils.data.DataLoader` of `d.DataLoader`, whatever `d` is."""
        return {name.name for name in self._known(node)}

    def is_imported(self, node: cst.CSTNode) -> bool:
        """Whether a name is another module's."""
        return any(name.source is metadata.QualifiedNameSource.IMPORT for name in self._known(node))

    def _known(self, node: cst.CSTNode) -> Any:
        given = self._names.get(node, ())
        return given() if callable(given) else given

    def calls(self, *names: str) -> list[cst.Call]:
        """Calls of what has one of these full names."""
        return [call for call in self.all(cst.Call) if self.names(call.func) & set(names)]

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The statement that a node stands in: a line of simple ones, or a compound one."""
        return next(
            one
            for one in (node, *self.above(node))
            if isinstance(one, cst.SimpleStatementLine | cst.BaseCompoundStatement)
        )

    def literal(self, node: cst.CSTNode) -> object:
        try:
            return ast.literal_eval(self.code(node).strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return UNKNOWN

    def assigned(self, name: cst.Name) -> tuple[cst.BaseExpression | None, int, cst.CSTNode | None]:
        """(the one value that a name is given, how often it is read, what gives it); None of several, or of none."""
        scope = self._scopes.get(name)
        found = [] if scope is None else list(scope[name.value])
        if len(found) != 1 or not isinstance(found[0], metadata.Assignment):
            return None, 0, None
        target, uses = found[0].node, len(found[0].references)
        parent = self._parents.get(target)
        held = None if parent is None else self._parents.get(parent)
        if isinstance(parent, cst.AnnAssign):
            return parent.value, uses, target
        if isinstance(held, cst.Assign) and len(held.targets) == 1 and held.targets[0].target is target:
            return held.value, uses, target
        return None, uses, target

    # --- changing

    def change(self, node: cst.CSTNode, change: Change) -> None:
        self._changes.setdefault(node, []).append(change)

    def replace(self, node: cst.CSTNode, code: str) -> None:
        new = cst.parse_expression(code)
        self.change(node, lambda _updated: new)

    def after(self, statement: cst.CSTNode, *codes: str) -> None:
        """Statements behind one, on its level."""
        self._behind.setdefault(statement, []).extend(map(self._statement, codes))

    def before(self, statement: cst.CSTNode, *codes: str) -> None:
        self._ahead.setdefault(statement, []).extend(map(self._statement, codes))

    def _statement(self, code: str) -> Any:
        return cst.parse_statement(code + "\n", config=self.module.config_for_parsing)

    def under(self, statements: list[cst.CSTNode], head: str) -> None:
        """Statements that follow each other, put into a block of their own: `if step % 50 == 0:`."""
        block: Any = self._parents[statements[0]]
        new = self._statement(f"{head}\n    pass")

        def wrapped(updated: Any) -> Any:
            sizes = [len(self._ahead.get(one, ())) + 1 + len(self._behind.get(one, ())) for one in block.body]
            first, last = block.body.index(statements[0]), block.body.index(statements[-1])
            if sum(sizes) != len(updated.body):
                raise NotMechanical("two changes meet in one block; make them one after the other")
            first, last = sum(sizes[:first]), sum(sizes[: last + 1])
            held = list(updated.body[first:last])
            inner = cst.IndentedBlock([held[0].with_changes(leading_lines=()), *held[1:]])
            made = new.with_changes(body=inner, leading_lines=held[0].leading_lines)
            return updated.with_changes(body=[*updated.body[:first], made, *updated.body[last:]])

        self.change(block, wrapped)

    def remove(self, call: cst.Call) -> None:
        """A statement that is nothing but this call; with it the `if` that holds nothing else, where that only asks."""
        small: Any = self._parents[call]
        if not isinstance(small, cst.Expr):
            raise NotMechanical(f"the result of `{self.code(call)}` (line {self.line(call)}) is used")
        line: Any = self._parents[small]
        block: Any = self._parents[line]
        if len(line.body) > 1:
            at = line.body.index(small)

            def without(updated: Any) -> Any:
                kept = [*updated.body[:at], *updated.body[at + 1 :]]
                if at == len(kept):
                    kept[-1] = kept[-1].with_changes(semicolon=updated.body[-1].semicolon)
                return updated.with_changes(body=kept)

            self.change(line, without)
        elif isinstance(line, cst.SimpleStatementSuite) or len(block.body) == 1:
            branch: Any = line if isinstance(line, cst.SimpleStatementSuite) else block
            branch = self._parents[branch]
            asks = isinstance(branch, cst.If) and branch.orelse is None and not list(self.all(cst.Call, branch.test))
            outer = self._parents.get(branch)
            if asks and isinstance(outer, cst.IndentedBlock | cst.Module) and len(outer.body) > 1:
                self.change(branch, lambda _updated: cst.RemoveFromParent())
            else:
                self.change(small, lambda _updated: cst.Pass())
        else:
            self.change(line, lambda _updated: cst.RemoveFromParent())

    def set_value(self, node: cst.BaseExpression, value: str, what: str, held: Held | None = None) -> bool:
        """Have `what` be `value` where it is written; False where it is so already.

        `held` tells which of two written values is to go: the one as recorded.
        """
        known = self.literal(node)
        if known is not UNKNOWN:
            if self.code(node).strip() == value or known == ast.literal_eval(value):
                return False
            self.replace(node, value)
            return True
        if isinstance(node, cst.IfExp):
            parts = [part for part in (node.body, node.orelse) if self.literal(part) is not UNKNOWN]
            chosen = [part for part in parts if held is not None and held(self.literal(part))]
            if len(chosen) == 1:
                return self.set_value(chosen[0], value, what)
            if len(parts) == 2:
                self.notes.append(f"{what} was `{self.code(node)}`, line {self.line(node)}")
                self.replace(node, value)
                return True
        if isinstance(node, cst.Name):
            return self._set_name(node, value, what, held)
        raise self._elsewhere(node, what)

    def _set_name(self, node: cst.Name, value: str, what: str, held: Held | None) -> bool:
        given, uses, target = self.assigned(node)
        if given is None:
            if isinstance(target, cst.Param):
                function = self.around(target, cst.FunctionDef)
                name = f"the parameter `{node.value}`" + (f" of `{function.name.value}`" if function else "")
                raise NotMechanical(f"{what} comes in as {name}: set it where that is called")
            if target is None:
                raise NotMechanical(f"{what} is `{node.value}`, which is given several values: choose where to set it")
            where = f"line {self.line(target)}"
            raise NotMechanical(f"{what} is `{node.value}`, which {where} gives a value from elsewhere: set it there")
        if not isinstance(given, cst.IfExp) and self.literal(given) is UNKNOWN:
            raise self._elsewhere(given, what)
        if uses == 1:
            return self.set_value(given, value, what, held)
        if self.literal(given) == ast.literal_eval(value):
            return False
        self.notes.append(f"{what} was `{node.value}` of line {self.line(given)}, which stays for its other uses")
        self.replace(node, value)
        return True

    def _elsewhere(self, node: cst.CSTNode, what: str) -> NotMechanical:
        code = " ".join(self.code(node).split())
        return NotMechanical(f"{what} is set by `{code}` (line {self.line(node)}): {self.decided(node)}")

    def decided(self, node: cst.CSTNode) -> str:
        """Who decides a value that is no literal."""
        code = self.code(node)
        name = re.search(r"""(?:\.|\[["'])(\w+)(?:["']\])?\s*\)?$""", code.strip())
        option = self.option_of(name[1]) if name is not None else None
        if "argv" in code:
            told = re.search(r"""["'](--?[\w-]+)["']""", code)
            option = told[1] if told is not None else None
        if option is not None:
            return f"the option {option} of the command line decides it; give it there"
        return "an option or a configuration decides it; change it there"

    def set_argument(self, call: cst.Call, name: str, value: str, held: Held | None = None) -> bool:
        """Give an argument of a call a value; False where it has it."""
        known = POSITIONS.get(self.code(call.func).rsplit(".", 1)[-1], [])
        for full in self.names(call.func):
            known = POSITIONS.get(full.rsplit(".", 1)[-1], known)
        for argument in call.args:
            if argument.keyword is not None and argument.keyword.value == name:
                return self.set_value(argument.value, value, name, held)
        starred = any(argument.star == "*" for argument in call.args)
        plain = [argument for argument in call.args if argument.keyword is None and not argument.star]
        if name in known and (starred or len(plain) > known.index(name)):
            if starred:
                raise NotMechanical(f"arguments of the call at line {self.line(call)} come from `*`: add {name} there")
            return self.set_value(plain[known.index(name)].value, value, name, held)
        for argument in call.args:
            if argument.star == "**":
                inside = self._in_keywords(argument.value, name)
                if inside is not None:
                    return self.set_value(inside, value, name, held)
        self.change(call, lambda updated: _with_argument(updated, f"{name}={value}"))
        return True

    def _in_keywords(self, held: cst.BaseExpression, name: str) -> cst.BaseExpression | None:
        """The value of a keyword in what is handed on as `**`; None where it is certain that it is not there."""
        unknown = f"arguments come from `**{self.code(held)}`: set {name} there"
        value, uses = (self.assigned(held)[:2]) if isinstance(held, cst.Name) else (held, 1)
        pairs: list[tuple[object, cst.BaseExpression]] = []
        if isinstance(value, cst.Dict) and all(isinstance(one, cst.DictElement) for one in value.elements):
            pairs = [(self.literal(one.key), one.value) for one in value.elements if isinstance(one, cst.DictElement)]
        elif isinstance(value, cst.Call) and self.names(value.func) == {"builtins.dict"}:
            if any(one.keyword is None for one in value.args):
                raise NotMechanical(unknown)
            pairs = [(one.keyword.value, one.value) for one in value.args if one.keyword is not None]
        else:
            raise NotMechanical(unknown)
        if uses != 1 or any(key is UNKNOWN for key, _ in pairs):
            raise NotMechanical(f"{unknown}, line {self.line(value)}; it is used elsewhere too")
        return next((given for key, given in pairs if key == name), None)

    def remove_argument(self, call: cst.Call, name: str) -> None:
        def without(updated: Any) -> Any:
            kept = [one for one in updated.args if one.keyword is None or one.keyword.value != name]
            if kept and updated.args[-1] not in kept:
                kept[-1] = kept[-1].with_changes(comma=updated.args[-1].comma)
            return updated.with_changes(args=kept)

        self.change(call, without)

    def result(self) -> bytes:
        """The file with all changes; raises `NotMechanical` where it is no program any more."""
        changer = _Changer(self._changes, self._ahead, self._behind)
        new = self.data
        if self._changes or self._ahead or self._behind:
            new = self.module.visit(changer).bytes
        try:
            before = ast.parse(self.data)
        except (SyntaxError, ValueError, RecursionError):
            raise NotMechanical(f"this Python cannot parse {self.name}; use the one that trains") from None
        try:
            after = ast.parse(new)
            compile(new, self.name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise NotMechanical(f"the edit would leave {self.name} broken ({error}); edit it by hand") from None
        same = ast.dump(before) == ast.dump(after)
        return self.data if same else new


class _Changer(cst.CSTTransformer):
    """Makes the changes of nodes, and puts statements before and behind others."""

    def __init__(self, changes: dict[cst.CSTNode, list[Change]], ahead: _Lines, behind: _Lines) -> None:
        super().__init__()
        self._changes, self._ahead, self._behind = changes, ahead, behind

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        for change in self._changes.get(original_node, ()):
            updated_node = change(updated_node)
        ahead, behind = list(self._ahead.get(original_node, ())), self._behind.get(original_node, ())
        if not ahead and not behind:
            return updated_node
        if ahead:
            ahead[0] = ahead[0].with_changes(leading_lines=updated_node.leading_lines)
            updated_node = updated_node.with_changes(leading_lines=())
        return cst.FlattenSentinel([*ahead, updated_node, *behind])


def _with_argument(call: cst.Call, code: str) -> cst.Call:
    """The call with one more argument at its end, laid out as those before it."""
    new = cst.ensure_type(cst.parse_expression(f"f({code})"), cst.Call).args[0]
    if not call.args:
        return call.with_changes(args=[new])
    last = call.args[-1]
    gap: cst.BaseParenthesizableWhitespace = cst.SimpleWhitespace(" ")
    if len(call.args) > 1 and isinstance(call.args[-2].comma, cst.Comma):
        gap = _without_comment(call.args[-2].comma.whitespace_after)
    elif isinstance(call.whitespace_before_args, cst.ParenthesizedWhitespace):
        gap = _without_comment(call.whitespace_before_args)
    end = last.comma
    if isinstance(end, cst.Comma):
        behind = end.whitespace_after
        if isinstance(behind, cst.ParenthesizedWhitespace) and isinstance(gap, cst.ParenthesizedWhitespace):
            # a comment behind the last argument stays behind it
            between = behind.with_changes(indent=gap.indent, last_line=gap.last_line, empty_lines=[])
            last = last.with_changes(comma=end.with_changes(whitespace_after=between))
            new = new.with_changes(comma=end.with_changes(whitespace_after=_without_comment(behind, lines=True)))
        else:
            last = last.with_changes(comma=end.with_changes(whitespace_after=gap))
            new = new.with_changes(comma=end)
    else:
        trailing = last.whitespace_after_arg
        first = trailing if isinstance(trailing, cst.ParenthesizedWhitespace) else None
        if first is not None and isinstance(gap, cst.ParenthesizedWhitespace):
            gap = gap.with_changes(first_line=first.first_line)
        new = new.with_changes(whitespace_after_arg=_without_comment(trailing, lines=True))
        last = last.with_changes(whitespace_after_arg=cst.SimpleWhitespace(""), comma=cst.Comma(whitespace_after=gap))
    return call.with_changes(args=[*call.args[:-1], last, new])


def _without_comment(space: Any, *, lines: bool = False) -> Any:
    """White space without what is said behind its first line; `lines`: with those of their own below."""
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return space
    first = space.first_line.with_changes(whitespace=cst.SimpleWhitespace(""), comment=None)
    return space.with_changes(first_line=first, empty_lines=space.empty_lines if lines else [])
