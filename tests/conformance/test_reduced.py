"""Answers of a call that are folded into one: `call_reduced` (rule A2)."""

from __future__ import annotations

import operator

import pytest
import trio
from tests.conformance.meshes import Backend
from tests.conformance.probe import Probe

import trimesh
from trimesh import MeshErrorGroup, ShapeError, endpoint, leaves


class Speaker(Probe):
    @endpoint
    async def word(self, prefix: str) -> str:
        return f"{prefix}{trimesh.current_rank()}"

    @endpoint
    async def rank_zero_last(self) -> int:
        if trimesh.current_rank() == 0:
            await self.gate.wait()
        return trimesh.current_rank()

    @endpoint
    async def late_word(self, others: Speaker) -> str:
        """Answer when all ranks behind have been told to."""
        rank = trimesh.current_rank()
        if rank < others.size() - 1:
            await self.notes.wait("go")
        if rank:
            await others.slice(gpus=rank - 1).tell.call_one("go")
        return str(rank)

    @endpoint(concurrency=10)
    async def tell(self, note: str) -> None:
        self.notes.add(note)


async def test_answers_are_folded_in_the_order_of_the_view(backend: Backend):
    """A2: whichever comes first; a started call gives the same."""
    async with backend.procs({"gpus": 4}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        join = speakers.word.call_reduced(operator.add)
        assert await join("a") == "a0a1a2a3"
        assert await join.start("b") == "b0b1b2b3"
        assert await speakers.late_word.call_reduced(operator.add)(speakers) == "0123"
        assert await speakers.exclude([{"gpus": 1}]).word.call_reduced(operator.add)("c") == "c0c2c3"
        assert await speakers.rank.call_reduced(max, commutative=True)() == 3


async def test_answers_are_folded_as_they_come(backend: Backend):
    """A2: if the function is said to be commutative; rank 0 answers when those of the others have been folded."""
    async with backend.procs({"gpus": 3}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        others_are_folded = trio.Event()

        def fold(so_far: int, rank: int) -> int:
            others_are_folded.set()
            return so_far + 10 * rank

        async def let_answer() -> None:
            await others_are_folded.wait()
            await speakers.slice(gpus=0).open_gate.call_one()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(let_answer)
            folded = await speakers.rank_zero_last.call_reduced(fold, commutative=True)()
        assert folded in (1 + 20, 2 + 10)


async def test_dimensions_are_folded_away(backend: Backend):
    """A2: what is left is a ValueMesh over the others, without the places that have no member."""
    async with backend.procs({"a": 2, "b": 2}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        rows = await speakers.word.call_reduced(operator.add, along="b")("")
        assert {**rows.extent} == {"a": 2}
        assert rows.values() == ("01", "23")
        columns = await speakers.word.call_reduced(operator.add, along=["a"]).start("")
        assert columns.item(b=1) == "13"
        assert (await speakers.word.call_reduced(operator.add, along=("a", "b"))("")).item() == "0123"
        without = speakers.exclude([{"a": 0, "b": 0}, {"a": 0, "b": 1}])
        left = await without.word.call_reduced(operator.add, along="b")("")
        assert [(point["a"], value) for point, value in left.items()] == [(1, "23")]


async def test_what_cannot_be_reduced_is_refused(backend: Backend):
    """A2: in words, and nothing is sent."""
    async with backend.procs({"gpus": 2}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        with pytest.raises(ShapeError, match="'b'"):
            await speakers.word.call_reduced(operator.add, along="b")("")
        with pytest.raises(ShapeError, match="'b'"):
            speakers.word.call_reduced(operator.add, along="b").start("")
        with pytest.raises(TypeError, match="function of two"):
            speakers.word.call_reduced("sum")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
        with pytest.raises(ValueError, match="empty view"):
            await speakers.exclude(speakers.points()).word.call_reduced(operator.add)("")
        with pytest.raises(TypeError, match="prefix"):
            await speakers.word.call_reduced(operator.add)()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def test_errors_of_a_reduced_call(backend: Backend):
    """A2, E01: an endpoint's is in a group, and cancels the others; that of the function is bare."""
    async with backend.procs({"gpus": 2}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        with pytest.raises(MeshErrorGroup) as caught:
            await speakers.fail.call_reduced(operator.add)(ValueError("no"), [1])
        assert [str(leaf) for leaf in leaves(caught.value)] == ["no"]
        with pytest.raises(TypeError, match="unsupported operand"):
            await speakers.rank.call_reduced(lambda so_far, rank: so_far - str(rank))()  # type: ignore[operator]
