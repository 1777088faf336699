"""Ranks know sequences of commands again, and run them without the rules, as if each command had come alone."""

from __future__ import annotations

import copy
import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra")


import trimesh  # noqa: E402 - after the skip
from trimesh import limits, this_host  # noqa: E402
from trimesh.tensor import ParallelPlan  # noqa: E402

nn: Any = torch.nn

from tests.tensor.counting import commands_run, count_commands  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from trimesh.errors import ProtocolError  # noqa: E402
from trimesh.shape.extent import Extent  # noqa: E402
from trimesh.tensor.kernels.table import KERNELS  # noqa: E402
from trimesh.tensor.protocol.arguments import NUMBER_SLOT, SLOT, describe  # noqa: E402
from trimesh.tensor.protocol.messages import DEFINE, FREE  # noqa: E402
from trimesh.tensor.rank.kernel import Poison  # noqa: E402
from trimesh.tensor.rank.rank import Rank, TeamOnRank  # noqa: E402
from trimesh.tensor.rank.reader import CommandReader, SequenceReader, SequenceRun  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
ADD, SCALE, SORT, WRITE, TURN, MUL, PICK, FILLED, LOSS, FLAT, BLEND, INVERT, CHECK, UNIQUE = range(16, 30)
DEFINITIONS = [
    DEFINE, ADD, ["aten::add.Tensor", describe([SLOT, SLOT]), describe({}), [0], []],
    DEFINE, SCALE, ["aten::mul.Tensor", describe([SLOT, NUMBER_SLOT]), describe({}), [0], []],
    DEFINE, SORT, ["aten::sort", describe([SLOT]), describe({}), [0, 1], []],
    DEFINE, WRITE, ["aten::add_.Tensor", describe([SLOT, SLOT]), describe({}), [-1], [0]],
    DEFINE, TURN, ["aten::t", describe([SLOT]), describe({}), [0], []],
    DEFINE, PICK, ["aten::index_select", describe([SLOT, 0, SLOT]), describe({}), [0], []],
    DEFINE, FILLED, ["aten::full", describe([[2], NUMBER_SLOT]), describe({}), [0], []],
    DEFINE, LOSS, ["aten::kl_div", describe([SLOT, SLOT]), describe({}), [0], []],
    DEFINE, FLAT, ["aten::flatten.using_ints", describe([SLOT]), describe({}), [0], []],
    DEFINE, BLEND, ["aten::addcmul", describe([SLOT, SLOT, SLOT]), describe({}), [0], []],
    DEFINE, INVERT, ["aten::linalg_inv_ex", describe([SLOT]), describe({}), [0, 1], []],
    DEFINE, CHECK, ["aten::_linalg_check_errors", describe([SLOT, "inv"]), describe({"is_matrix": True}), [-1], []],
    DEFINE, UNIQUE, ["aten::unique_consecutive", describe([SLOT]), describe({}), [0, 1, 2], []],
    DEFINE, MUL, ["aten::mm", describe([SLOT, SLOT]), describe({}), [0], []],
]  # fmt: skip


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> SequenceReader:
    monkeypatch.setattr(limits, "TENSOR_SEQUENCE_COMMANDS_MIN", 2)
    made = SequenceReader(CommandReader(CPU, KERNELS), KERNELS.local_sequence)
    made.read(DEFINITIONS, [])
    return made


def is_known(reader: SequenceReader, stream: list[Any]) -> bool:
    return [type(step) for step in reader.read(stream, [])] == [SequenceRun]


def adding(first: int, one: int, other: int, more: int, number: Any = 2) -> list[Any]:
    return [ADD, first, one, other, SCALE, first + 1, first, number, FREE, [first], ADD, first + 2, first + 1, more]


def test_sequence_is_known_by_which_of_its_tensors_are_the_same(reader: SequenceReader) -> None:
    assert not is_known(reader, adding(10, 1, 2, 1))
    assert is_known(reader, adding(20, 5, 3, 5))
    assert not is_known(reader, adding(30, 5, 3, 4))
    assert not is_known(reader, adding(40, 5, 5, 5))
    assert not is_known(reader, adding(50, 5, 3, 51))
    assert is_known(reader, adding(60, 8, 9, 8))


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (0.0, -0.0), (1, True), (2, 3)])
def test_sequence_is_known_by_its_numbers(reader: SequenceReader, one: Any, other: Any) -> None:
    assert not is_known(reader, adding(10, 1, 2, 1, one))
    assert is_known(reader, adding(20, 1, 2, 1, one))
    assert not is_known(reader, adding(30, 1, 2, 1, other))
    assert is_known(reader, adding(40, 1, 2, 1, float("nan"))) is False
    assert is_known(reader, adding(50, 1, 2, 1, float("nan")))


