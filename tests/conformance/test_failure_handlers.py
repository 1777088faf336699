"""`procs.on_failure`: handlers in code, asked before the policy (rule P5)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, attempt, kinds, only_sim
from tests.conformance.supervised import Ledger, kill_and_see, reading, remake, restart

import trimesh
from trimesh import (
    Actor,
    Backoff,
    Died,
    Failure,
    Isolate,
    MeshErrorGroup,
    ProcDied,
    Restarted,
    RestartLimit,
    Unresponsive,
    endpoint,
    leaves,
    this_proc,
)


class Asked:
    """A handler that answers as it is told and keeps what it was asked."""

    def __init__(self, answer: Any = True) -> None:
        self.answer = answer
        self.failures: list[Failure] = []
        self._news = trio.Event()

    def __call__(self, failure: Failure) -> Any:
        self.failures.append(failure)
        self._news.set()
        self._news = trio.Event()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    async def wait(self, count: int) -> Failure:
        while len(self.failures) < count:
            await self._news.wait()
        return self.failures[count - 1]

    @property
    def places(self) -> list[tuple[str, list[int], int, bool]]:
        """What it was asked about, in order."""
        return [
            (failure.mesh, [point.rank for point in failure.points], failure.incarnation, failure.has_ended)
            for failure in self.failures
        ]


class Failing(Actor):
    """Fails without a caller."""

    @endpoint
    async def fail(self, text: str) -> None:
        raise LookupError(text)

    @endpoint
    async def work(self) -> str:
        return "done"


async def test_handled_death_leaves_the_block_of_a_fail_fast_mesh(backend: Backend):
    """P5, X3: the call in flight gets the death, later ones, too; a failure that is not handled fails the block."""
    asked = Asked()
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 3}) as procs, reading(procs) as log:
            ledgers = await procs.spawn("ledgers", Ledger)
            async with procs.on_failure(asked), trio.open_nursery() as nursery:
                held = attempt(nursery, ledgers.slice(gpus=1).hold_many.call)
                await ledgers.slice(gpus=1).wait.call("hold")
                await kill_and_see(backend, procs, log, 1)
                with pytest.raises(MeshErrorGroup) as seen:
                    await held.result()
                assert kinds(seen.value) == [ProcDied]
            assert asked.places == [("procs", [1], 0, True)]
            assert isinstance(asked.failures[0].reason, ProcDied)
            assert [*(await ledgers.alive().rank.call()).values()] == [0, 2]
            with pytest.raises(MeshErrorGroup):
                await ledgers.rank.call()
            backend.kill(procs, 2)
            await trio.sleep_forever()
    assert len(asked.failures) == 1  # its block had been left
    assert [trimesh.origin(leaf).point for leaf in leaves(caught.value)] == [{"gpus": 2}]


@pytest.mark.parametrize("answer", [False, None])
async def test_failure_that_is_not_handled_is_for_the_policy(backend: Backend, answer: Any):
    """P5: `FailFast` cancels the block around the handler's, which raises the death once."""
    asked = Asked(answer)
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs, procs.on_failure(asked):
            backend.kill(procs, 0)
            await trio.sleep_forever()
    assert kinds(caught.value) == [ProcDied]
    assert asked.places == [("procs", [0], 0, True)]


async def test_handlers_are_asked_from_the_inside_out_and_in_order(backend: Backend):
    """P5: until one has handled it; a view hears of its own members alone."""
    outer, inner, other = Asked(), Asked(answer=False), Asked()
    async with (
        backend.procs({"gpus": 3}, supervision=Isolate()) as procs,
        reading(procs) as log,
        procs.on_failure(outer),
        procs.slice(gpus=slice(0, 2)).on_failure(inner),
        procs.slice(gpus=2).on_failure(other),
    ):
        for rank in (1, 2, 0):
            await kill_and_see(backend, procs, log, rank)
        assert inner.places == [("procs", [1], 0, True), ("procs", [0], 0, True)]
        assert outer.places == inner.places
        assert other.places == [("procs", [2], 0, True)]


async def test_handled_death_is_not_restarted_and_may_be_healed_by_hand(backend: Backend):
    """P5: it does not count either; what the handler leaves is restarted, with the next incarnation."""
    asked = Asked(answer=False)
    policy = restart(intensity=1)
    async with backend.procs({"gpus": 2}, supervision=policy) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ledger)
        async with procs.on_failure(asked):
            backend.kill(procs, 0)
            await log.wait(Restarted)
            assert await ledgers.slice(gpus=0).rank.call_one() == 0

            asked.answer = True
            await kill_and_see(backend, procs, log, 0)
            with pytest.raises(ProcDied):
                await ledgers.slice(gpus=0).rank.call_one()
            assert [*(await ledgers.alive().rank.call()).values()] == [1]
            await procs.replace(asked.failures[-1].points)
            assert [*(await ledgers.rank.call()).values()] == [0, 1]
        assert asked.places == [("procs", [0], 0, True), ("procs", [0], 1, True)]
        assert len(log.of(Restarted)) == 2


