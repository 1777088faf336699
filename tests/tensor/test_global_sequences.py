"""Sequences and recordings on global tensors leave what their commands leave, by the rules and in plain torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.drawn_programs import (  # noqa: E402 - after the skip
    GIVEN,
    LISTED,
    OPERATIONS,
    TIMES,
    VIEWS,
    Drawn,
    code_of,
    definitions,
    drawn,
    listed,
    recording,
    streamed,
)
from tests.tensor.two_ranks import HERE, a_rank, on_each, open_meshes  # noqa: E402

from trimesh import limits  # noqa: E402
from trimesh.tensor.dtensor.copied_view import copied_views, has_copied_views  # noqa: E402
from trimesh.tensor.dtensor.operators import operator_on_globals, overlap_in_part  # noqa: E402
from trimesh.tensor.dtensor.sharding import (  # noqa: E402
    KeptPlacements,
    adopted,
    assemble,
    box_by_placements,
    boxed,
    is_first_replica,
    lent_to_function,
    part_on_rank,
    placements_by_label,
    unsummed,
)
from trimesh.tensor.kernels.table import KERNELS  # noqa: E402
from trimesh.tensor.protocol.arguments import SLOT, describe  # noqa: E402
from trimesh.tensor.protocol.messages import DEFINE, RECORD, REPLAY  # noqa: E402
from trimesh.tensor.rank.kernel import Kernel, Kernels, Poison, laid_out, local_of, memory_of  # noqa: E402
from trimesh.tensor.rank.rank import Rank, TeamOnRank  # noqa: E402
from trimesh.tensor.rank.reader import CommandReader, SequenceReader  # noqa: E402
from trimesh.tensor.rules.engine import RuleEngine, engine_of  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def by_rules(name: str, operator: Any) -> Any:
    return attrs.evolve(operator_on_globals(name, operator), learnt=None)


def no_replay() -> Any:
    return SimpleNamespace(run=lambda *_: 0)


UNLEARNT = Kernels(KERNELS.by_name, {"global": by_rules}, no_replay, no_replay)


meshes = pytest.fixture(scope="module")(open_meshes)


WAYS = ("strides", "twice", "one memory", "poison", "index", "negative", "layout", "dtype", "gone")


def inputs(way: str, number: int) -> dict[int, Any]:
    generator = torch.Generator().manual_seed(number)
    found = {ref: torch.randn(shape, generator=generator, dtype=torch.float64) for ref, shape in GIVEN.items()}
    found[5] = torch.tensor([1, {"index": 99, "negative": -1}.get(way, number % 4), 0, 2])
    if way == "strides":
        found[1] = found[1].t()
    elif way == "dtype":
        found[3] = found[3].float()
    return found


ELSEWHERE = 6
"""A tensor that no program uses."""

SPECS: dict[Any, Any] = {}


def lay_as_before(rank: Rank) -> None:
    """Let the inputs have the very layouts of earlier ones, as results have: operators are learnt for them."""
    for ref in GIVEN:
        spec = getattr(rank.values.get(ref), "_spec", None)
        if spec is not None:
            rank.values[ref]._spec = SPECS.setdefault((rank.number, spec), spec)


def give(rank: Rank, team: TeamOnRank, mesh: Any, cuts: Sequence[Any], way: str, number: int) -> None:
    """Give a rank the inputs of a program, global ones if there is a mesh."""
    rank.values.pop(ELSEWHERE, None)
    for ref, whole in inputs(way, number).items():
        placement = cuts[2 if ref == 2 and way == "layout" else ref - 1]
        if mesh is None:
            rank.values[ref] = whole
            continue
        box = box_by_placements(whole.size(), mesh, [placement])
        spots = tuple(slice(begin, begin + size) for begin, size in zip(box.start, box.size, strict=True))
        part = whole[spots].clone()
        if placement.is_partial():
            part *= [0.75, 0.25][rank.number]
        like = torch.empty_strided(whole.size(), whole.stride(), device="meta")
        rank.values[ref] = assemble(part, mesh, [placement], like)
    if way == "twice":
        rank.values[2] = rank.values[1]
    elif way in ("one memory", "view elsewhere"):
        alias = torch.ops.aten.detach.default
        one, ref = (rank.values[1], 2) if way == "one memory" else (rank.values[4], ELSEWHERE)
        named = operator_on_globals("aten::detach", alias)
        rank.values[ref] = alias(one) if mesh is None else named.function(rank, team, one)
    elif way == "poison":
        rank.values[3] = Poison(1, 0, "given", ValueError("given"))
    elif way == "gone":  # a recording has it
        rank.values.pop(3)


def poisons(values: dict[int, Any]) -> dict[int, Any]:
    return {
        ref: (one.number, one.what, type(one.error), str(one.error).split("\n")[0], one.kept is None)
        for ref, one in values.items()
        if type(one) is Poison
    }


def together(values: dict[int, Any], key: Any) -> list[list[int]]:
    """Return the refs of tensors that have something in common."""
    found: dict[Any, list[int]] = {}
    for ref, one in sorted(values.items()):
        if isinstance(one, torch.Tensor):
            found.setdefault(key(one), []).append(ref)
    return list(found.values())


def bits(value: Any) -> Any:
    return local_of(value).contiguous().reshape(-1).view(torch.uint8)


def fresh(rank: Rank) -> None:
    views = copied_views(rank)
    for ref in sorted(rank.values):
        if isinstance(rank.values[ref], torch.Tensor):
            views.refresh(rank.values[ref])


def assert_alike(rank: Rank, rules: Rank) -> None:
    """Require equal tensors in equal layouts, which share what they share."""
    mine, theirs = rank.values, rules.values
    assert mine.keys() == theirs.keys()
    assert poisons(mine) == poisons(theirs)
    assert together(mine, id) == together(theirs, id)
    assert together(mine, memory_of) == together(theirs, memory_of)
    for ref, one in mine.items():
        other = theirs[ref]
        if isinstance(one, torch.Tensor):
            assert one._spec == other._spec, ref
            assert local_of(one).stride() == local_of(other).stride(), ref
            assert local_of(one).dtype is local_of(other).dtype, ref
            assert torch.equal(bits(one), bits(other)), ref
            assert engine_of(rank).sums.is_shared(one) == engine_of(rules).sums.is_shared(other), ref
    counts, others = engine_of(rank).counts, engine_of(rules).counts
    assert (counts.all, counts.fallbacks) == (others.all, others.fallbacks)


def joined(parts: Sequence[Any]) -> Any:
    """Return a whole tensor of its parts on both ranks."""
    [placement], (one, other) = parts[0].placements, map(local_of, parts)
    if placement.is_shard():
        return torch.cat([one, other], placement.dim)
    if placement.is_partial():
        return one + other
    torch.testing.assert_close(one, other, equal_nan=True, rtol=0, atol=0)
    return one


def assert_plain(ranks: Sequence[Rank], plain: Rank, *, may_differ: bool = True) -> None:
    """Require the values that plain tensors have after the same commands.

    Torch refuses to write to memory that it reads, which copies of views on the ranks need not be.
    """
    for one in plain.values.values():
        if may_differ and type(one) is Poison and "some elements of the input tensor" in str(one.error):
            return
    for ref, one in plain.values.items():
        found = [rank.values[ref] for rank in ranks]
        assert [type(it) is Poison for it in found] == [type(one) is Poison] * 2, (ref, one, found)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(joined(found), one, equal_nan=True)


def run(
    reader: Any, program: Drawn, cuts: Sequence[Any], ways: Sequence[str], number: int, mesh: Any
) -> Iterator[tuple[Rank, TeamOnRank]]:
    """Run a program on a rank once for each way in which its inputs may differ; yield the rank after each."""
    reader.read(definitions(are_global=mesh is not None), [])
    rank, team = a_rank(number)
    for at, way in enumerate(ways):
        if not program.is_recorded:
            rank.values.clear()
        give(rank, team, mesh, cuts, way, at)
        if isinstance(reader, CommandReader):
            lay_as_before(rank)
        stream = streamed(program, 1000 + 100 * at)
        if program.is_recorded:
            stream = [] if at else recording(program)
            stream += [REPLAY, 1, 0, 2000 + 100 * at, [ref for ref in GIVEN if ref != 3], 0]
        for step in reader.read(stream, []):
            step.execute(rank, team)
        if mesh is not None:
            fresh(rank)
        yield rank, team


@attrs.define
class Alone:
    """What ran since `clear`: commands one by one, with their rank, and operators by the rules, with their engine."""

    commands: list[tuple[Rank, str]] = attrs.field(factory=list)
    by_rules: list[RuleEngine] = attrs.field(factory=list)

    def clear(self) -> None:
        self.commands.clear()
        self.by_rules.clear()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Alone:
    counts, execute, run_by_rules = Alone(), Rank.execute, RuleEngine.run

    def counted(rank: Rank, team: TeamOnRank, command: Any) -> None:
        counts.commands.append((rank, command.signature.name))
        execute(rank, team, command)

    def counted_run(engine: RuleEngine, *args: Any) -> Any:
        counts.by_rules.append(engine)
        return run_by_rules(engine, *args)

    monkeypatch.setattr(Rank, "execute", counted)
    monkeypatch.setattr(RuleEngine, "run", counted_run)
    return counts


def assert_learnt(rank: Rank, alone: Alone, *, are_sequences: bool) -> None:
    """Require that a program that has run before has hardly needed the rules."""
    if has_copied_views(rank) or Poison in map(type, rank.values.values()):
        return
    if are_sequences:
        names = {name for one, name in alone.commands if one is rank}
        assert "aten::bincount" in names or names <= {"aten::unique_consecutive"}  # its size varies
    else:
        assert alone.by_rules.count(engine_of(rank)) < len(alone.by_rules) / 4


@pytest.mark.parametrize("name", VIEWS)
def test_views_that_are_copies_are_views(meshes: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes to a view reach its base and other views, and the other way round, wherever the rows lie."""
    from torch.distributed.tensor import Replicate, Shard

    monkeypatch.setattr(limits, "TENSOR_SEQUENCE_COMMANDS_MIN", 2)
    for cut in (Shard(0), Shard(1), Replicate()):
        cuts = [cut, Shard(0), Replicate(), Shard(0) if cut == Shard(0) else Replicate(), Replicate()]
        readers: list[Any] = [CommandReader(CPU, UNLEARNT) for _ in range(3)]
        readers[:2] = [SequenceReader(CommandReader(CPU, KERNELS), KERNELS.local_sequence) for _ in range(2)]
        mine = [
            run(reader, VIEWS[name], cuts, ["", ""], at, mesh)
            for at, (reader, mesh) in enumerate(zip(readers, meshes, strict=False))
        ]
        plain = run(readers[2], VIEWS[name], cuts, ["", ""], 0, None)
        for _ in range(2):
            ended: list[Any] = [None, None]

            def step(number: int, ended: list[Any] = ended, mine: list[Any] = mine) -> None:
                ended[number] = next(mine[number])[0]

            on_each(step)
            expected = next(plain)[0]
            assert (Poison in map(type, expected.values.values())) == (name == "refused")
            errors = [str(one.error) for rank in ended for one in rank.values.values() if type(one) is Poison]
            assert all("some elements of the input tensor" in error for error in errors)
            assert_plain(ended, expected, may_differ=False)