def test_sequence_is_not_known_any_more_when_an_operation_is_defined_anew(reader: SequenceReader) -> None:
    for first in (10, 20):
        reader.read(adding(first, 1, 2, 1), [])
    reader.read([DEFINE, ADD, ["aten::sub.Tensor", describe([SLOT, SLOT]), describe({}), [0], []]], [])
    (rank, team), steps = a_rank(), reader.read(adding(30, 1, 2, 1), [])
    for step in steps:
        step.execute(rank, team)
    assert torch.equal(rank.values[32], 2 * (rank.values[1] - rank.values[2]) - rank.values[1])


@pytest.mark.parametrize("freed", [5, "ab", (1, 2), None, [[1], 2], [-1, 10]])
def test_list_of_an_expected_sequence_that_is_none_breaks_the_protocol(reader: SequenceReader, freed: Any) -> None:
    def stream(first: int, freed: Any) -> list[Any]:
        return [ADD, first, 1, 2, ADD, first + 1, first, 3, FREE, freed]

    for first in (10, 20, 30, 40):
        reader.read(stream(first, [first, first + 1]), [])
    with pytest.raises(ProtocolError):
        for step in reader.read(stream(50, freed), []):
            step.execute(*a_rank())
        assert freed == [-1, 10]  # is a tensor that is not there, which is freed in vain
        raise ProtocolError


@pytest.mark.parametrize(("place", "word"), [(1, True), (2, True), (1, 10.0), (2, -1), (0, 99), (7, None)])
def test_word_of_an_expected_sequence_that_is_none_breaks_the_protocol(
    reader: SequenceReader, place: int, word: Any
) -> None:
    for first in (10, 20, 30, 40):
        reader.read([ADD, first, 1, 2, ADD, first + 1, 1, 3], [])
    stream: list[Any] = [ADD, 50, 1, 2, ADD, 51, 1, 3]
    stream[place] = word
    with pytest.raises(ProtocolError):
        reader.read(stream, [])


@pytest.mark.parametrize("words", [[ADD, True, 1, 2], [ADD, 10.0, 1, 2], [ADD, 10, 1], [ADD, 10, 1, None], [ADD]])
def test_malformed_command_breaks_the_protocol_each_time(reader: SequenceReader, words: list[Any]) -> None:
    for _ in range(4):
        with pytest.raises(ProtocolError):
            reader.read([ADD, 10, 1, 2, ADD, 11, 10, 3, *words], [])


def test_status_of_a_result_is_known_whatever_sequence_it_is_in(reader: SequenceReader) -> None:
    """A check that fails poisons the result, where commands like it have come before."""
    for number in range(1, 5):
        first, (rank, team) = 100 * number, a_rank()
        rank.values[8] = torch.zeros(2, 2) if number > 2 else torch.eye(2)
        invert = [TURN, first, 8, TURN, first + 1, first, INVERT, first + 2, first + 1, TURN, first + 4, 8]
        check = [TURN, first + 5, 8, TURN, first + 6, first + 5, CHECK, 0, first + 3, TURN, first + 7, 8]
        for step in [*reader.read(invert, []), *reader.read(check, [])]:
            step.execute(rank, team)
        poisoned = [ref - first for ref, value in rank.values.items() if type(value) is Poison]
        assert poisoned == ([2, 3] if number > 2 else [])