async def test_handler_takes_the_end_of_restarts(backend: Backend):
    """P5, R04: asked about `RestartLimit` it may let the block go on without the member."""

    def handler(failure: Failure) -> bool:
        found.append(type(failure.reason))
        return isinstance(failure.reason, RestartLimit)

    found: list[type] = []
    async with backend.procs({"gpus": 2}, supervision=restart(intensity=0)) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ledger)
        async with procs.on_failure(handler):
            await kill_and_see(backend, procs, log, 1)
            with pytest.raises(ProcDied):
                await ledgers.slice(gpus=1).rank.call_one()
            assert found == [ProcDied, RestartLimit]
            assert await ledgers.slice(gpus=0).rank.call_one() == 0


async def test_failures_of_actors_without_a_caller_are_asked_about(backend: Backend):
    """P5, E10: a broadcast, under `FailFast`; then an actor that its policy makes anew, unless it is handled."""
    asked = Asked()
    async with backend.procs({"gpus": 2}) as procs, procs.on_failure(asked):
        failing = await procs.slice(gpus=slice(1, 2)).spawn("failing", Failing)
        await failing.fail.broadcast("first")
        failure = await asked.wait(1)
        assert (failure.mesh, failure.points, failure.has_ended) == ("failing", ({"gpus": 0},), False)
        assert failure.reason.args == ("first",)
        assert await failing.work.call_one() == "done"

        remade = await procs.supervised(remake()).spawn("remade", Failing)
        asked.answer = False
        async with reading(remade) as log:
            await remade.slice(gpus=1).fail.broadcast("second")
            await log.wait(Restarted)
        assert asked.places[1:] == [("remade", [1], 0, False)]


async def test_errors_of_a_handler_are_raised_by_its_block(backend: Backend):
    """P5: they cancel its body; the failure goes to the policy."""
    asked = Asked(ArithmeticError("of the handler"))
    async with backend.procs({"gpus": 2}, supervision=Isolate()) as procs:
        ledgers = await procs.spawn("ledgers", Ledger)
        with pytest.raises(ExceptionGroup) as caught:
            async with procs.on_failure(asked):
                try:
                    backend.kill(procs, 0)
                    await trio.sleep_forever()
                finally:
                    raise LookupError("of the body")
        assert kinds(caught.value) == [ArithmeticError, LookupError]
        assert [*(await ledgers.alive().rank.call()).values()] == [1]

        with pytest.raises(ExceptionGroup, match="failure handler") as caught:
            async with procs.on_failure(Asked("yes")):
                backend.kill(procs, 1)
                await trio.sleep_forever()
        assert kinds(caught.value) == [TypeError]


async def test_body_without_failures_is_left_as_it_is(backend: Backend):
    """P5, K01: an error of the body is not wrapped, a cancel is one."""
    async with backend.procs() as procs:
        with pytest.raises(LookupError):
            async with procs.on_failure(Asked()):
                raise LookupError
        with trio.move_on_after(0) as scope:
            async with procs.on_failure(Asked()):
                raise AssertionError("entering is a checkpoint")
        assert scope.cancelled_caught


async def test_what_cannot_handle_is_refused(backend: Backend):
    """P5: coroutine functions, references, and `this_proc()`, which has no owner."""

    async def waits(_: Failure) -> bool:
        return True

    async with backend.procs() as procs:
        with pytest.raises(TypeError, match="must not wait"):
            procs.on_failure(waits)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="handle failures in the process that owns the mesh"):
            this_proc().on_failure(Asked())


async def test_silent_member_is_asked_about_where_the_policy_names_it(backend: Backend):
    """P5, C2: handled, it lives on."""
    asked = Asked()
    policy = trimesh.FailFast(on=(Unresponsive, ProcDied))
    async with backend.procs({"gpus": 1}, supervision=policy) as procs, procs.on_failure(asked):
        ledgers = await procs.spawn("ledgers", Ledger)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ledgers.fail_at_gate.options(abandon_after=0.1).call, LookupError(), ())
                await ledgers.wait.call("at the gate")
                scope.cancel()
        failure = await asked.wait(1)
        assert isinstance(failure.reason, Unresponsive)
        assert not failure.has_ended
        await ledgers.open_gate.call()


@only_sim
async def test_each_death_is_asked_about_once_whatever_the_order(backend: Backend, seed: int):
    """P5: deaths, answers and healing by hand as the seed has them; what is handled is never restarted."""
    draw = random.Random(seed)
    asked = Asked()
    policy = restart(intensity=100, backoff=Backoff(draw.choice([0, 0.1])))
    async with backend.procs({"gpus": 3}, supervision=policy) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ledger)
        began = 0
        async with procs.on_failure(asked):
            for _ in range(draw.randrange(1, 8)):
                rank = draw.choice([point.rank for point in procs.alive().points()])
                asked.answer = draw.random() < 0.5
                await kill_and_see(backend, procs, log, rank)
                began += not asked.answer
                if asked.answer and (draw.random() < 0.5 or not len(procs.alive())):
                    await procs.replace([{"gpus": rank}])
                    began += 1
                await procs.settled()
                if not len(procs.alive()):
                    await procs.replace(procs.points())
                    began += len(procs)
        assert len(asked.failures) == len(log.of(Died))
        assert [failure.points[0].rank for failure in asked.failures] == log.ranks(Died)
        if began:
            await log.wait(Restarted, began)
        assert len(log.of(Restarted)) == began
        assert len(await ledgers.alive().rank.call()) == len(procs.alive())
