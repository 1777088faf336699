"""The mutants of a source file: one small change of its syntax tree each."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, cast

import attrs

_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_CALLED: Final = {"all": "any", "any": "all", "min": "max", "max": "min"}
_SIMPLE: Final = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)
_SHOWN: Final = frozenset(("__repr__", "__str__", "__rich_repr__"))
"""Functions whose result is a text for people."""
_LOGGED: Final = frozenset(("debug", "info", "warning", "error", "exception", "log", "warn"))

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Change = Callable[[], Callable[[], object]]
"""Makes the change in the tree; returns what undoes it."""


@attrs.frozen(eq=False)
class Mutant:
    """One change.

    Attributes:
        line: Where it is.
        where: The function that it is in, by its qualified name.
        text: What it is, for people.
    """

    line: int
    where: str
    text: str
    _tree: ast.Module
    _change: _Change

    @property
    def source(self) -> str:
        """The whole file with it. Takes some 30 ms, so it is made only of those that are tried."""
        undo = self._change()
        try:
            return ast.unparse(ast.fix_missing_locations(self._tree))
        finally:
            undo()


def mutants_of(source: str) -> Iterator[Mutant]:
    """Return the mutants of a file: comparisons, operators, conditions and numbers changed, statements left out.

    Only what functions do is changed: what a module does when it is imported is seen by each test that imports it. What
    asserts something of our own, `assert` and `strict=True`, is left alone: while it holds, no test can miss it. So are
    texts for people (`__repr__`, log lines, f-strings), annotations, and `del` of a name, which frees memory early.
    """
    tree = ast.parse(source)
    functions = {it: name for it, name in _functions_in(tree, "") if it.name not in _SHOWN}
    nodes = {
        inner: name  # of the innermost one, which comes last
        for outer, name in functions.items()
        for statement in outer.body
        for inner in ast.walk(statement)
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    shown = {it for outer, _ in _functions_in(tree, "") if outer.name in _SHOWN for it in ast.walk(outer)}
    left = {inner for outer in nodes for node in _left_alone(outer) for inner in ast.walk(node)} | shown
    for node, name in nodes.items():
        if node in left:
            continue
        for text, field, value in _changes(node):
            yield Mutant(getattr(node, "lineno", 0), name, text, tree, partial(_set, node, field, value))
    inside = {node: name for function, name in functions.items() for node in ast.walk(function)}  # once, also if nested
    for node, name in inside.items():
        for block in _blocks_of(node):
            for index, statement in enumerate(block):
                if isinstance(statement, _SIMPLE) and statement not in left and not _is_free_of_effect(statement):
                    text = f"without {ast.unparse(statement)}"[:100]
                    yield Mutant(statement.lineno, name, text, tree, partial(_drop, block, index))


def _set(node: ast.AST, field: str, value: object) -> Callable[[], object]:
    undo = partial(setattr, node, field, getattr(node, field))
    setattr(node, field, value)
    return undo


def _drop(block: list[ast.stmt], index: int) -> Callable[[], object]:
    statement = block[index]
    # Not `pass`: a function without a name of the functions around it, or without `super`, cannot take another's place.
    block[index] = ast.copy_location(ast.If(ast.Constant(False), [statement], []), statement)
    return partial(block.__setitem__, index, statement)


def _functions_in(node: ast.AST, prefix: str) -> Iterator[tuple[_Function, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield child, name
            yield from _functions_in(child, f"{name}.")
        else:
            yield from _functions_in(child, prefix)


def _changes(node: ast.AST) -> Iterator[tuple[str, str, object]]:
    was = ast.unparse(node) if isinstance(node, ast.expr) else ""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                other = _COMPARED[type(operator)]()
                ops = [*node.ops[:index], other, *node.ops[index + 1 :]]
                yield f"{was}: {type(other).__name__}", "ops", ops
        case ast.BoolOp(op=op):
            either = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"{was}: {type(either).__name__}", "op", either
            for index, value in enumerate(node.values):
                rest = [*node.values[:index], *node.values[index + 1 :]]
                yield f"{was}: not asked: {ast.unparse(value)}", "values", rest
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _COMPUTED:
            inverse = _COMPUTED[type(op)]()
            yield f"{was or ast.unparse(node)}: {type(inverse).__name__}", "op", inverse
        case ast.If() | ast.While() | ast.IfExp():
            yield f"not ({ast.unparse(node.test)})", "test", ast.UnaryOp(ast.Not(), node.test)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLED:
            yield f"{was}: {_CALLED[name]}", "func", ast.Name(_CALLED[name], ast.Load())
        case ast.Constant(value=bool() as value):
            yield f"{value}: {not value}", "value", not value
        case ast.Constant(value=int() as value):
            yield f"{value}: {value + 1}", "value", value + 1
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield f"return {ast.unparse(value)}: None", "value", ast.Constant(None)
        case _:
            return


def _left_alone(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the trees below a node, or itself, that no test is to see changed."""
    match node:
        case ast.Assign(targets=[ast.Name(id="__tracebackhide__")]):  # what people see of a traceback
            yield node
        case ast.Assert() | ast.JoinedStr() | ast.keyword(arg="strict" | "stacklevel"):
            yield node
        case ast.AnnAssign(annotation=annotation) | ast.arg(annotation=ast.expr() as annotation):
            yield annotation
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name, value=logger))) if name in _LOGGED:
            if any(word in ast.unparse(logger).lower() for word in ("log", "warnings")):
                yield node
        case ast.FunctionDef(returns=ast.expr() as returns) | ast.AsyncFunctionDef(returns=ast.expr() as returns):
            yield returns
        case _:
            return


def _blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list):  # not of a lambda, or of a condition in an expression
            yield cast("list[ast.stmt]", block)


def _is_free_of_effect(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.Delete(targets=targets):
            return all(isinstance(target, ast.Name) for target in targets)
        case _:
            return False


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