@pytest.mark.parametrize(("is_recorded", "is_sum"), [(False, False), (False, True), (True, False), (True, True)])
def test_what_has_run_before_runs_no_command_by_itself(
    meshes: Any, monkeypatch: pytest.MonkeyPatch, alone: Alone, is_recorded: bool, is_sum: bool
) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    monkeypatch.setattr(limits, "TENSOR_SEQUENCE_COMMANDS_MIN", 2)
    program = listed("mul.Tensor 0 A 2", "mm 0 a B", "sum.dim_IntList 0 b 0", "add.Tensor 1 b c", "sigmoid 0 d")
    if is_sum:
        program = listed("sigmoid 0 A", *["mm 0 a B", "t 0 A", "mul.Tensor 0 c 2", "sigmoid 0 A"])
    program.is_recorded, program.results = is_recorded, [4]
    cuts = [Partial() if is_sum else Shard(0), Replicate(), Replicate(), Replicate(), Replicate()]
    commands: list[int] = []
    ranks = [
        run(SequenceReader(CommandReader(CPU, KERNELS), KERNELS.local_sequence), program, cuts, [""] * 4, at, mesh)
        for at, mesh in enumerate(meshes)
    ]
    for _ in range(4):
        alone.clear()
        on_each(lambda number: next(ranks[number]))
        commands.append(len(alone.commands))
    assert commands == ([10, 0, 0, 0] if is_recorded else [10, 10, 0, 0])


