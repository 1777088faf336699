"""Cancels, deadlines, errors and deaths of actors that are asyncio programs: the rules C, D and E (K05)."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import trio
from tests.aio.engines import Engine
from tests.conformance.probe import Probe
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Isolate, MeshErrorGroup, ProcDied, RemoteError, endpoint, leaves, this_host
from trimesh._runtime.tasks import in_trio

pytestmark = pytest.mark.real


class Odd(Exception):
    """Raised over there."""


class Strict(trimesh.aio.Actor):
    """One slot, in which it does what a test asks for, and a group that looks at it."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.news = asyncio.Event()
        self.gate = asyncio.Event()

    def note(self, note: Any) -> None:
        self.log.append(note)
        self.news.set()

    @endpoint
    async def hold(self, note: str = "hold") -> None:
        self.note(note)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            assert task is not None
            self.note((f"{note} cancelled", task.cancelling(), str(cancelled)))
            raise

    @endpoint(concurrency=100, group="many")
    async def hold_many(self, note: str) -> None:
        await Strict.hold(self, note)

    @endpoint(concurrency=100, group="many")
    async def clean_up(self, error: BaseException | None = None) -> None:
        """Stay until cancelled, then wait for the gate, past further cancels, and maybe fail."""
        self.note("staying")
        try:
            await asyncio.Event().wait()
        finally:
            self.note("cleaning")
            await self.gate.wait()
            self.note("clean")
            if error is not None:
                raise error

    @endpoint
    async def add(self, note: Any) -> Any:
        self.note(note)
        return note

    @endpoint
    async def wait_for_gate(self) -> None:
        self.note("at the gate")
        await self.gate.wait()

    @endpoint(concurrency=100, group="many")
    async def fail(self, error: BaseException, ranks: list[int] | None = None, *, at_gate: bool = False) -> int:
        if at_gate:
            self.note("at the gate")
            waiting = asyncio.ensure_future(self.gate.wait())
            while not waiting.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(waiting)
        if ranks is None or trimesh.current_rank() in ranks:
            raise error
        return trimesh.current_rank()

    @endpoint(concurrency=100, group="many")
    async def relay(self, other: Any, name: str, *args: Any) -> Any:
        return await getattr(other, name).call(*args)

    @endpoint
    async def work_in_trio(self) -> None:
        """Do what ends without a wait, as a call does whose reply comes while its slot looks for messages."""

        async def work() -> None:
            """Do nothing."""

        await in_trio(work)()

    @endpoint(concurrency=100, group="watch")
    async def open_gate(self) -> None:
        self.gate.set()

    @endpoint(concurrency=100, group="watch")
    async def wait(self, note: Any) -> None:
        while note not in [one[0] if isinstance(one, tuple) else one for one in self.log]:
            self.news.clear()
            await self.news.wait()

    @endpoint(concurrency=100, group="watch")
    async def seen(self) -> list[Any]:
        return self.log

    @endpoint(concurrency=100, group="watch")
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Guarded(Strict):
    """Has a `lifespan` that stays at its beginning, or fails at its end."""

    def __init__(self, *, tell: Any = None, end: Path | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.tell, self.end, self.error = tell, end, error

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if self.tell is not None:
            try:
                await self.tell.note.call_one("setting up")
                await asyncio.Event().wait()
            finally:
                assert self.end is not None
                self.end.write_text("unwound")
        yield
        if self.error is not None:
            raise self.error


# ---- cancels ---------------------------------------------------------------------------------------------------------


async def test_cancel_that_comes_early_is_not_lost() -> None:
    """C02, K05: at any moment of the start; what has begun has ended when the caller goes on."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        strict = await procs.spawn("strict", Strict)
        for turns in range(20):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(strict.hold_many.call_one, f"hold {turns}")
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            seen = await strict.seen.call_one()
            began = seen.count(f"hold {turns}")
            assert began == len([one for one in seen if one[0] == f"hold {turns} cancelled"]) <= 1


async def test_cancel_reaches_the_call_after_one_that_did_not_wait() -> None:
    """C02, K05: both begin in one step of their slot."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        strict = await procs.spawn("strict", Strict)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(strict.wait_for_gate.call_one)
            await strict.wait.call_one("at the gate")
            async with trio.open_nursery() as cancelled:
                cancelled.start_soon(strict.work_in_trio.call_one)
                await strict.seen.call_one()  # it is queued
                cancelled.start_soon(strict.hold.call_one)
                await strict.seen.call_one()  # and this behind it
                await strict.open_gate.call_one()
                await strict.wait.call_one("hold")
                cancelled.cancel_scope.cancel()
        assert await strict.seen.call_one() == ["at the gate", "hold", ("hold cancelled", 1, "hold() was cancelled")]


async def test_task_sees_one_cancel_which_names_the_endpoint() -> None:
    """C04, C09, K05: however often the caller's scopes are cancelled."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        strict = await procs.spawn("strict", Strict)
        with trio.CancelScope() as outer, trio.CancelScope() as inner:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(strict.hold.call_one)
                await strict.wait.call_one("hold")
                inner.cancel()
                outer.cancel()
        [_, (note, count, text)] = await strict.seen.call_one()
        assert (note, count) == ("hold cancelled", 1)
        assert "hold() was cancelled" in text


async def test_cancelled_set_up_unwinds(tmp_path: Path) -> None:
    """C08, K05: what was reached of `lifespan` has been left when `spawn` goes on, and the actor never served."""
    told = tmp_path / "told"
    async with this_host().spawn_procs({"gpus": 1}, name="outside") as outside:
        notes = await outside.spawn("notes", Probe)
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            async with trio.open_nursery() as nursery:

                async def spawn() -> None:
                    await procs.spawn("guarded", Guarded, tell=notes, end=told)

                nursery.start_soon(spawn)
                await notes.wait.call_one("setting up")
                nursery.cancel_scope.cancel()
            assert told.read_text() == "unwound"


async def test_cancelled_queued_message_never_runs() -> None:
    """C11, K05."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        strict = await procs.spawn("strict", Strict)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(strict.wait_for_gate.call_one)
            await strict.wait.call_one("at the gate")
            async with trio.open_nursery() as cancelled:
                for number in range(5):
                    cancelled.start_soon(strict.add.call_one, f"never {number}")
                await strict.seen.call_one()  # they have been sent
                cancelled.cancel_scope.cancel()
            await strict.open_gate.call_one()
            assert await strict.add.call_one("next") == "next"
        assert await strict.seen.call_one() == ["at the gate", "next"]


# ---- deadlines -------------------------------------------------------------------------------------------------------


async def test_least_budget_holds_along_a_chain() -> None:
    """D02, D03, K05: through an asyncio actor, and another one."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        stricts = await procs.spawn("stricts", Strict)
        first, second = stricts.slice(gpus=0), stricts.slice(gpus=1)
        budget = await procs.slice(gpus=0).spawn("budget", Budget)
        with trio.fail_after(HANG_SECONDS):
            found = await first.relay.call_one(second, "relay", budget, "left")
        [[left]] = [values.values() for values in found.values()]
        assert 0 < left <= HANG_SECONDS
        [[unlimited]] = [
            values.values() for values in (await first.relay.call_one(second, "relay", budget, "left")).values()
        ]
        assert unlimited == math.inf


class Budget(trimesh.Actor):
    @endpoint
    async def left(self) -> float:
        return trio.current_effective_deadline() - trio.current_time()


async def test_expired_call_never_starts() -> None:
    """D04, K05: while it waits in the mailbox its budget ends; the slot goes on with the next."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        strict = await procs.spawn("strict", Strict)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(strict.wait_for_gate.call_one)
            await strict.wait.call_one("at the gate")
            with pytest.raises(trio.TooSlowError), trio.fail_after(0.05):
                await strict.add.call_one("never")
            await strict.open_gate.call_one()
        assert await strict.add.call_one("next") == "next"
        assert await strict.seen.call_one() == ["at the gate", "next"]


async def test_clean_up_outlives_the_budget() -> None:
    """D05, D06, K05: the caller waits for it, and gets `TooSlowError`, no remote error."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        strict = await procs.spawn("strict", Strict)
        async with trio.open_nursery() as nursery:
            scopes: list[trio.CancelScope] = []

            async def call() -> None:
                with pytest.raises(trio.TooSlowError), trio.fail_after(HANG_SECONDS) as scope:
                    scopes.append(scope)
                    await strict.clean_up.call_one()
                assert "clean" in await strict.seen.call_one()

            nursery.start_soon(call)
            await strict.wait.call_one("staying")
            scopes[0].deadline = trio.current_time()
            await strict.wait.call_one("cleaning")
            await strict.open_gate.call_one()


# ---- errors ----------------------------------------------------------------------------------------------------------


async def test_all_ranks_that_fail_are_in_the_group() -> None:
    """E02, E03, E04, K05: with coordinates and the endpoint's name; `call_one` raises bare."""
    async with this_host().spawn_procs({"gpus": 3}) as procs:
        stricts = await procs.spawn("stricts", Strict)
        caught: list[MeshErrorGroup] = []

        async def call() -> None:
            try:
                await stricts.fail.call(Odd("odd"), [0, 2], at_gate=True)
            except MeshErrorGroup as error:
                caught.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await stricts.wait.call("at the gate")
            await stricts.slice(gpus=0).open_gate.call_one()
            await stricts.slice(gpus=slice(1, 3)).open_gate.call()
        [error] = caught
        assert {type(leaf) for leaf in leaves(error)} == {Odd}
        assert {point["gpus"] for point in trimesh.coords(error)} == {0, 2}
        origin = trimesh.origin(next(leaves(error)))
        assert origin is not None
        assert (origin.endpoint, origin.actor) == ("fail", "Strict")
        with pytest.raises(Odd):
            await stricts.slice(gpus=1).fail.call_one(Odd("bare"))


async def test_exits_never_become_local_ones() -> None:
    """E06, K05: KeyboardInterrupt, SystemExit and GeneratorExit are errors of the call; the loop goes on."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        strict = await procs.spawn("strict", Strict)
        for error in (KeyboardInterrupt("there"), SystemExit(3), GeneratorExit("there")):
            with pytest.raises(RemoteError, match=type(error).__name__):
                await strict.fail.call_one(error)
        assert await strict.add.call_one("alive") == "alive"


async def test_error_of_clean_up_is_added() -> None:
    """E07, K05: that of `lifespan` at the end; the first error stays."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            await procs.spawn("guarded", Guarded, error=Odd("clean-up"))
            raise LookupError("body")
    assert {str(leaf).strip("'") for leaf in leaves(caught.value)} == {"body", "clean-up"}


async def test_error_while_cancelling_wins() -> None:
    """E08, K05."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        strict = await procs.spawn("strict", Strict)
        await strict.open_gate.call_one()
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(strict.clean_up.call_one, Odd("on the way out"))
                await strict.wait.call_one("staying")
                nursery.cancel_scope.cancel()
        assert [str(leaf) for leaf in leaves(caught.value)] == ["on the way out"]


async def test_failed_broadcast_fails_the_block() -> None:
    """E10, K05."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            stricts = await procs.spawn("stricts", Strict)
            await stricts.fail.broadcast(Odd("nobody"), [1])
            await trio.sleep_forever()
    assert [str(leaf) for leaf in leaves(caught.value)] == ["nobody"]
    assert trimesh.coords(caught.value) == [{"gpus": 1}]


# ---- deaths ----------------------------------------------------------------------------------------------------------


async def test_death_cites_the_process_to_an_asyncio_caller() -> None:
    """E14, X3, K05: an asyncio actor that calls a process which dies gets `ProcDied`, and lives on."""
    async with this_host().spawn_procs({"gpus": 2}, supervision=Isolate()) as procs:
        stricts = await procs.spawn("stricts", Strict)
        first, second = stricts.slice(gpus=0), stricts.slice(gpus=1)
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(MeshErrorGroup) as caught:
                    await first.relay.call_one(second, "hold", "there")
                assert [type(leaf) for leaf in leaves(caught.value)] == [ProcDied]
                assert trimesh.coords(caught.value) == [{"gpus": 1}]

            nursery.start_soon(call)
            await second.wait.call_one("there")
            await second.die.broadcast()
        assert await first.add.call_one("alive") == "alive"


async def test_reply_to_a_caller_that_has_died_is_no_error() -> None:
    """E13, K05: the asyncio actor was cancelled for it, and serves others."""
    async with this_host().spawn_procs({"gpus": 2}, supervision=Isolate()) as procs:
        stricts = await procs.spawn("stricts", Strict)
        first, second = stricts.slice(gpus=0), stricts.slice(gpus=1)
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(ProcDied):
                    await second.relay.call_one(first, "hold", "for the dead")

            nursery.start_soon(call)
            await first.wait.call_one("for the dead")
            await second.die.broadcast()
            await first.wait.call_one("for the dead cancelled")
        assert await first.add.call_one("alive") == "alive"


async def test_asyncio_actors_are_started_again() -> None:
    """E14, K05: with their arguments, on a new loop; `lifespan` of the dead one did not end."""
    async with this_host().spawn_procs({"gpus": 1}, supervision=Isolate()) as procs:
        engine = await procs.spawn("engine", Engine)
        await procs.kill([{"gpus": 0}])
        await trimesh.heal(procs)
        assert await engine.square.call_one(5) == 25
        assert await engine.seen_so_far.call_one() == []


class Early(trimesh.aio.Actor):
    @endpoint
    async def await_what_is_done(self) -> str:
        """Be cancelled after what the first step awaits is done, and before the step that takes it."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        done = loop.create_future()
        loop.call_soon(done.set_result, "lost")
        loop.call_soon(task.cancel)
        try:
            found: str = await done
        except asyncio.CancelledError:
            task.uncancel()
            return "cancelled"
        return found


async def test_cancel_after_the_first_wait_is_over_is_not_lost() -> None:
    """C02: as in any task of asyncio, though the first step is made at once."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        early = await procs.spawn("early", Early)
        assert await early.await_what_is_done.call_one() == "cancelled"


class Collecting(trimesh.aio.Actor):
    @endpoint
    async def count_garbage_of_a_cut_call(self, other: Probe) -> list[str]:
        """Cut a call of its own; return which frames only the collector could free."""
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await other.hold.call_one()
            await asyncio.sleep(0)
            gc.collect()
            return [one.f_code.co_qualname for one in gc.garbage if isinstance(one, FrameType)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


async def test_cancelled_call_leaves_no_cycle_of_frames() -> None:
    """K05: nor what these refer to, arguments and tensors among it."""
    async with this_host().spawn_procs({"gpus": 1}) as procs, this_host().spawn_procs({"gpus": 1}) as others:
        other = await others.spawn("other", Probe)
        collecting = await procs.spawn("collecting", Collecting)
        assert await collecting.count_garbage_of_a_cut_call.call_one(other) == []