def test_second_results_of_a_sequence_are_told_apart(reader: SequenceReader) -> None:
    def stream(first: int, one: int, other: int) -> list[Any]:
        return [SORT, first, 1, SORT, first + 2, 8, ADD, first + 4, first + one, first + other]

    values = {1: torch.tensor([3.0, 1, 2]), 8: torch.tensor([5.0, 9, 7]), 499: torch.tensor([9.0, 0, 0])}
    expected = [*torch.sort(values[1]), *torch.sort(values[8]), values[499]]
    for number, (one, other) in enumerate([(1, 3)] * 4 + [(-1, 1), (1, 3), (1, 2), (0, 3), (1, 3), (3, 1), (1, 1)], 1):
        _, rank = watched(reader, stream(100 * number, one, other), values)
        assert torch.equal(rank.values[100 * number + 4], expected[one] + expected[other])


def a_rank() -> tuple[Rank, TeamOnRank]:
    outside: Any = SimpleNamespace(leave=lambda *_, **__: None, reply=lambda *_: None)
    team = TeamOnRank(1, Extent(gpus=1), [0], [], 0, 0)
    rank = Rank("procs", Extent(gpus=1), 0, CPU, outside)
    rank.values.update((ref, torch.full([3], float(ref), dtype=torch.float64)) for ref in range(1, 6))
    return rank, team


def drawn(rng: random.Random) -> list[tuple[Any, ...]]:
    """Return commands; they name a tensor that was there by (True, number), one that they make by (False, number)."""
    commands: list[tuple[Any, ...]] = []
    alive = [(True, ref) for ref in range(1, 6)]
    made = 0
    for _ in range(rng.randint(2, 12)):
        code = rng.choice([ADD, SCALE, SORT, WRITE, FREE, FREE])
        if code == FREE:
            gone = rng.sample(alive, min(rng.randint(1, 2), len(alive) - 2))
            alive = [one for one in alive if one not in gone]
            commands.append((FREE, gone))
            continue
        outputs = {ADD: 1, SCALE: 1, SORT: 2, WRITE: 0}[code]
        operands = [rng.choice(alive) for _ in range(1 if code in (SCALE, SORT) else 2)]
        commands.append((code, made, operands, [rng.choice([1, 2.0, -1])] if code == SCALE else []))
        alive += [(False, made + index) for index in range(outputs)]
        made += outputs
    return commands


def streamed(commands: list[tuple[Any, ...]], shuffled: list[int], first: int) -> list[Any]:
    """Return commands as a stream, in which other tensors are given and made."""

    def ref(one: tuple[bool, int]) -> int:
        return shuffled[one[1] - 1] if one[0] else first + one[1]

    stream: list[Any] = []
    for code, *rest in commands:
        if code == FREE:
            stream += [FREE, [ref(one) for one in rest[0]]]
        else:
            stream += [code, first + rest[0], *map(ref, rest[1]), *rest[2]]
    return stream


def is_alike(one: Any, other: Any) -> bool:
    """Whether two are equal tensors, or stand for such after the same failure, or for none."""
    if type(one) is Poison and type(other) is Poison:
        said = [(it.number, it.what, repr(it.error)) for it in (one, other)]
        return said[0] == said[1] and is_alike(one.kept, other.kept)
    return one is other is None or bool(torch.equal(one, other))


@pytest.mark.parametrize("seed", range(40))
def test_sequences_leave_what_their_commands_leave(reader: SequenceReader, seed: int) -> None:
    rng = random.Random(seed)
    commands = drawn(rng)
    known = 0
    for run in range(5):
        stream = streamed(commands, rng.sample(range(1, 6), 5), 100 * (run + 1))
        found = []
        for steps in (reader.read(stream, []), reader.reader.read(stream, [])):
            rank, team = a_rank()
            known += sum(type(step) is SequenceRun for step in steps)
            for step in steps:
                step.execute(rank, team)
            found.append((rank.values, team.done, team.steps, team.failed))
        (values, *counts), (expected, *others) = found
        assert counts == others
        assert values.keys() == expected.keys()
        for ref, value in values.items():
            assert is_alike(value, expected[ref])
    assert known == (4 if sum(one[0] != FREE for one in commands) >= 2 else 0)


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Notes the operators that run, and after each how many of their results are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.alive: list[int] = []
        self._made: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._made += map(weakref.ref, made if isinstance(made, tuple) else [made])
        self.names.append(func.__name__)
        self.alive.append(self.left)
        return made

    @property
    def left(self) -> int:
        """How many results are still there."""
        return sum(one() is not None for one in self._made)