def test_learnt_sequence_is_not_for_a_rank_with_views_that_are_copies(
    meshes: Any, monkeypatch: pytest.MonkeyPatch, alone: Alone
) -> None:
    from torch.distributed.tensor import Replicate, Shard

    monkeypatch.setattr(limits, "TENSOR_SEQUENCE_COMMANDS_MIN", 2)
    cuts, program = [Shard(0), *[Replicate()] * 4], listed("mul.Tensor 0 A 2", "t 0 a")
    runs = [
        run(SequenceReader(CommandReader(CPU, KERNELS), KERNELS.local_sequence), program, cuts, [""] * 6, at, mesh)
        for at, mesh in enumerate(meshes)
    ]
    views: dict[int, Any] = {}
    ranks: dict[int, tuple[Rank, TeamOnRank]] = {}
    commands: list[int] = []

    def step(number: int) -> None:
        ranks[number] = next(runs[number])

    def view(number: int) -> None:
        rank, team = ranks[number]
        select = operator_on_globals("aten::select.int", torch.ops.aten.select.int)
        views[number] = select.function(rank, team, rank.values[1], 0, 1)

    for at in range(6):
        views.clear()
        if at == 4:
            on_each(view)
        alone.clear()
        on_each(step)
        commands.append(len(alone.commands))
    assert commands == [4, 4, 0, 0, 4, 0]


