"""Programs of commands for ranks, drawn by a seed or listed: on tensors that are given, and those that they make."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs

from trimesh.tensor.protocol.arguments import NUMBER_SLOT, SLOT, describe
from trimesh.tensor.protocol.messages import DEFINE, FREE, RECORD

MATRIX, HALF, ROW, BANDS, WINDOW, INDEX = (4, 4), (2, 4), (4,), (4, 3, 2), (3, 2), (0,)


@attrs.frozen
class Operation:
    """An operation of the drawn programs: shapes of its operands, and of its results."""

    name: str
    args: Sequence[Any]
    takes: Sequence[tuple[int, ...]]
    makes: Sequence[tuple[int, ...]] = ()
    writes: Sequence[int] = ()
    plain: str = ""
    numbers: Sequence[Any] = (0.5, 2.0, -1)


OPERATIONS = (
    Operation("aten::add.Tensor", [SLOT, SLOT], [MATRIX, MATRIX], [MATRIX]),
    Operation("aten::add.Tensor", [SLOT, SLOT], [MATRIX, ROW], [MATRIX]),
    Operation("aten::mul.Tensor", [SLOT, NUMBER_SLOT], [MATRIX], [MATRIX]),
    Operation("aten::sigmoid", [SLOT], [MATRIX], [MATRIX]),
    Operation("aten::mm", [SLOT, SLOT], [MATRIX, MATRIX], [MATRIX]),
    Operation("aten::t", [SLOT], [MATRIX], [MATRIX]),
    Operation("aten::detach", [SLOT], [MATRIX], [MATRIX]),
    Operation("aten::select.int", [SLOT, 0, 1], [MATRIX], [ROW]),
    Operation("aten::select.int", [SLOT, 1, 2], [MATRIX], [ROW]),
    Operation("aten::split.Tensor", [SLOT, 2], [MATRIX], [HALF, HALF]),
    Operation("aten::cat", [[SLOT, SLOT]], [HALF, HALF], [MATRIX]),
    Operation("aten::sum.dim_IntList", [SLOT, [NUMBER_SLOT]], [MATRIX], [ROW], numbers=(0, 1)),
    Operation("aten::select.int", [SLOT, NUMBER_SLOT, 1], [MATRIX], [ROW], numbers=(0, 1)),
    Operation("aten::add.Tensor", [SLOT, NUMBER_SLOT], [ROW], [ROW]),
    Operation("aten::unfold", [SLOT, 0, 2, 1], [ROW], [WINDOW]),
    Operation("aten::fill_.Scalar", [SLOT, NUMBER_SLOT], [WINDOW], writes=[0]),
    Operation("aten::sum", [SLOT], [WINDOW], [()]),
    Operation("aten::expand", [SLOT, [4, 4]], [ROW], [MATRIX]),
    Operation("aten::sort", [SLOT], [MATRIX], [MATRIX, INDEX]),
    Operation("aten::index_select", [SLOT, 0, SLOT], [MATRIX, INDEX], [MATRIX]),
    Operation("aten::unique_consecutive", [SLOT], [ROW], [(), (), ()]),
    Operation("aten::bincount", [SLOT], [INDEX], [()]),
    Operation("aten::add_.Tensor", [SLOT, SLOT], [MATRIX, MATRIX], writes=[0]),
    Operation("aten::add_.Tensor", [SLOT, SLOT], [MATRIX, ROW], writes=[0]),
    Operation("aten::mul_.Tensor", [SLOT, NUMBER_SLOT], [ROW], writes=[0]),
    Operation("trimesh::redistribute", [SLOT, (0,)], [MATRIX], [MATRIX, ()], plain="aten::clone"),
    Operation("trimesh::redistribute", [SLOT, (-1,)], [MATRIX], [MATRIX, ()], plain="aten::clone"),
    Operation("aten::mul_.Tensor", [SLOT, NUMBER_SLOT], [HALF], writes=[0]),
    Operation("aten::copy_", [SLOT, SLOT], [ROW, ROW], writes=[0]),
    Operation("aten::_foreach_mul_.Scalar", [[SLOT, SLOT], 0.5], [MATRIX, ROW], writes=[0, 1]),
    Operation("aten::unfold", [SLOT, 1, 2, 1], [MATRIX], [BANDS]),
    Operation("aten::select.int", [SLOT, 0, 1], [BANDS], [WINDOW]),
    Operation("aten::fill_diagonal_", [SLOT, NUMBER_SLOT], [WINDOW], writes=[0]),
    Operation("aten::zeros_like", [SLOT], [INDEX], [INDEX]),
    Operation("aten::index_fill_.int_Scalar", [SLOT, 1, SLOT, NUMBER_SLOT], [WINDOW, INDEX], writes=[0]),
)
RARE_NAMES = ("aten::index_select", "aten::unique_consecutive", "aten::bincount", "aten::_foreach_mul_.Scalar")
RARE = [place for place, one in enumerate(OPERATIONS) if one.name in RARE_NAMES]
"""Operations that fail for some data, that are not taken apart, or of lists."""

GIVEN = {1: MATRIX, 2: MATRIX, 3: MATRIX, 4: ROW, 5: INDEX}


def definitions(*, are_global: bool) -> list[Any]:
    stream: list[Any] = []
    for code, one in enumerate(OPERATIONS, 16):
        outs: list[int] = [*range(len(one.makes))] if one.makes else [-1]
        args, name = list(one.args), one.name
        if are_global and not one.plain:
            name = f"global::{name}"
        elif one.plain and not are_global:
            name, args, outs = one.plain, args[:1], outs[:1]
        stream += [DEFINE, code, [name, describe(args), describe({}), outs, list(one.writes)]]
    return stream


def code_of(name: str, place: int = 0) -> int:
    return 16 + [at for at, one in enumerate(OPERATIONS) if one.name == name][place]


@attrs.define
class Drawn:
    """A program, which names a tensor that is given by (True, number), and one that it makes by (False, number).

    Attributes:
        is_recorded: Whether it is a recording. Its third input is captured, and then maybe carried.
        commands: Its commands.
        results: What it returns, if it is a recording; what else it leaves is of no use to others.
        carried: What the next replay gets for the third input.
    """

    is_recorded: bool
    commands: list[tuple[Any, ...]] = attrs.field(factory=list)
    results: list[int] = attrs.field(factory=list)
    carried: list[int] = attrs.field(factory=list)


def flat(args: Sequence[Any]) -> list[Any]:
    return [one for each in args for one in (each if isinstance(each, list) else [each])]


def drawn(rng: random.Random) -> Drawn:
    program = Drawn(rng.random() < 0.5)
    alive = {(True, ref): shape for ref, shape in GIVEN.items()}
    made = 0
    some = [*rng.sample(range(len(OPERATIONS)), 8), *rng.sample(RARE, 1)]
    for _ in range(rng.randint(6, 24)):
        if rng.random() < 0.1:
            choices = [one for one in alive if not (program.is_recorded and one[0])]
            if choices:
                gone = rng.choice(choices)
                del alive[gone]
                program.commands.append((FREE, [gone]))
            continue
        code = rng.choice(some)
        operation = OPERATIONS[code]
        places = [[one for one, shape in alive.items() if shape == wanted][-3:] for wanted in operation.takes]
        if not all(places):
            continue
        numbers = [rng.choice(operation.numbers)] if NUMBER_SLOT in flat(operation.args) else []
        program.commands.append((code + 16, made, [rng.choice(those) for those in places], numbers))
        alive |= {(False, made + index): shape for index, shape in enumerate(operation.makes)}
        made += len(operation.makes)
    left = [number for (is_given, number), shape in alive.items() if shape and not is_given]
    program.results = rng.sample(left, len(left) // 2)
    others = [number for number in left if number not in program.results and alive[False, number] == MATRIX]
    program.carried = others[:1]
    return program


def streamed(program: Drawn, first: int) -> list[Any]:
    """Return the commands as a stream that makes tensors from a ref on."""

    def ref(one: tuple[bool, int]) -> int:
        if one[0]:
            return one[1] + (900 if program.is_recorded and one[1] != 3 else 0)
        return first + one[1]

    stream: list[Any] = []
    for code, *rest in program.commands:
        if code == FREE:
            stream += [FREE, [ref(one) for one in rest[0]]]
        else:
            stream += [code, first + rest[0], *map(ref, rest[1]), *rest[2]]
    return stream


def recording(program: Drawn) -> list[Any]:
    formals = [900 + ref for ref in GIVEN if ref != 3]
    results, carried = ([1000 + one for one in those] for those in (program.results, program.carried))
    pairs = [[one, 3] for one in carried]
    return [RECORD, 1, 0, [streamed(program, 1000)], formals, results, [3], pairs]


def listed(*lines: str) -> Drawn:
    """Return a program: each line has a name of an operation, its place among those of the name, and operands.

    Capitals are given, small letters made, in order.
    """
    program, made = Drawn(is_recorded=False), 0
    for line in lines:
        name, place, *words = line.split()
        code = [at for at, one in enumerate(OPERATIONS) if one.name == f"aten::{name}"][int(place)]
        refs = [(one.isupper(), ord(one.lower()) - ord("a") + one.isupper()) for one in words if one.isalpha()]
        numbers = [float(one) if "." in one else int(one) for one in words if not one.isalpha()]
        program.commands.append((code + 16, made, refs, numbers))
        made += len(OPERATIONS[code].makes)
    return program


VIEWS = {
    "base is written to": listed("select.int 0 A", "add_.Tensor 0 A B", "add.Tensor 1 B a", "add_.Tensor 1 B a"),
    "view is written to": listed("select.int 0 A", "mul_.Tensor 0 a 2", "mul.Tensor 0 A 0.5", "sigmoid 0 A"),
    "another view is": listed(
        *("select.int 0 A", "select.int 1 A", "mul_.Tensor 0 b 2", "add.Tensor 1 B a"),
        *("mul_.Tensor 0 a -3", "add.Tensor 1 B b", "copy_ 0 a b", "sigmoid 0 A"),
    ),
    "view of a view": listed(
        *("t 0 A", "select.int 0 a", "split.Tensor 0 A", "mul_.Tensor 0 b 2", "mul_.Tensor 1 c -1", "sigmoid 0 a"),
        *("add.Tensor 1 B b", "cat 0 d c"),
    ),
    "elements that overlap": listed(
        *("select.int 0 A", "unfold 0 a", "fill_.Scalar 0 b 3", "sigmoid 0 A", "mul_.Tensor 0 a 2", "sum 0 b"),
        *("select.int 1 A", "unfold 0 e", "copy_ 0 e D", "sum 0 f", "add_.Tensor 0 A B", "sum 0 f", "sum 0 b"),
    ),
    "one place many times": listed(
        *("select.int 0 A", "expand 0 a", "mul_.Tensor 0 a 2", "sigmoid 0 b", "add_.Tensor 0 B b", "sigmoid 0 A"),
        *("add_.Tensor 0 A B", "mm 0 b B"),
    ),
    "elements that overlap alone": listed(
        *("unfold 0 D", "fill_.Scalar 0 a 3", "sum 0 a", "mul_.Tensor 0 D 2", "sum 0 a", "unfold 0 D", "sum 0 d")
    ),
    "elements of rows that overlap": listed(
        *("unfold 1 A", "select.int 3 a", "fill_.Scalar 0 b 3", "sigmoid 0 A", "mul_.Tensor 1 c 2", "select.int 0 A"),
        *("mul_.Tensor 0 d 2", "sum 0 b", "add_.Tensor 0 A B", "sum 0 b"),
    ),
    "some of the elements that overlap": listed(
        *("select.int 0 A", "unfold 0 a", "fill_diagonal_ 0 b 3", "sigmoid 0 A", "sum 0 b", "fill_diagonal_ 0 b 0.5"),
        *("sum 0 b", "sigmoid 0 a", "unfold 0 D", "fill_diagonal_ 0 g 2", "sum 0 g", "add.Tensor 1 A D"),
    ),
    "first of the elements of rows that overlap": listed(
        *("unfold 1 A", "select.int 3 a", "zeros_like 0 E", "index_fill_.int_Scalar 0 b c 3", "sigmoid 0 A", "sum 0 b"),
        *("fill_diagonal_ 0 b 2", "sigmoid 0 A", "sum 0 b"),
    ),
    "first of the elements of columns that overlap": listed(
        *("unfold 0 A", "select.int 1 a", "zeros_like 0 E", "index_fill_.int_Scalar 0 b c 3", "sigmoid 0 A", "sum 0 b"),
        *("fill_diagonal_ 0 b 2", "sigmoid 0 A", "sum 0 b"),
    ),
    "view of a copy": listed(
        *("select.int 0 A", "detach 0 a", "mul_.Tensor 0 b 2", "sigmoid 0 A", "add_.Tensor 0 A B", "add.Tensor 1 B b"),
        *("select.int 1 A", "detach 0 e", "mul_.Tensor 0 f -1", "add.Tensor 1 A e", "add.Tensor 1 B b"),
    ),
    "lists": listed("select.int 0 A", "_foreach_mul_.Scalar 0 A a", "_foreach_mul_.Scalar 0 B a", "sigmoid 0 A"),
    "healed": listed(
        *("select.int 0 A", "select.int 1 A", "add_.Tensor 1 A a", "fill_.Scalar 0 A 3", "sigmoid 0 A", "sigmoid 0 b"),
        *("add_.Tensor 1 A a", "fill_.Scalar 0 A 2", "add.Tensor 1 B a"),
    ),
    "refused": listed("select.int 0 A", "add_.Tensor 1 A a", "sigmoid 0 B"),
}
"""Programs of views that are copies on the ranks, by what they show."""

TIMES = ("", "", "", "")
"""In which an input is as before: learnt by the fourth."""

LISTED = {
    "layout": (listed("mul.Tensor 0 B 2", "mm 0 A C", "add.Tensor 0 a b"), ["layout", "", "layout"]),
    "sum that is added up": (
        listed("unique_consecutive 0 D", "add.Tensor 2 D 2", "mul.Tensor 0 A 0.5", "t 0 e"),
        ["", "twice", ""],
    ),
    "sum of two": (
        listed("add.Tensor 0 B C", "mul.Tensor 0 B 2", "sigmoid 0 C", "t 0 B", "add.Tensor 0 d a"),
        ["layout", "", "layout"],
    ),
    "views": (
        listed("detach 0 C", "t 0 C", "sigmoid 0 a", "add.Tensor 0 C b", "mul.Tensor 0 a 2"),
        ["layout", "one memory"],
    ),
    "sum that is added up, with a view elsewhere": (
        listed("add.Tensor 2 D 2", "add.Tensor 1 A D", "mul.Tensor 0 b 2"),
        ["view elsewhere", "view elsewhere", "", "view elsewhere"],
    ),
    "what runs as it is": (
        listed("sum.dim_IntList 0 B 0", "unique_consecutive 0 a", "add.Tensor 2 a 2", "t 0 A", "mul.Tensor 0 f 2"),
        ["layout", "", "dtype"],
    ),
    "one tensor twice": (
        listed("add.Tensor 0 A B", "mul.Tensor 0 a 2", "add_.Tensor 0 A a", "mm 0 B a"),
        ["twice", "twice", "twice", "", "twice"],
    ),
    "sum that is made, and added up": (
        listed("sum.dim_IntList 0 A 0", "unique_consecutive 0 a", "add.Tensor 2 a 2", "t 0 A", "mul.Tensor 0 A 2"),
        ["", "twice", ""],
    ),
    "sum that is added up, with its view": (
        listed("detach 0 D", "unique_consecutive 0 D", "add.Tensor 2 D 2", "add.Tensor 2 a 2", "t 0 A"),
        ["", ""],
    ),
    "write": (listed("detach 0 C", "add_.Tensor 0 C B", "sigmoid 0 C", "mul.Tensor 0 a 2", "mm 0 a B"), ["twice", ""]),
    "failure of what runs as it is": (
        listed("mul.Tensor 0 A 2", "mm 0 a B", "bincount 0 E", "sigmoid 0 b", "index_select 0 A E", "t 0 B"),
        ["negative", "index", "negative", ""],
    ),
    "failure": (
        listed("mul.Tensor 0 A 2", "index_select 0 A E", "mm 0 a B", "t 0 b"),
        ["index", "", "index", "poison"],
    ),
}
"""Programs, and how their inputs differ after some times."""