def watched(reader: SequenceReader, stream: list[Any], values: dict[int, Any]) -> tuple[Watch, Rank]:
    """Run a stream and watch its operators."""
    (rank, team), watch = a_rank(), Watch()
    rank.values.update(values)
    steps = reader.read(stream, [])
    with watch:
        for step in steps:
            step.execute(rank, team)
    return watch, rank


def test_learnt_sequence_keeps_what_it_makes_no_longer_than_its_commands_do(reader: SequenceReader) -> None:
    def chain(first: int) -> list[Any]:
        """Make a tensor of the one before, and free that; two results of `sort` are never read."""
        stream = [UNIQUE, first + 11, 1, FREE, [first + 11, first + 12, first + 13]]  # runs as it is
        stream += [LOSS, first + 10, 1, 2, SCALE, first, 1, 2, SORT, first + 1, first, FREE, [first, first + 2]]
        for ref in range(first + 3, first + 8):
            stream += [
                ADD,
                ref,
                ref - 1 if ref > first + 3 else first + 1,
                2,
                FREE,
                [ref - 1 if ref > first + 3 else first + 1],
            ]
        return [*stream, ADD, first + 8, first + 7, first + 7, ADD, first + 9, first + 8, 1, FREE, [first + 8]]

    found = [watched(reader, chain(100 * number), {}) for number in range(1, 5)]
    assert [type(one) for one in reader.read(chain(900), [])] == [SequenceRun]
    alone, learnt = found[0][0], found[-1][0]
    assert learnt.names == alone.names
    assert len(learnt.names) > 12  # the loss has several
    assert all(mine <= others for mine, others in zip(learnt.alive, alone.alive, strict=True))
    assert learnt.alive[-8:] == [4, *[3] * 5, 3, 4]
    assert learnt.left == alone.left == 3
    assert torch.equal(found[-1][1].values[409], found[0][1].values[109])


def test_sequence_that_fails_keeps_no_tensor_that_it_has_freed(reader: SequenceReader) -> None:
    """Its error is kept as long as a tensor that could not be computed, and its traceback has frames."""

    def stream(first: int) -> list[Any]:
        return [SCALE, first, 1, 2, ADD, first + 1, first, 1, PICK, first + 2, first + 1, 9, FREE, [first, first + 1]]

    good, bad = torch.tensor([0, 2]), torch.tensor([0, 3])
    for number, index in enumerate((bad, bad, good, good, bad), 1):
        watch, rank = watched(reader, stream(100 * number), {9: index})
        made = rank.values[100 * number + 2]
        assert watch.left == int(index is good)
        assert (type(made) is Poison) == (index is bad)


def test_learnt_sequence_makes_a_view_again_only_if_it_is_another_one(reader: SequenceReader) -> None:
    def stream(first: int) -> list[Any]:
        """The first two views are the same, the third is of another tensor, the fourth of the second view."""
        made = [first + index for index in range(9)]
        words = [TURN, made[0], 8, MUL, made[1], made[0], 8, TURN, made[2], 8, MUL, made[3], made[2], 8]
        words += [
            TURN,
            made[4],
            made[3],
            MUL,
            made[5],
            made[4],
            made[1],
            TURN,
            made[6],
            made[2],
            MUL,
            made[7],
            made[6],
            made[5],
        ]
        return [*words, FREE, [made[0], made[2], made[4], made[6]]]

    matrix = torch.arange(9.0).reshape(3, 3)
    for number in range(1, 5):
        watch, rank = watched(reader, stream(100 * number), {8: matrix})
        expected = matrix.t() @ matrix
        assert torch.equal(rank.values[100 * number + 3], expected)
        assert torch.equal(rank.values[100 * number + 7], matrix @ (expected.t() @ expected))
    assert watch.names.count("t.default") == 3
    assert watch.names.count("mm.default") == 4


def test_views_are_there_when_a_command_between_them_and_their_end_fails(reader: SequenceReader) -> None:
    def stream(first: int) -> list[Any]:
        words = [TURN, first, 8, TURN, first + 1, 8, MUL, first + 2, first, first + 1, PICK, first + 3, 8, 9]
        return [*words, MUL, first + 4, first + 1, first + 2, FREE, [first, first + 1]]

    matrix = torch.arange(9.0).reshape(3, 3)
    turned = matrix.t()
    for number in range(1, 6):
        _, rank = watched(reader, stream(100 * number), {8: matrix, 9: torch.tensor([3 if number > 4 else 0])})
        assert (type(rank.values[100 * number + 3]) is Poison) == (number > 4)
        assert torch.equal(rank.values[100 * number + 4], turned @ (turned @ turned))