def test_tensors_overlap_in_part_where_torch_refuses_them() -> None:
    rng = random.Random(0)

    def some() -> Any:
        size = [rng.choice([0, 1, 2, 2, 3]) for _ in range(rng.randint(1, 3))]
        strides = [rng.choice([1, 1, 2, 3, 4, 6]) for _ in size]
        return torch.arange(40.0).as_strided(size, strides, rng.choice([0, 1, 2, 4, 6]))

    found = {True: 0, False: 0}
    for _ in range(3_000):
        one, like = some(), some()
        memory = torch.arange(40.0)
        one = memory.as_strided(one.size(), one.stride(), one.storage_offset())
        other = (
            memory.as_strided(one.size(), rng.choice([one, like]).stride()[: one.ndim], like.storage_offset())
            if (like.ndim >= one.ndim)
            else one
        )
        if other.ndim != one.ndim:
            continue
        try:
            one.add_(other)
        except RuntimeError as error:
            if "some elements of the input tensor" not in str(error):
                continue
            is_refused = True
        else:
            is_refused = False
        found[is_refused] += 1
        assert overlap_in_part(one, other) == is_refused, (one.size(), one.stride(), other.stride())
    assert min(found.values()) > 50
    memory = torch.arange(40.0)
    assert not overlap_in_part(memory[4:4], memory[:8])
    assert not overlap_in_part(memory[:8], memory[4:4])


