"""A rank in this process: what its commands leave, and what a failed one poisons and another one heals."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.rows import rows

torch: Any = pytest.importorskip("torch", reason="torch is an extra")

from trimesh import limits  # noqa: E402 - after the skip
from trimesh.errors import ProtocolError  # noqa: E402
from trimesh.shape.extent import Extent  # noqa: E402
from trimesh.tensor.dtensor.copied_view import has_copied_views  # noqa: E402
from trimesh.tensor.kernels.table import KERNELS  # noqa: E402
from trimesh.tensor.protocol.arguments import BODY_SLOT, NUMBER_SLOT, SLOT, describe  # noqa: E402
from trimesh.tensor.protocol.messages import DEFINE, FORGET, FREE, RECORD, REPLAY, RESET  # noqa: E402
from trimesh.tensor.rank.function_parts import LocalMeta, Operand, meta_of, put_together, take_apart  # noqa: E402
from trimesh.tensor.rank.kernel import Kernel, Kernels, Poison, define, generator_of, span_of  # noqa: E402
from trimesh.tensor.rank.rank import Rank, TeamOnRank  # noqa: E402
from trimesh.tensor.rank.reader import CommandReader  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
GOOD, INDEX, BEYOND = 1, 2, 3
"""Refs of tensors that each rank has: numbers, indices of them, and an index that is out of range."""


class Outside:
    """What a rank says to its process."""

    def __init__(self) -> None:
        self.left: list[tuple[BaseException, bool]] = []
        self.replies: list[Any] = []
        self.error: BaseException | None = None

    def leave(self, team: TeamOnRank, error: BaseException, *, is_waited_for: bool) -> None:
        self.left.append((error, is_waited_for))
        if self.error is not None:
            raise self.error

    def reply(self, request: int, value: Any) -> None:
        self.replies.append((request, value))


class Here:
    """A rank with one team, and the reader of its commands."""

    def __init__(self, kernels: Kernels = KERNELS) -> None:
        self.outside: Any = Outside()
        self.rank, self.team = (
            Rank("procs", Extent(gpus=1), 0, CPU, self.outside),
            TeamOnRank(7, Extent(), [0], [], 0, 0),
        )
        self.rank.teams[7] = self.team
        self.reader = CommandReader(CPU, kernels)
        self.values = self.rank.values
        self.values.update({GOOD: torch.arange(1.0, 13).reshape(4, 3), INDEX: torch.tensor([0, 3])})
        self.values[BEYOND] = torch.tensor([9])
        self._codes: dict[str, int] = {}

    def code(
        self,
        name: str,
        args: Sequence[Any],
        outs: Sequence[int] = (0,),
        writes: Sequence[int] = (),
        *told: Any,
        **named: Any,
    ) -> int:
        """Return the number of an operation, which is defined if it is new."""
        description = [name, describe(list(args)), describe(named), list(outs), list(writes), *told]
        if repr(description) not in self._codes:
            self._codes[repr(description)] = 16 + len(self._codes)
            self.read(DEFINE, self._codes[repr(description)], description)
        return self._codes[repr(description)]

    def read(self, *words: Any, bodies: Sequence[memoryview] = ()) -> None:
        for step in self.reader.read(list(words), bodies):
            step.execute(self.rank, self.team)

    # ---- operations ------------------------------------------------------------------------------------------

    def add(self, first: int, one: int, other: int) -> None:
        self.read(self.code("aten::add.Tensor", [SLOT, SLOT]), first, one, other)

    def pick(self, first: int, table: int = GOOD, index: int = BEYOND) -> None:
        """Take rows of a tensor. By default they are not there."""
        self.read(self.code("aten::index_select", [SLOT, 0, SLOT]), first, table, index)

    def write(self, target: int, source: int, name: str = "aten::add_.Tensor") -> None:
        self.read(self.code(name, [SLOT, SLOT], [-1], [0]), 0, target, source)

    def fill(self, target: int, number: float = 2.0) -> None:
        self.read(self.code("aten::fill_.Scalar", [SLOT, NUMBER_SLOT], [-1], [0]), 0, target, number)

    def view(self, first: int, base: int, name: str, *args: Any) -> None:
        self.read(self.code(name, [SLOT, *args]), first, base)

    def poison(self, ref: int) -> Poison:
        found = self.values[ref]
        assert type(found) is Poison
        return found

    def states(self, *refs: int) -> list[str]:
        return ["poisoned" if type(self.values[ref]) is Poison else "healthy" for ref in refs]


# ---- failures --------------------------------------------------------------------------------------------------------


def test_failed_command_poisons_what_depends_on_it_and_is_reported_once() -> None:
    here = Here()
    here.add(10, GOOD, GOOD)
    here.pick(11)
    here.add(12, 11, 10)
    here.pick(13, 12, INDEX)
    here.add(14, 10, GOOD)
    failed = here.poison(11)
    assert (failed.team, failed.number, failed.what, type(failed.error)) == (7, 1, "aten::index_select", IndexError)
    assert here.poison(12) is here.poison(13) is failed
    assert torch.equal(here.values[14], 3 * here.values[GOOD])
    assert here.team.failed == [(1, "aten::index_select: IndexError: index out of range in self")]
    assert (here.team.done, here.team.steps) == (5, 5)
    assert here.outside.left == [(failed.error, False)] * 3


def test_first_failure_among_the_operands_is_the_cause() -> None:
    here = Here()
    here.pick(10)
    here.pick(11)
    here.add(12, 11, 10)
    here.add(13, 10, 11)
    assert [here.poison(ref).number for ref in (12, 13)] == [1, 0]


def test_ranks_that_wait_are_released_even_if_the_team_has_ended() -> None:
    here = Here()
    released: list[int] = []
    here.team.on_failed.append(lambda: released.append(1))
    here.outside.error = OSError("the team has ended")
    here.pick(10)
    assert here.outside.left == [(here.poison(10).error, True)]
    assert released == [1]


def test_tensor_that_a_rank_does_not_have_was_lost() -> None:
    here = Here()
    here.add(10, GOOD, 99)
    here.add(11, 10, GOOD)
    for ref in (10, 11):
        assert (here.poison(ref).team, here.poison(ref).number, here.poison(ref).what) == (7, 0, "aten::add.Tensor")
        assert isinstance(here.poison(ref).error, LookupError)
    assert here.team.failed == []


def test_text_of_a_failure_is_bounded() -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no " * limits.REASON_CHARS_MAX)

    here = Here(Kernels({"fail": Kernel("fail", fail)}, {}, KERNELS.local_replay, KERNELS.local_sequence))
    here.read(here.code("trimesh::fail", []), 10)
    [(number, text)] = here.team.failed
    assert number == 0
    assert text.startswith("trimesh::fail: ValueError: no no")
    assert len(text) == limits.REASON_CHARS_MAX


def test_poison_does_not_hold_the_tensors_of_the_command_that_failed() -> None:
    here = Here()
    here.add(10, GOOD, GOOD)
    there = weakref.ref(here.values[10])
    here.pick(11, 10)
    here.read(FREE, [10])
    assert here.poison(11).error.__traceback__ is not None
    assert there() is None


@pytest.mark.parametrize("name", ["aten::nowhere.Tensor", "global::aten::nowhere.Tensor", "nowhere::nothing"])
def test_operator_that_is_missing_fails_where_it_is_called(name: str) -> None:
    here = Here()
    here.read(here.code(name, [SLOT]), 10, GOOD)
    assert isinstance(here.poison(10).error, NotImplementedError)
    assert f"the process of the rank has no operator {name.removeprefix('global::')}" in str(here.poison(10).error)


def test_results_must_be_as_many_as_the_controller_expects() -> None:
    here = Here()
    here.read(here.code("aten::sort", [SLOT], [0]), 10, GOOD)
    assert str(here.poison(10).error) == "aten::sort must return 1 values, as at the controller, got 2"


def test_results_have_the_refs_and_the_strides_that_the_controller_expects() -> None:
    here = Here()
    here.read(here.code("aten::sort", [SLOT], [1, 0], [], [[1, 4], [3, 1]]), 10, GOOD)
    assert here.values[11].dtype is torch.float32
    assert [here.values[ref].stride() for ref in (10, 11)] == [(1, 4), (3, 1)]
    here.read(here.code("aten::sort", [SLOT], [0, -1]), 20, GOOD)
    assert torch.equal(here.values[20], here.values[GOOD])
    assert 21 not in here.values
    here.read(here.code("aten::neg", [SLOT], [0], [], [[1, 4]]), 30, GOOD)
    assert here.values[30].stride() == (1, 4)
    assert torch.equal(here.values[30], -here.values[GOOD])


def test_kernel_that_returns_poison_poisons_its_results() -> None:
    made = Poison(3, 4, "elsewhere", KeyError("gone"), torch.ones(2))
    given: list[Any] = []

    def pair(rank: Rank, team: TeamOnRank, value: Any) -> Any:
        given.append((rank, team, value))
        return made, [torch.ones(3)]

    kernel = Kernel("pair", pair, takes_poison=True)
    here = Here(Kernels({"pair": kernel}, {}, KERNELS.local_replay, KERNELS.local_sequence))
    here.pick(9)
    here.read(here.code("trimesh::pair", [SLOT], [0, 1]), 10, 9)
    assert given == [(here.rank, here.team, here.values[9])]
    assert (here.poison(10).number, here.poison(10).error, here.poison(10).kept) == (4, made.error, None)
    assert here.values[11].tolist() == [1, 1, 1]


# ---- writes that fail, and healing -----------------------------------------------------------------------------------

BASE, FLAT, SAME, LATE, OTHER = 10, 11, 12, 13, 14

HEALING: dict[str, Callable[[Here], None]] = {
    "copy_": lambda here: here.write(BASE, GOOD, "aten::copy_"),
    "fill_": lambda here: here.fill(BASE),
    "zero_": lambda here: here.read(here.code("aten::zero_", [SLOT], [-1], [0]), 0, BASE),
    "a view of all of it": lambda here: here.fill(FLAT),
    "a view that is made of it now": lambda here: here.fill(LATE),
    "_foreach_copy_": lambda here: here.read(
        here.code("aten::_foreach_copy_", [[SLOT], [SLOT]], [-1], [0]), 0, BASE, GOOD
    ),
    "_foreach_zero_": lambda here: here.read(here.code("aten::_foreach_zero_", [[SLOT]], [-1], [0]), 0, BASE),
    "normal_": lambda here: here.read(here.code("aten::normal_", [SLOT], [-1], [0]), 0, BASE),
}

LEAVING: dict[str, Callable[[Here], None]] = {
    "nothing": lambda here: None,
    "what reads it": lambda here: here.write(BASE, GOOD),
    "a copy of itself": lambda here: here.write(BASE, BASE, "aten::copy_"),
    "a copy of something poisoned": lambda here: here.write(BASE, 9, "aten::copy_"),
    "a write that fails": lambda here: here.write(BASE, BEYOND + 1, "aten::copy_"),
    "an operator that makes something else": lambda here: here.add(20, BASE, GOOD),
}


def spoilt() -> Here:
    """Return a rank with a tensor that could not be written to, and views of it from before and after."""
    here = Here()
    here.pick(9)
    here.values[BEYOND + 1] = torch.ones(5)
    here.add(BASE, GOOD, GOOD)
    here.add(OTHER, GOOD, GOOD)
    here.view(FLAT, BASE, "aten::view", [12])
    here.view(SAME, BASE, "aten::detach")
    here.write(BASE, 9)
    here.view(LATE, BASE, "aten::alias")
    return here


@rows("name", HEALING)
def test_what_overwrites_all_of_a_tensor_heals_it_and_its_views(name: str) -> None:
    here = spoilt()
    assert here.states(BASE, FLAT, SAME, LATE, OTHER) == ["poisoned"] * 4 + ["healthy"]
    assert {here.poison(ref).number for ref in (BASE, FLAT, SAME, LATE)} == {0}
    HEALING[name](here)
    assert here.states(BASE, FLAT, SAME, LATE, OTHER) == ["healthy"] * 5
    assert here.values[BASE].data_ptr() == here.values[LATE].data_ptr() == here.values[FLAT].data_ptr()
    assert torch.equal(here.values[OTHER], 2 * here.values[GOOD])


@rows("name", LEAVING)
def test_nothing_else_heals_it(name: str) -> None:
    here = spoilt()
    LEAVING[name](here)
    assert here.states(BASE, FLAT, SAME, LATE, OTHER) == ["poisoned"] * 4 + ["healthy"]
    errors = {type(here.poison(ref).error) for ref in (BASE, FLAT, SAME, LATE)}
    assert errors == {RuntimeError if name == "a write that fails" else IndexError}
    assert all(here.poison(ref).kept is not None for ref in (BASE, FLAT, SAME, LATE))
    HEALING["copy_"](here)
    assert here.states(BASE, FLAT, SAME, LATE) == ["healthy"] * 4


def test_part_that_is_overwritten_is_healed_alone() -> None:
    here = spoilt()
    half, inner, across, column, before = 20, 21, 22, 23, 24
    here.view(before, BASE, "aten::slice.Tensor", 0, 0, 2)
    here.view(half, BASE, "aten::slice.Tensor", 0, 1, 3)
    here.view(inner, BASE, "aten::select.int", 0, 1)
    here.view(across, BASE, "aten::slice.Tensor", 0, 2, 4)
    here.view(column, BASE, "aten::select.int", 1, 1)
    here.fill(half, 5.0)
    assert here.states(half, inner, across, column, before, BASE) == ["healthy"] * 2 + ["poisoned"] * 4
    assert here.values[inner].tolist() == [5, 5, 5]
    here.fill(column)  # between its elements nothing is overwritten
    assert here.states(column, across, BASE, FLAT) == ["healthy"] + ["poisoned"] * 3
    here.fill(BASE)
    assert here.states(half, inner, across, column, BASE, FLAT) == ["healthy"] * 6


def test_empty_tensor_is_healed_where_it_lies() -> None:
    here = spoilt()
    here.view(20, BASE, "aten::slice.Tensor", 0, 2, 2)
    here.fill(20)
    assert here.states(20, BASE, FLAT) == ["healthy", "poisoned", "poisoned"]


def test_result_that_was_never_made_cannot_be_healed_or_viewed() -> None:
    here = spoilt()
    here.view(20, 9, "aten::detach")
    here.fill(9)
    here.fill(20)
    assert here.states(9, 20) == ["poisoned"] * 2
    assert here.poison(20).kept is None


def test_new_view_of_a_spoilt_tensor_that_fails_is_poisoned_by_its_own_error() -> None:
    here = spoilt()
    here.view(20, BASE, "aten::view", [5])
    assert here.poison(20).number == here.team.done - 1
    assert here.poison(20).kept is None
    assert here.poison(BASE).number == 0


def test_failed_write_spoils_all_that_shares_its_memory() -> None:
    here = Here()
    here.add(BASE, GOOD, GOOD)
    here.view(FLAT, BASE, "aten::view", [12])
    here.read(RECORD, 5, 0, [[]], [], [], [FLAT, OTHER], [])
    here.write(BASE, INDEX)  # sizes do not fit
    assert here.states(BASE, FLAT, GOOD, INDEX) == ["poisoned"] * 2 + ["healthy"] * 2
    held = here.team.recordings[5].held
    assert type(held[FLAT]) is Poison
    assert here.poison(BASE).kept is not None
    assert here.poison(FLAT).kept is not here.poison(BASE).kept
    here.fill(BASE)
    assert torch.equal(held[FLAT], here.values[FLAT])  # type: ignore[arg-type]


# ---- checks ----------------------------------------------------------------------------------------------------------


def inverse(here: Here, first: int, of: int) -> None:
    here.read(here.code("aten::linalg_inv_ex", [SLOT], [0, 1]), first, of)


def check(here: Here, info: int) -> None:
    here.read(here.code("aten::_linalg_check_errors", [SLOT, "linalg.inv"], [-1], is_matrix=True), 0, info)


def test_check_that_fails_poisons_what_it_states_the_status_of() -> None:
    here = Here()
    here.values[4], here.values[5] = torch.zeros(2, 2), torch.eye(2)
    inverse(here, 10, 5)
    inverse(here, 20, 4)
    here.view(30, 21, "aten::detach")
    check(here, 11)
    check(here, 21)
    assert here.states(10, 11, 20, 21, 30) == ["healthy"] * 2 + ["poisoned"] * 2 + ["healthy"]
    assert here.poison(20).what == "aten::_linalg_check_errors"
    check(here, 30)  # is known to be the status of nothing
    assert here.states(10, 11, 30) == ["healthy"] * 2 + ["poisoned"]


def test_check_of_freed_results_poisons_what_is_left_of_them() -> None:
    here = Here()
    here.values[4] = torch.zeros(2, 2)
    inverse(here, 10, 4)
    here.read(FREE, [10])
    check(here, 11)
    assert 10 not in here.values
    assert here.states(11) == ["poisoned"]
    inverse(here, 10, 4)
    here.read(FREE, [11])
    assert here.rank.results == {}
    here.values[11] = here.values[4]
    check(here, 11)
    assert here.states(10) == ["healthy"]


def test_poisoned_status_poisons_the_results() -> None:
    here = Here()
    here.values[4] = torch.eye(2)
    inverse(here, 10, 4)
    here.write(11, INDEX, "aten::copy_")
    check(here, 11)
    assert here.states(10, 11) == ["poisoned"] * 2


def test_kernel_without_outputs_poisons_nothing_when_it_fails() -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no")

    here = Here(Kernels({"fail": Kernel("fail", fail)}, {}, KERNELS.local_replay, KERNELS.local_sequence))
    here.read(here.code("trimesh::fail", [SLOT], [-1]), 0, GOOD)
    assert here.states(GOOD) == ["healthy"]
    assert len(here.team.failed) == 1


def test_copy_that_an_operator_on_views_makes_of_a_tensor_of_the_rank_is_no_view() -> None:
    here = Here()
    here.values[4] = torch.arange(6.0).reshape(2, 3).t()
    here.read(here.code("global::aten::reshape", [SLOT, [6]]), 10, 4)
    assert not has_copied_views(here.rank)
    here.read(here.code("global::aten::fill_.Scalar", [SLOT, NUMBER_SLOT], [-1], [0]), 0, 4, 7.0)
    here.read(here.code("global::aten::neg", [SLOT]), 11, 10)
    assert here.values[11].tolist() == [0, -3, -1, -4, -2, -5]


# ---- recordings ------------------------------------------------------------------------------------------------------


def test_recording_has_formals_results_captures_and_carries() -> None:
    here = Here()
    add = here.code("aten::add.Tensor", [SLOT, SLOT])
    here.values[4], here.values[5] = torch.ones(2), torch.full([2], 10.0)
    # 100 is the argument, 4 is captured, 5 is carried: each replay adds the argument to it.
    stream = [add, 200, 100, 4, add, 201, 200, 5]
    here.read(RECORD, 3, 0, [stream, [add, 202, 201, 201, FREE, [200]]], [100], [202], [4, 5], [[201, 5]])
    here.read(FREE, [4, 5])
    here.values[6], here.values[7] = torch.full([2], 100.0), torch.full([2], 1000.0)
    steps = here.team.done
    for first, given in ((50, 6), (51, 7), (52, 6)):
        here.read(REPLAY, 3, 0, first, [given], 0, REPLAY, 3, 1, first, [], 0)
        assert 201 in here.values  # for the next one
        assert not {4, 5, 100, 200, 202} & here.values.keys()
    assert [here.values[ref].tolist() for ref in (50, 51, 52)] == [[222, 222], [2224, 2224], [2426, 2426]]
    assert here.team.done == steps + 6
    here.read(FORGET, 3, FORGET, 3)
    assert here.team.recordings == {}
    assert here.team.done == steps + 8


def test_recording_uses_the_captured_tensor_that_is_there_now() -> None:
    here = Here()
    add = here.code("aten::add.Tensor", [SLOT, SLOT])
    here.read(RECORD, 3, 0, [[add, 200, GOOD, GOOD]], [], [200], [GOOD, 98], [])
    assert set(here.team.recordings[3].held) == {GOOD}
    here.values[GOOD] = torch.ones(2)
    here.read(REPLAY, 3, 0, 50, [], 0)
    assert here.values[50].tolist() == [2, 2]
    assert GOOD in here.values


def test_captured_tensor_that_a_replay_spoils_stays_spoilt() -> None:
    here = Here()
    write = here.code("aten::add_.Tensor", [SLOT, SLOT], [-1], [0])
    add = here.code("aten::add.Tensor", [SLOT, SLOT])
    here.values[4] = torch.ones(2)
    here.read(RECORD, 3, 0, [[write, 0, 4, 100, add, 200, 4, 4]], [100], [200], [4], [])
    here.read(FREE, [4])
    here.values[5], here.values[6] = torch.ones(2), torch.ones(7)
    for first, given in ((50, 5), (51, 6), (52, 5)):
        here.read(REPLAY, 3, 0, first, [given], 0)
        assert 4 not in here.values
    assert here.states(50, 51, 52) == ["healthy", "poisoned", "poisoned"]
    assert here.poison(52).number == here.poison(51).number


def test_replays_have_bodies_and_moves_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[str] = []
    execute = Rank.execute

    def counted(rank: Rank, team: TeamOnRank, command: Any) -> None:
        alone.append(command.signature.name)
        execute(rank, team, command)

    monkeypatch.setattr(Rank, "execute", counted)
    given: list[Any] = []

    def send(rank: Rank, team: TeamOnRank, data: memoryview, move: int) -> Any:
        given.append((bytes(data), move))
        data[0] += 1
        return torch.frombuffer(data, dtype=torch.uint8)

    here = Here(Kernels({"send": Kernel("send", send)}, {}, KERNELS.local_replay, KERNELS.local_sequence))
    code = here.code("trimesh::send", [BODY_SLOT, NUMBER_SLOT])
    bodies = [memoryview(b"ab"), memoryview(b"cd"), memoryview(b"ef")]
    add = here.code("aten::add.Tensor", [SLOT, SLOT])
    here.read(RECORD, 3, 1, [[code, 200, 1, 2, add, 201, 200, 200]], [], [200, 201], [], [], bodies=bodies)
    for first in (50, 60):
        here.read(REPLAY, 3, 0, first, [], 10 * first)
    assert given == [(b"ef", 502), (b"ef", 602)]
    assert [bytes(here.values[ref].tolist()) for ref in (50, 60)] == [b"ff"] * 2
    assert alone == ["trimesh::send", "aten::add.Tensor", "trimesh::send"]


def test_kernels_of_a_recording_run_in_each_replay() -> None:
    """What they write to, and what reads that, is as if each command had come alone."""
    fails: list[bool] = []

    def grow_it(_rank: Rank, _team: TeamOnRank, value: Any) -> None:
        if fails:
            raise MemoryError("no room")
        value.add_(value.sum())

    kernel = Kernel("grow", grow_it)
    here = Here(Kernels({"grow": kernel}, {}, KERNELS.local_replay, KERNELS.local_sequence))
    grow, add = here.code("trimesh::grow", [SLOT], [-1], [0]), here.code("aten::add.Tensor", [SLOT, SLOT])
    here.read(RECORD, 3, 0, [[add, 200, 100, 100, grow, 0, 200, add, 201, 200, 100]], [100], [201, 200], [], [])
    for number in range(1, 5):
        here.values[4] = torch.full([2], float(number))
        here.read(REPLAY, 3, 0, 50, [4], 0)
        assert here.values[51].tolist() == [6 * number] * 2
        assert here.values[50].tolist() == [7 * number] * 2
    fails.append(True)
    here.read(REPLAY, 3, 0, 50, [4], 0)
    assert here.states(50, 51) == ["poisoned"] * 2


@pytest.mark.parametrize("learnt", [False, True])
def test_kernel_of_a_recording_may_return_its_operand_or_a_copy(learnt: bool) -> None:
    is_same = learnt
    kernel = Kernel("maybe", lambda _rank, _team, value: value if is_same else value.clone())
    here = Here(Kernels({"maybe": kernel}, {}, KERNELS.local_replay, KERNELS.local_sequence))
    maybe, add = here.code("trimesh::maybe", [SLOT]), here.code("aten::add.Tensor", [SLOT, SLOT])
    write = here.code("aten::add_.Tensor", [SLOT, SLOT], [-1], [0])
    stream = [add, 200, 100, 100, maybe, 201, 200, write, 0, 201, 100, add, 202, 200, 201]
    here.read(RECORD, 3, 0, [stream], [100], [202, 200, 201], [], [])
    here.values[4] = torch.ones(2)
    for is_same in (learnt, learnt, learnt, not learnt, learnt):
        here.read(REPLAY, 3, 0, 50, [4], 0)
        assert [here.values[ref].tolist()[0] for ref in (50, 51, 52)] == ([6, 3, 3] if is_same else [5, 2, 3])
        assert (here.values[51] is here.values[52]) == is_same


def test_operator_without_results_is_repeated() -> None:
    here = Here()
    sure, add = here.code("aten::_assert_async", [SLOT], [-1]), here.code("aten::add.Tensor", [SLOT, SLOT])
    here.read(RECORD, 3, 0, [[add, 200, 100, 100, sure, 0, 200]], [100], [200], [], [])
    for number in (1, 2, 3, 4, 0):
        here.values[4] = torch.tensor(float(number))
        here.read(REPLAY, 3, 0, 50, [4], 0)
        assert here.states(50) == ["healthy" if number else "poisoned"]


def test_operator_that_reads_a_tensor_from_elsewhere_reads_it_in_each_replay() -> None:
    elsewhere = torch.ones(2)
    kernel = Kernel("more", lambda _rank, _team, value: value + elsewhere, operator=torch.ops.aten.neg.default)
    here = Here(Kernels({"more": kernel}, {}, KERNELS.local_replay, KERNELS.local_sequence))
    more, add = here.code("trimesh::more", [SLOT]), here.code("aten::add.Tensor", [SLOT, SLOT])
    here.read(RECORD, 3, 0, [[add, 200, 100, 100, more, 201, 200, add, 202, 201, 200]], [100], [202], [], [])
    here.values[4] = torch.ones(2)
    for number in range(1, 5):
        here.read(REPLAY, 3, 0, 50, [4], 0)
        assert here.values[50].tolist() == [4 + number] * 2
        elsewhere += 1
    assert here.team.failed == []


def test_operator_that_decides_by_a_python_value_decides_in_each_replay() -> None:
    elsewhere = [2]

    def decide(_rank: Rank, _team: TeamOnRank, value: Any) -> Any:
        return value * (2 if torch.is_same_size(value, value) and elsewhere[0] == 2 else 3)

    kernel = Kernel("decide", decide, operator=torch.ops.aten.neg.default)
    here = Here(Kernels({"decide": kernel}, {}, KERNELS.local_replay, KERNELS.local_sequence))
    decided, add = here.code("trimesh::decide", [SLOT]), here.code("aten::add.Tensor", [SLOT, SLOT])
    here.read(RECORD, 3, 0, [[add, 200, 100, 100, decided, 201, 200]], [100], [201], [], [])
    here.values[4] = torch.ones(2)
    for elsewhere[0] in (2, 2, 2, 3, 2):
        here.read(REPLAY, 3, 0, 50, [4], 0)
        assert here.values[50].tolist() == [2 * elsewhere[0]] * 2


def test_operator_that_makes_no_tensor_of_its_own_returns_it_in_each_replay() -> None:
    elsewhere = torch.ones(2)
    kernel = Kernel("kept", lambda _rank, _team: elsewhere, operator=torch.ops.aten.neg.default)
    here = Here(Kernels({"kept": kernel}, {}, KERNELS.local_replay, KERNELS.local_sequence))
    kept, add = here.code("trimesh::kept", []), here.code("aten::add.Tensor", [SLOT, SLOT])
    here.read(RECORD, 3, 0, [[add, 200, 100, 100, kept, 201, add, 202, 201, 200]], [100], [202], [], [])
    here.values[4] = torch.ones(2)
    for number in range(1, 5):
        here.read(REPLAY, 3, 0, 50, [4], 0)
        assert here.values[50].tolist() == [2 + number] * 2
        elsewhere += 1


# ---- reading ---------------------------------------------------------------------------------------------------------


@rows(
    "words",
    [
        [16, 10],
        [16, 10, 1],
        [16, 10.0, 1, 2],
        [16, 10, 1, -1],
        [16, 10, 1, True],
        [17, 10],
        [17, 10.0, 1],
        [18, 10, 1],
        [FREE],
        [FREE, 1],
        [FREE, [True]],
        [DEFINE, 19],
        [DEFINE, 19, ["aten::neg"]],
        [DEFINE, 19, ["aten::neg", ["l", ["r"]], ["d"], [0.0], []]],
        [DEFINE, 19, ["aten::neg", ["l", ["r"]], ["d"], [0], ["0"]]],
        [DEFINE, 19, ["aten::neg", ["l", ["r"]], ["d"], [0], [0.0]]],
        [DEFINE, 19, ["aten::neg", ["l", ["r"]], ["d"], [0], [1]]],
        [DEFINE, 19, ["aten::neg", ["l", ["r"]], ["d"], [0], [-1]]],
        [DEFINE, 19, ["aten::neg", ["l", ["r"]], ["d", "a"], [0], []]],
        [RECORD, 3, 0, [[16, 10]], [], [], [], []],
        [RECORD, 3, 0, [], [], [], [], [[1, 2, 3]]],
        [RECORD, 3, 0, [], [], [], []],
        [REPLAY, 3, 0, 10, [1]],
        [REPLAY, 3, 0, 10, ["1"], 0],
        [FORGET, "3"],
        [6],
        [-1],
        ["16"],
        [None],
        [[]],
    ],
)
def test_what_is_no_command_breaks_the_protocol(words: list[Any]) -> None:
    here = Here()
    assert here.code("aten::add.Tensor", [SLOT, SLOT]) == 16
    assert here.code("aten::full", [[2], NUMBER_SLOT]) == 17
    with pytest.raises(ProtocolError):
        here.reader.read(words, [])


def test_definitions_that_are_dropped_or_replaced_are_counted() -> None:
    here = Here()
    one = here.code("aten::add.Tensor", [SLOT, SLOT])
    assert here.reader.redefined == 0
    here.read(DEFINE, one, ["aten::sub.Tensor", describe([SLOT, SLOT]), describe({}), [0], []])
    assert here.reader.redefined == 1
    here.read(one, 10, GOOD, GOOD)
    assert here.values[10].sum() == 0
    here.read(RESET)
    assert here.reader.redefined == 2
    assert here.reader.signature(one) is None
    with pytest.raises(ProtocolError):
        here.read(one, 10, GOOD, GOOD)


def test_operands_are_put_where_the_description_has_them() -> None:
    given: list[Any] = []

    def take(rank: Rank, team: TeamOnRank, *args: Any, **named: Any) -> None:
        given.append((args, named))

    here = Here(Kernels({"take": Kernel("take", take)}, {}, KERNELS.local_replay, KERNELS.local_sequence))
    code = here.code("trimesh::take", [SLOT, [NUMBER_SLOT, 5], BODY_SLOT], [-1], [], one=SLOT, two=(NUMBER_SLOT, None))
    here.read(code, 0, GOOD, 0.5, 1, INDEX, 7, bodies=[memoryview(b"a"), memoryview(b"b")])
    [(args, named)] = given
    assert args[0] is here.values[GOOD]
    assert args[1:] == ([0.5, 5], b"b")
    assert named["one"] is here.values[INDEX]
    assert named["two"] == (7, None)


def test_memory_that_a_tensor_spans_ends_behind_its_last_element() -> None:
    memory = torch.arange(12, dtype=torch.int16)
    assert span_of(memory) == (0, 24)
    assert span_of(memory[3:5]) == (6, 10)
    assert span_of(memory.view(3, 4)[1:, 1]) == (10, 20)
    assert span_of(memory[4:4]) == (8, 8)
    assert span_of(memory[5]) == (10, 12)


def test_each_team_has_one_generator() -> None:
    here, other = Here(), Here()
    found = generator_of(here.rank, here.team)
    assert found is generator_of(here.rank, here.team)
    assert found is not generator_of(here.rank, other.team)
    assert found.initial_seed() == torch.Generator().initial_seed()


# ---- results of functions --------------------------------------------------------------------------------------------


def test_results_of_functions_are_taken_apart_and_put_together() -> None:
    one, other = torch.ones(2, 3, dtype=torch.int16).t(), torch.zeros(())
    result = {"a": [one, None], "b": (other, one)}
    tensors, parts = take_apart("f", result)
    assert [it is given for it, given in zip(tensors, (one, other, one), strict=True)] == [True] * 3
    assert parts == {"a": [Operand(0), None], "b": (Operand(1), Operand(2))}
    again = put_together(parts, [1, 2, 3])
    assert again == {"a": [1, None], "b": (2, 3)}
    with pytest.raises(TypeError, match=r"must return tensors, in lists, tuples and dicts, f returned 3: write"):
        take_apart("f", [one, 3])
    assert meta_of(one) == LocalMeta((3, 2), (1, 3), torch.int16, is_global=False)


def test_kernels_are_found_by_name_and_operators_by_family() -> None:
    families: Any = {"twice": lambda name, operator: Kernel(name, lambda _r, _t, value: operator(operator(value)))}
    kernels = Kernels({"same": Kernel("same", lambda _r, _t, value: value)}, families, *[KERNELS.local_replay] * 2)
    here = Here(kernels)
    for first, name in ((10, "twice::aten::neg"), (11, "trimesh::same"), (12, "aten::neg")):
        here.read(here.code(name, [SLOT]), first, GOOD)
    assert torch.equal(here.values[10], here.values[GOOD])
    assert here.values[11] is here.values[GOOD]
    assert torch.equal(here.values[12], -here.values[GOOD])
    found = [
        define([name, describe([SLOT]), describe({}), [0], []], CPU, kernels)
        for name in ("twice::aten::neg", "same::x")
    ]
    assert found[0].name == "aten::neg"
    assert found[1].kernel is None