def test_sequence_is_learnt_anew_for_another_size(reader: SequenceReader) -> None:
    for number, rows in enumerate([2, 2, 2, 4, 4, 2], 1):
        matrix, first = torch.arange(3.0 * rows).reshape(rows, 3), 100 * number
        _, rank = watched(reader, [FLAT, first, 8, ADD, first + 1, first, first], {8: matrix})
        assert torch.equal(rank.values[first + 1], 2 * matrix.flatten())


def test_operators_are_repeated_as_they_were_called(reader: SequenceReader) -> None:
    """Of three tensors, and of the same one before and after a write to it."""

    def stream(first: int) -> list[Any]:
        words = [BLEND, first, 1, 2, 3, SCALE, first + 1, 4, 2, WRITE, 0, 4, 1, SCALE, first + 2, 4, 2]
        return [*words, ADD, first + 3, first + 1, first + 2, FREE, [first + 1, first + 2]]

    for number in range(1, 5):
        _, rank = watched(reader, stream(100 * number), {})
        assert rank.values[100 * number].tolist() == [1 + 2 * 3] * 3
        assert rank.values[100 * number + 3].tolist() == [2 * 4 + 2 * (4 + 1)] * 3


def test_sequence_that_is_given_nothing_is_learnt(reader: SequenceReader) -> None:
    def stream(first: int) -> list[Any]:
        return [FILLED, first, 2.0, FILLED, first + 1, 3.0, ADD, first + 2, first, first + 1]

    for number in range(1, 5):
        watch, rank = watched(reader, stream(100 * number), {})
        assert [rank.values[100 * number + index].tolist() for index in range(3)] == [[2, 2], [3, 3], [5, 5]]
    assert watch.names == ["full.default", "full.default", "add.Tensor"]


def test_views_that_are_results_or_inputs_stay_apart(reader: SequenceReader) -> None:
    def stream(first: int) -> list[Any]:
        return [TURN, first, 8, TURN, first + 1, 8, MUL, first + 2, first, first + 1, WRITE, 0, first, first + 1]

    for number in range(1, 5):
        matrix = torch.arange(9.0).reshape(3, 3)
        watch, rank = watched(reader, stream(100 * number), {8: matrix})
        one, other, product = (rank.values[100 * number + index] for index in range(3))
        assert one is not other
        assert torch.equal(product, torch.arange(9.0).reshape(3, 3).t() @ torch.arange(9.0).reshape(3, 3).t())
        assert torch.equal(matrix, 2 * torch.arange(9.0).reshape(3, 3))
    assert watch.names == ["t.default", "t.default", "mm.default", "add_.Tensor"]