def test_parts_are_those_of_their_boxes(meshes: Any) -> None:
    """Each rank has one box of a tensor, and one of them is the first that has it."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        boxes: list[Any] = [None, None]

        def step(number: int, placement: Any = placement, boxes: list[Any] = boxes) -> None:
            rank, team = a_rank(number)
            give(rank, team, meshes[number], [placement, *[Replicate()] * 4], "", 3)
            value = rank.values[1]
            box, local, made = part_on_rank(value)
            boxes[number] = box
            assert (made is value) == (not placement.is_partial())
            spots = tuple(slice(begin, begin + size) for begin, size in zip(box.start, box.size, strict=True))
            torch.testing.assert_close(local, inputs("", 3)[1][spots])
            assert is_first_replica(made) == (made.placements[0].is_shard() or number == 0)
            assert unsummed(value.placements) == [Replicate() if placement.is_partial() else placement]
            assert boxed([Partial(), Shard(1), Replicate()]) == [Replicate(), Shard(1), Replicate()]

        on_each(step)
        assert (boxes[0] == boxes[1]) == (not placement.is_shard())
        assert sum(one.count for one in boxes) == (16 if placement.is_shard() else 32)
    wrong = assemble(torch.ones(3, 4), meshes[0], [Shard(0)], torch.empty(4, 4, device="meta"))
    with pytest.raises(RuntimeError, match=r"a part of \(4, 4\) by .* must have size \(2, 4\), got \(3, 4\)"):
        part_on_rank(wrong)
    assert placements_by_label([]) == placements_by_label([-1]) == [Replicate()]
    assert placements_by_label([1, -1]) == [Shard(1), Replicate()]


def test_tensors_of_functions_are_checked(meshes: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    def made(part: Any, placement: Any, mesh: Any, **whole: Any) -> Any:
        return DTensor.from_local(part, mesh, [placement], run_check=False, **whole)

    def step(number: int) -> None:
        mesh, other = meshes[number], meshes[1 - number]
        part = torch.arange(8.0).reshape(2, 4)
        for placement in (Shard(0), Replicate(), Partial()):
            value = made(part, placement, mesh)
            assert adopted("f", value, mesh)._local_tensor.data_ptr() == part.data_ptr()
            assert adopted("f", value, mesh).placements == (placement,)
        turned = made(part.t(), Shard(1), mesh, shape=torch.Size([4, 4]), stride=(4, 1))
        found = adopted("f", turned, mesh)
        assert found._local_tensor.stride() == (2, 1)
        assert torch.equal(found._local_tensor, part.t())
        found = adopted("f", made(part, Replicate(), mesh), mesh, (1, 2))
        assert (found.stride(), local_of(found).stride()) == ((1, 2), (1, 2))
        same = copy.copy(mesh)
        assert adopted("f", made(part, Shard(0), same), mesh).device_mesh is mesh
        late = SimpleNamespace(wait=lambda: part + 1)
        value = made(part, Replicate(), mesh)
        value._local_tensor = late
        assert torch.equal(adopted("f", value, mesh)._local_tensor, part + 1)
        with pytest.raises(TypeError, match="that f returns must be on the device mesh of the ranks"):
            adopted("f", made(part, Shard(0), other), mesh)
        with pytest.raises(TypeError, match="that f returns must be sharded, replicated or partial"):
            adopted("f", made(part, Partial("avg"), mesh), mesh)
        with pytest.raises(TypeError, match=r"that f returns must be cut as torch\.chunk cuts"):
            adopted("f", made(part, Shard(0), mesh, shape=torch.Size([6, 4]), stride=(4, 1)), mesh)

    on_each(step)


@pytest.mark.parametrize(("name", "limit", "count", "expected"), [
    ("LAYOUTS", 1, 6, [1] * 6), ("LAYOUTS", 2, 6, [1, 1, 0, 0, 0, 0]),
    ("OPERANDS", 0, 2, [1, 1]), ("OPERANDS", 1, 3, [1, 1, 0]),
])  # fmt: skip
def test_rank_learns_operators_of_few_tensors_in_so_many_layouts(
    meshes: Any, monkeypatch: pytest.MonkeyPatch, alone: Alone, name: str, limit: int, count: int, expected: list[int]
) -> None:
    from torch.distributed.tensor import Replicate, Shard

    monkeypatch.setattr(limits, f"TENSOR_{name}_LEARNT", limit)
    HERE.rank = 0
    (rank, team), reader = a_rank(0), CommandReader(CPU, KERNELS)
    reader.read(definitions(are_global=True), [])
    give(rank, team, meshes[0], [Shard(0), Shard(1), *[Replicate()] * 3], "", 0)
    ran: list[int] = []
    for number in range(count):
        alone.clear()
        for step in reader.read([code_of("aten::sigmoid"), 10 + number, 1 + number % 2], []):
            step.execute(rank, team)
        ran.append(len(alone.by_rules))
        assert torch.equal(local_of(rank.values[10 + number]), local_of(rank.values[1 + number % 2]).sigmoid())
    assert ran == expected


def test_results_of_learnt_operators_have_one_layout(meshes: Any, alone: Alone) -> None:
    """So what reads them is learnt, too."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    HERE.rank = 0
    chain = [("aten::detach", 10, 1), ("aten::t", 11, 10), ("aten::expand", 12, 4), ("aten::select.int", 13, 11)]
    for placement in (Replicate(), Shard(0), Partial()):
        (rank, team), reader = a_rank(0), CommandReader(CPU, KERNELS)
        reader.read(definitions(are_global=True), [])
        specs: list[list[Any]] = []
        for _ in range(3):
            give(rank, team, meshes[0], [placement, *[Replicate()] * 4], "", 0)
            lay_as_before(rank)
            alone.clear()
            for name, first, ref in chain:
                for step in reader.read([code_of(name), first, ref], []):
                    step.execute(rank, team)
            specs.append([rank.values[first]._spec for _, first, _ in chain])
            shared = [engine_of(rank).sums.is_shared(rank.values[ref]) for ref in (1, 10, 11)]
            assert shared == [placement.is_partial()] * 3
        assert alone.by_rules == []
        assert [one is other for one, other in zip(*specs[1:], strict=True)] == [True] * 4


