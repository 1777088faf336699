"""The mutants of a source file: one small change of its syntax tree each."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
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
_SIMPLE: Final = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@attrs.frozen
class Mutant:
    """One change.

    Attributes:
        line: Where it is.
        where: The function that it is in, by its qualified name.
        text: What it is, for people.
        source: The whole file with it.
    """

    line: int
    where: str
    text: str
    source: str


def mutants_of(source: str) -> Iterator[Mutant]:
    """Return the mutants of a file: comparisons, operators, conditions and numbers changed, statements left out.

    Only what functions do is changed: what a module does when it is imported is seen by each test that imports it. What
    asserts something of our own, `assert` and `strict=True`, is left alone: while it holds, no test can miss it.
    """
    tree = ast.parse(source)
    functions = dict(_functions_in(tree, ""))
    nodes = {
        inner: name  # of the innermost one, which comes last
        for outer, name in functions.items()
        for statement in outer.body
        for inner in ast.walk(statement)
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    asserted = {inner for node in nodes if _is_assertion(node) for inner in ast.walk(node)}
    for node, name in nodes.items():
        if node in asserted:
            continue
        line = getattr(node, "lineno", 0)
        for text, change in _changes(node):
            undo = copy.copy(node.__dict__)
            change()
            ast.fix_missing_locations(tree)
            try:
                yield Mutant(line, name, text, ast.unparse(tree))
            finally:
                node.__dict__.clear()
                node.__dict__.update(undo)
    yield from _without_statements(tree, functions)


def _functions_in(node: ast.AST, prefix: str) -> Iterator[tuple[_Function, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield child, name
            yield from _functions_in(child, f"{name}.")
        else:
            yield from _functions_in(child, prefix)


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[], object]]]:
    was = ast.unparse(node) if isinstance(node, ast.expr) else ""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                other = _COMPARED[type(operator)]()
                ops = [*node.ops[:index], other, *node.ops[index + 1 :]]
                yield f"{was}: {type(other).__name__}", partial(setattr, node, "ops", ops)
        case ast.BoolOp(op=op):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"{was}: {type(other).__name__}", partial(setattr, node, "op", other)
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _COMPUTED:
            other = _COMPUTED[type(op)]()
            yield f"{was or ast.unparse(node)}: {type(other).__name__}", partial(setattr, node, "op", other)
        case ast.If() | ast.While() | ast.IfExp():
            test = ast.UnaryOp(ast.Not(), node.test)
            yield f"not ({ast.unparse(node.test)})", partial(setattr, node, "test", test)
        case ast.Constant(value=bool() as value):
            yield f"{value}: {not value}", partial(setattr, node, "value", not value)
        case ast.Constant(value=int() as value):
            yield f"{value}: {value + 1}", partial(setattr, node, "value", value + 1)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield f"return {ast.unparse(value)}: None", partial(setattr, node, "value", ast.Constant(None))
        case _:
            return


def _is_assertion(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg == "strict")


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _without_statements(tree: ast.Module, functions: Mapping[_Function, str]) -> Iterator[Mutant]:
    inside = {node: name for function, name in functions.items() for node in ast.walk(function)}  # once, also if nested
    for node, name in inside.items():
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue  # of a lambda, or of a condition in an expression
            for index, statement in enumerate(cast("list[ast.stmt]", block)):
                is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if not isinstance(statement, _SIMPLE) or is_text:
                    continue
                block[index] = ast.copy_location(ast.Pass(), statement)
                try:
                    yield Mutant(statement.lineno, name, f"without {ast.unparse(statement)}"[:100], ast.unparse(tree))
                finally:
                    block[index] = statement