@pytest.mark.parametrize("limit", [1, 2])
def test_so_many_layouts_of_a_sequence_are_learnt(
    reader: SequenceReader, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TENSOR_REPLAYS_LEARNT", limit)
    alone: list[int] = []
    execute = Rank.execute

    def counted(rank: Rank, team: TeamOnRank, command: Any) -> None:
        alone[-1] += 1
        execute(rank, team, command)

    monkeypatch.setattr(Rank, "execute", counted)
    for number, dtype in enumerate([torch.float64] * 3 + [torch.float32] * 3 + [torch.int64] * 3, 1):
        alone.append(0)
        _, rank = watched(reader, adding(100 * number, 1, 2, 1), {1: torch.ones(3, dtype=dtype)})
        assert torch.equal(rank.values[100 * number + 2], torch.full([3], 7, dtype=torch.float64))
    assert alone == ([3, 3, 0, 3, 3, 3, 3, 3, 3] if limit == 1 else [3, 3, 0, 3, 0, 0, 3, 3, 3])


def test_rank_of_another_class_executes_each_command(reader: SequenceReader) -> None:
    """One that is profiled or simulated."""
    seen: list[str] = []

    class Seeing(Rank):
        def execute(self, team: TeamOnRank, command: Any) -> None:
            seen.append(command.signature.name)
            super().execute(team, command)

    for number in range(1, 5):
        plain, team = a_rank()
        rank = Seeing(plain.mesh, plain.extent, 0, CPU, plain.outside, plain.values)
        seen.clear()
        for step in reader.read(adding(100 * number, 1, 2, 1), []):
            step.execute(rank, team)
        assert seen == ["aten::add.Tensor", "aten::mul.Tensor", "aten::add.Tensor"]


def test_so_many_sequences_are_kept(reader: SequenceReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TENSOR_SEQUENCES_KEPT", 1)
    alone: list[int] = []
    execute = Rank.execute

    def counted(rank: Rank, team: TeamOnRank, command: Any) -> None:
        alone[-1] += 1
        execute(rank, team, command)

    monkeypatch.setattr(Rank, "execute", counted)
    for number, factor in enumerate([2, 2, 2, 5, 5, 5, 2, 2], 1):
        alone.append(0)
        watched(reader, adding(100 * number, 1, 2, 1, factor), {})
    assert alone == [3, 3, 0, 3, 3, 0, 3, 0]


@pytest.mark.parametrize(("limit", "is_seen"), [(1, False), (2, True)])
def test_so_many_sequences_are_remembered(
    reader: SequenceReader, limit: int, is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TENSOR_SEQUENCES_SEEN", limit)
    assert not is_known(reader, adding(10, 1, 2, 1, 2))
    assert not is_known(reader, adding(20, 1, 2, 1, 5))
    assert is_known(reader, adding(30, 1, 2, 1, 2)) == is_seen


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 12)

    def forward(self, text: Any) -> Any:
        return self.down(nn.functional.silu(self.up(self.norm(self.embed(text)))))


@pytest.mark.real
async def test_steps_of_training_are_known_again_and_equal_those_of_plain_torch() -> None:
    torch.manual_seed(0)
    plain = Net()
    text = torch.randint(0, 12, (4, 6))

    def step(net: Any, optimizer: Any, text: Any) -> Any:
        loss = nn.functional.cross_entropy(net(text).flatten(0, 1), text.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    async with this_host().spawn_procs(
        {"a": 2}, preload=("torch", "torch.distributed.tensor"), setup=count_commands
    ) as procs:
        there = trimesh.module_to_mesh(copy.deepcopy(plain), procs, ParallelPlan.data("a"))
        batch = trimesh.distribute(text, procs, ["a", None])
        one, other = (torch.optim.AdamW(net.parameters(), lr=0.1, fused=True) for net in (plain, there))
        alone: list[int] = []
        for _ in range(5):
            with procs.activate(global_tensors=True):
                loss = step(there, other, batch)
            torch.testing.assert_close(await trimesh.fetch(loss), step(plain, one, text))
            alone += set(await commands_run(procs))
        for mine, theirs in zip(there.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(await trimesh.fetch(mine.detach()), theirs.detach())
        assert alone[-1] < alone[0] / 4


@pytest.mark.real
async def test_command_that_fails_in_a_known_sequence_is_named_and_spoils_only_what_depends_on_it() -> None:
    def issue(table: Any, index: Any) -> tuple[Any, Any]:
        other = ((table + 1) * 2 - 3).abs()
        chosen = table.index_select(0, index)  # the line that is named
        other = ((other + 1) * 2 - 3).abs() + table
        return chosen * 2, other

    async with this_host().spawn_procs({"a": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        whole = torch.arange(8.0).reshape(4, 2)
        table = trimesh.distribute(whole, procs, [None, "a"])
        for rows in ([0, 1], [1, 2], [2, 3], [1, 99], [3, 0]):
            index = torch.tensor(rows)
            chosen, other = issue(table, trimesh.replicate(index, procs))
            assert torch.equal(await trimesh.fetch(other), issue(whole, torch.tensor([0]))[1])
            if 99 in rows:
                with pytest.RaisesGroup(IndexError) as caught:
                    await trimesh.fetch(chosen)
                notes = [note for error in caught.value.exceptions for note in error.__notes__]
                line = issue.__code__.co_firstlineno + 2
                assert any(f"{__file__}:{line} in" in note for note in notes), notes
            else:
                assert torch.equal(await trimesh.fetch(chosen), whole[index] * 2)