@pytest.mark.parametrize("usual", [False, True])
@pytest.mark.parametrize("is_sequence", [False, True])
def test_tensor_that_each_rank_has_is_taken_for_a_whole_one(
    meshes: Any, is_sequence: bool, usual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by what was learnt for a global one."""
    from torch.distributed.tensor import Replicate, Shard

    monkeypatch.setattr(limits, "TENSOR_SEQUENCE_COMMANDS_MIN", 2)
    HERE.rank = 1
    (rank, team), reader = a_rank(1), CommandReader(CPU, KERNELS)
    reader.read(definitions(are_global=True), [])
    learning: Any = SequenceReader(reader, KERNELS.local_sequence) if is_sequence else reader
    part, row, whole = torch.ones(2, 4), torch.arange(4.0), torch.empty(4, 4, device="meta")
    rows = {True: row, False: assemble(row, meshes[1], [Replicate()], row)}
    rank.values[1] = assemble(part, meshes[1], [Shard(0)], whole)
    add = [code_of("aten::add.Tensor", 1)]
    for first, is_plain in enumerate([usual] * 4 + [not usual, not usual, usual]):
        rank.values[4] = rows[is_plain]
        for step in learning.read([*add, 10 * first + 10, 1, 4, *add, 10 * first + 11, 1, 4], []):
            step.execute(rank, team)
        assert rank.values[10 * first + 11].placements == (Shard(0),)
        assert torch.equal(local_of(rank.values[10 * first + 11]), part + row)


def test_learnt_operator_depends_on_its_numbers(meshes: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard

    HERE.rank = 0
    (rank, team), reader = a_rank(0), CommandReader(CPU, KERNELS)
    reader.read(definitions(are_global=True), [])
    give(rank, team, meshes[0], [Shard(0), *[Replicate()] * 4], "", 0)
    for dim in (0, 1, 0, 1, 1):
        for step in reader.read([code_of("aten::sum.dim_IntList"), 10, 1, dim], []):
            step.execute(rank, team)
        [placement] = rank.values[10].placements
        assert placement.is_partial() if dim == 0 else placement == Shard(0)
        assert torch.equal(local_of(rank.values[10]), local_of(rank.values[1]).sum(dim))


@pytest.mark.parametrize("is_sequence", [False, True])
def test_gradients_go_back_to_the_placements_that_their_tensor_has_now(
    meshes: Any, is_sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import Replicate, Shard

    monkeypatch.setattr(limits, "TENSOR_SEQUENCE_COMMANDS_MIN", 2)
    HERE.rank = 0
    (rank, team), reader = a_rank(0), CommandReader(CPU, KERNELS)
    reader.read(definitions(are_global=True), [])
    reader.read([DEFINE, 99, ["trimesh::redistribute_back", describe([SLOT, SLOT]), describe({}), [0], []]], [])
    learning: Any = SequenceReader(reader, KERNELS.local_sequence) if is_sequence else reader
    for at, placement in enumerate([Shard(0)] * 4 + [Shard(1), Replicate(), Shard(0), None]):
        give(rank, team, meshes[0], [Replicate()] * 5, "", 0)
        rank.values[4] = KeptPlacements((placement,)) if placement else Poison(1, 0, "given", ValueError("given"))
        stream = [99, 10 * at + 10, 1, 4, code_of("aten::mul.Tensor"), 10 * at + 11, 10 * at + 10, 2]
        for step in learning.read(stream, []):
            step.execute(rank, team)
        made = rank.values[10 * at + 11]
        assert type(made) is Poison if placement is None else made.placements == (placement,)


def test_random_numbers_are_drawn_anew_from_the_generator_of_the_team(meshes: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard

    HERE.rank = 1
    for placement in (Replicate(), Shard(0)):
        (rank, team), reader = a_rank(1), CommandReader(CPU, KERNELS)
        reader.read([DEFINE, 16, ["global::aten::uniform_", describe([SLOT]), describe({}), [-1], [0]]], [])
        give(rank, team, meshes[1], [placement, *[Replicate()] * 4], "", 0)
        expected = torch.Generator()
        for _ in range(3):
            for step in reader.read([16, 0, 1], []):
                step.execute(rank, team)
            whole = torch.empty(4, 4, dtype=torch.float64).uniform_(generator=expected)
            assert torch.equal(local_of(rank.values[1]), whole[2:] if placement.is_shard() else whole)


def test_learnt_operator_may_return_its_operand(meshes: Any) -> None:
    from torch.distributed.tensor import Replicate

    HERE.rank = 0
    (rank, team), name = a_rank(0), "aten::resolve_conj"
    reader = CommandReader(CPU, KERNELS)
    reader.read([DEFINE, 16, [f"global::{name}", describe([SLOT]), describe({}), [0], []]], [])
    one, other = torch.ones(2, dtype=torch.complex64) * 1j, (torch.ones(2, dtype=torch.complex64) * 1j).conj()
    rank.values.update(
        {1: assemble(one, meshes[0], [Replicate()], one), 2: assemble(other, meshes[0], [Replicate()], one)}
    )
    rank.values[1]._spec = rank.values[2]._spec
    for ref in (2, 1, 2, 1):
        for step in reader.read([16, 10, ref], []):
            step.execute(rank, team)
        assert (rank.values[10] is rank.values[ref]) == (ref == 1)
        assert torch.equal(local_of(rank.values.pop(10)), local_of(rank.values[ref]))
    assert engine_of(rank).counts.all == 4


def replace(_: RuleEngine, value: Any) -> None:
    value._local_tensor = value._local_tensor + 1


@pytest.mark.parametrize("change", [RuleEngine.settle, replace])
@pytest.mark.parametrize("usual", [False, True])
def test_kernel_of_a_recording_may_lay_its_operand_anew(meshes: Any, usual: bool, change: Any) -> None:
    from torch.distributed.tensor import Partial, Replicate

    add = ["global::aten::add.Tensor", describe([SLOT, SLOT]), describe({}), [0], []]
    stream = [DEFINE, 16, ["trimesh::maybe", describe([SLOT]), describe({}), [-1], []], DEFINE, 17, add]
    stream += [RECORD, 1, 0, [[17, 200, 100, 100, 16, 0, 200, 17, 201, 200, 100]], [100], [200, 201], [], []]
    are_changed = [usual] * 4 + [not usual, usual]

    def replayed(number: int, kernels: Kernels) -> Iterator[Any]:
        at = 0

        def maybe(rank: Rank, _: TeamOnRank, value: Any) -> None:
            if are_changed[at]:
                change(engine_of(rank), value)

        by_name = {"maybe": Kernel("maybe", maybe)}
        (rank, team), reader = a_rank(number), CommandReader(CPU, attrs.evolve(kernels, by_name=by_name))
        for at in range(len(are_changed)):
            give(rank, team, meshes[number], [Partial(), *[Replicate()] * 4], "", at)
            for one in reader.read([*([] if at else stream), REPLAY, 1, 0, 50, [1], 0], []):
                one.execute(rank, team)
            yield [(rank.values[ref].placements, local_of(rank.values[ref]).tolist()) for ref in (1, 50, 51)]

    def step(number: int) -> None:
        assert list(replayed(number, KERNELS)) == list(replayed(number, UNLEARNT))

    on_each(step)


def test_functions_see_what_was_written_and_their_writes_are_seen(meshes: Any) -> None:
    """Of a view that is a copy: the row of a tensor that is cut by rows."""
    from torch.distributed.tensor import Replicate, Shard

    cuts = [Shard(0), *[Replicate()] * 4]

    def step(number: int) -> None:
        (rank, team), reader = a_rank(number), CommandReader(CPU, UNLEARNT)
        reader.read(definitions(are_global=True), [])
        give(rank, team, meshes[number], cuts, "", 0)
        row = [code_of("aten::select.int"), 10, 1]
        for one in reader.read([*row, code_of("aten::add_.Tensor"), 0, 1, 2], []):
            one.execute(rank, team)
        base, view = rank.values[1], rank.values[10]
        expected = inputs("", 0)[1] + inputs("", 0)[2]
        assert not torch.equal(local_of(view), expected[1])
        with lent_to_function(rank, [view, 3]):
            assert torch.equal(local_of(view), expected[1])
            local_of(view).mul_(2)
        expected[1] *= 2
        assert torch.equal(local_of(base), expected[2 * number : 2 * number + 2])

    on_each(step)


def test_write_that_torch_might_refuse_is_tried_only_if_it_is_small(
    meshes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import Replicate, Shard

    for nbytes, is_refused in ((4 * 4 * 8 + 4 * 8, True), (4 * 4 * 8 + 4 * 8 - 1, False)):
        monkeypatch.setattr(limits, "TENSOR_TRIED_BYTES_MAX", nbytes)
        ended: list[Any] = [None, None]
        runs = [
            run(CommandReader(CPU, UNLEARNT), VIEWS["refused"], [Shard(0), *[Replicate()] * 4], [""], number, mesh)
            for number, mesh in enumerate(meshes)
        ]

        def step(number: int, ended: list[Any] = ended, runs: list[Any] = runs) -> None:
            ended[number] = next(runs[number])[0]

        on_each(step)
        assert [type(rank.values[1]) is Poison for rank in ended] == [is_refused] * 2


def test_global_tensor_is_laid_out_anew_in_its_parts(meshes: Any) -> None:
    from torch.distributed.tensor import Shard

    HERE.rank = 0
    whole = torch.empty(4, 4, 3, device="meta")
    value = assemble(torch.arange(24.0).reshape(2, 4, 3), meshes[0], [Shard(0)], whole)
    assert laid_out(value, (12, 3, 1)) is value
    for strides, expected in (((1, 12, 4), (1, 6, 2)), ((12, 1, 4), (12, 1, 4)), ((3, 12, 1), (3, 6, 1))):
        found = laid_out(value, strides)
        assert (found.stride(), local_of(found).stride()) == (strides, expected)
        assert torch.equal(local_of(found), local_of(value))
        assert found.placements == (Shard(0),)
        assert found.device_mesh is meshes[0]


def assert_learnt_leaves_what_rules_leave(
    meshes: Any, alone: Alone, program: Drawn, cuts: Sequence[Any], ways: Sequence[str], *, are_sequences: bool,
    is_learnt: bool = True,
) -> None:  # fmt: skip
    """Run a program by what was learnt, by the rules, and in plain torch, once for each way of its inputs."""

    def learning(number: int, mesh: Any) -> Iterator[tuple[Rank, TeamOnRank]]:
        reader: Any = CommandReader(CPU, attrs.evolve(KERNELS, local_replay=no_replay))
        if are_sequences:
            reader = SequenceReader(CommandReader(CPU, KERNELS), KERNELS.local_sequence)
        return run(reader, program, cuts, ways, number, mesh)

    def ruled(number: int, mesh: Any) -> Iterator[tuple[Rank, TeamOnRank]]:
        return run(CommandReader(CPU, UNLEARNT), program, cuts, ways, number, mesh)

    pairs = [(learning(number, mesh), ruled(number, mesh)) for number, mesh in enumerate(meshes)]
    plain = ruled(0, None)
    ended: list[Any] = [None, None]

    def both(number: int) -> None:
        (mine, counts), (rules, others) = map(next, pairs[number])
        assert (counts.done, counts.steps, counts.failed) == (others.done, others.steps, others.failed)
        assert_alike(mine, rules)
        ended[number] = mine

    for _ in ways:
        alone.clear()
        on_each(both)
        assert_plain(ended, next(plain)[0])
    for rank in ended if is_learnt else ():
        assert_learnt(rank, alone, are_sequences=are_sequences)


@pytest.mark.parametrize("seed", range(8))
def test_sequences_on_global_tensors_leave_what_their_commands_leave(
    meshes: Any, seed: int, monkeypatch: pytest.MonkeyPatch, alone: Alone
) -> None:
    """Of other strides, one tensor twice, two of one memory, other data, a poisoned input: as each command alone."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    monkeypatch.setattr(limits, "TENSOR_SEQUENCE_COMMANDS_MIN", 2)
    rng = random.Random(seed)
    program = drawn(rng)
    cuts = [rng.choice([Replicate(), Shard(0), Shard(1), Partial()]) for _ in range(3)]
    cuts += [rng.choice([Replicate(), Shard(0), Partial()]), Replicate()]
    ways = ["", "", "", *rng.sample(WAYS[: 9 if program.is_recorded else 8], 4), ""]
    assert_learnt_leaves_what_rules_leave(meshes, alone, program, cuts, ways, are_sequences=seed % 4 > 0)


@pytest.mark.parametrize("kind", ["commands", "sequence", "recording"])
@pytest.mark.parametrize("name", LISTED)
def test_listed_programs_leave_what_their_commands_leave(
    meshes: Any, name: str, kind: str, monkeypatch: pytest.MonkeyPatch, alone: Alone
) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    monkeypatch.setattr(limits, "TENSOR_SEQUENCE_COMMANDS_MIN", 2)
    listed_program, ways = LISTED[name]
    program = attrs.evolve(listed_program, is_recorded=kind == "recording")
    shapes = [shape for code, *_ in program.commands for shape in OPERATIONS[code - 16].makes]
    program.results = [number for number, shape in enumerate(shapes) if shape]
    cuts = [Shard(0), Replicate(), Partial(), Partial(), Replicate()]
    is_learnt = kind != "commands" and "with its view" not in name
    assert_learnt_leaves_what_rules_leave(
        meshes,
        alone,
        program,
        cuts,
        [*TIMES, *ways, *([] if "twice" in name else [""])],
        are_sequences=kind != "commands",
        is_learnt=is_learnt,
    )
