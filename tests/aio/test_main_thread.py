"""The loop of asyncio actors is in the main thread of their process: signal handlers of it, beside those of Trio."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from tests.conformance.probe import Probe
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, MeshErrorGroup, endpoint, leaves, this_host
from trimesh.aio import actor
from trimesh.aio.driver import adopt_guest
from trimesh.errors import TrimeshInternalError

pytestmark = pytest.mark.real


class Handler(trimesh.aio.Actor):
    """Handles SIGUSR1."""

    def __init__(self) -> None:
        self.count = 0
        self.came = asyncio.Event()

    def _come(self) -> None:
        assert asyncio.get_running_loop().is_running()
        self.count += 1
        self.came.set()

    @endpoint
    async def is_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    @endpoint
    async def handle(self) -> int:
        """Install the handler; return the process id."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._come)
        return os.getpid()

    @endpoint
    async def signal_itself(self) -> int:
        self.came.clear()
        os.kill(os.getpid(), signal.SIGUSR1)
        await self.came.wait()
        return self.count

    @endpoint(concurrency=2, group="watch")
    async def wait_come(self) -> int:
        await self.came.wait()
        return self.count

    @endpoint
    async def remove(self) -> bool:
        return asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)


class Receiver(Actor):
    """Receives SIGUSR2 in Trio."""

    def __init__(self) -> None:
        self.is_open = trio.Event()

    @endpoint(concurrency=2)
    async def receive(self) -> int:
        with trio.open_signal_receiver(signal.SIGUSR2) as signals:
            self.is_open.set()
            async for signum in signals:
                return signum
        raise AssertionError

    @endpoint(concurrency=2, group="watch")
    async def wait_open(self) -> int:
        await self.is_open.wait()
        return os.getpid()

    @endpoint(concurrency=2, group="quick")
    async def echo(self, number: int) -> int:
        return number


async def test_endpoints_run_in_the_main_thread_of_their_process() -> None:
    """K05: where libraries expect a loop."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        handlers = await procs.spawn("handlers", Handler)
        assert (await handlers.is_main_thread.call()).values() == (True, True)


async def test_signal_handler_of_the_loop_is_called_until_it_is_removed() -> None:
    """K05: by a signal that the process sends to itself, and calls go on."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        handler = await procs.spawn("handler", Handler)
        await handler.handle.call_one()
        for count in range(1, 6):
            assert await handler.signal_itself.call_one() == count
        assert await handler.remove.call_one()
        assert not await handler.remove.call_one()
        assert await handler.is_main_thread.call_one()


async def test_signal_from_outside_wakes_the_loop() -> None:
    """K05: while it waits, and nothing else comes."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        handler = await procs.spawn("handler", Handler)
        pid = await handler.handle.call_one()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handler.wait_come.call_one)
            await handler.is_main_thread.call_one()
            os.kill(pid, signal.SIGUSR1)
        assert await handler.wait_come.call_one() == 1


async def test_actor_ends_with_a_signal_handler_and_the_next_one_may_have_its_own() -> None:
    """K05: what is left installed ends with the loop; the Trio actor of the process serves on."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        receiver = await procs.spawn("receiver", Receiver)
        for number in range(3):
            async with procs.spawn(f"handler_{number}", Handler) as handler:
                await handler.handle.call_one()
                assert await handler.signal_itself.call_one() == 1
            assert await receiver.echo.call_one(number) == number


async def test_signals_of_trio_and_of_asyncio_come_in_one_process() -> None:
    """K05: each is heard by who has asked for it, whichever came first."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        receiver = await procs.spawn("receiver", Receiver)
        found: list[int] = []

        async def receive() -> None:
            found.append(await receiver.receive.call_one())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            pid = await receiver.wait_open.call_one()
            async with procs.spawn("handler", Handler) as handler:
                await handler.handle.call_one()
                assert await handler.signal_itself.call_one() == 1
                os.kill(pid, signal.SIGUSR2)
        assert found == [signal.SIGUSR2]


def use_uvloop() -> None:
    uvloop: Any = importlib.import_module("uvloop")
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


class Cutting(trimesh.aio.Actor):
    @endpoint
    async def cut(self, receiver: Receiver) -> float:
        """Cut a call of its own, while nothing else happens; return how long that takes, at best."""
        found = []
        for _ in range(5):
            call = asyncio.create_task(receiver.wait_open.call_one())
            await asyncio.sleep(0.05)
            began = time.monotonic()
            call.cancel()
            await asyncio.wait([call])
            found.append(time.monotonic() - began)
        return min(found)


async def test_cancel_on_uvloop_wakes_trio() -> None:
    """C01: at once, and not with the next sign of life of a link."""
    pytest.importorskip("uvloop", reason="uvloop is not installed")
    async with (
        this_host().spawn_procs({"gpus": 1}, setup=use_uvloop) as procs,
        this_host().spawn_procs({"gpus": 1}) as others,
    ):
        receiver = await others.spawn("receiver", Receiver)
        cutting = await procs.spawn("cutting", Cutting)
        assert await cutting.cut.call_one(receiver) < 0.1


def test_generators_of_trio_are_its_own_though_an_id_was_one_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    """K05: of a generator that has run to its end nobody tells, and another one gets its address."""
    is_in_trio = False
    given: list[str] = []
    hooks = SimpleNamespace(firstiter=lambda _: None, finalizer=lambda _: given.append("Trio"))
    monkeypatch.setattr(trio.lowlevel, "in_trio_task", lambda: is_in_trio)

    async def generate() -> AsyncGenerator[int, None]:
        yield 0

    async def run_both() -> None:
        nonlocal is_in_trio
        generators = [generate() for _ in range(100)]
        seen = {id(one) for one in generators}
        for generator in generators:
            async for _ in generator:
                pass
        del generator
        generators.clear()
        is_in_trio = True
        generators = [generate() for _ in range(100)]
        assert seen & {id(one) for one in generators}
        for generator in generators:
            await anext(generator)
        del generator
        generators.clear()
        is_in_trio = False

    asyncio.run(actor._with_generators_of_trio(hooks, run_both()))
    assert given == ["Trio"] * 100


class Stopping(trimesh.aio.Actor):
    """Ends the loop that it shares, as nobody should."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    @endpoint(concurrency=8, group="many")
    async def echo(self, number: int) -> int:
        return number

    @endpoint(concurrency=2, group="hold")
    async def hold(self) -> None:
        self.begun.set()
        await asyncio.Event().wait()

    @endpoint(concurrency=2, group="hold")
    async def hold_there(self, other: Probe) -> None:
        self.begun.set()
        await other.hold.call_one()

    @endpoint(group="stop")
    async def stop(self) -> None:
        await self.begun.wait()
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.stop)

    @endpoint(group="stop")
    async def exit_in_a_task(self) -> None:
        await self.begun.wait()
        self.kept = asyncio.create_task(self._exit())

    async def _exit(self) -> None:
        raise SystemExit(3)


@pytest.mark.parametrize("held", ["hold", "hold_there"])
@pytest.mark.parametrize("end", ["stop", "exit_in_a_task"])
async def test_loop_that_an_actor_ends_fails_its_actors_and_nothing_else(end: str, held: str) -> None:
    """K05: by `loop.stop()`, or a task that raises `SystemExit`. Calls and idle slots end; the process serves on."""
    async with this_host().spawn_procs({"gpus": 1}) as procs, this_host().spawn_procs({"gpus": 1}) as others:
        other = await others.spawn("other", Probe)
        receiver = await procs.spawn("receiver", Receiver)
        found: list[BaseException] = []
        with pytest.raises(MeshErrorGroup) as raised:
            async with procs.spawn("stopping", Stopping) as stopping:

                async def hold() -> None:
                    try:
                        await getattr(stopping, held).call_one(*([other] if held == "hold_there" else []))
                    except TrimeshInternalError as error:
                        found.append(error)

                async with trio.open_nursery() as nursery:
                    for number in range(8):
                        nursery.start_soon(stopping.echo.call_one, number)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(hold)
                    await getattr(stopping, end).call_one()
                await trio.sleep_forever()
        assert "loop of this process has ended" in str(found[0])
        assert ["loop of this process has ended" in str(leaf) for leaf in leaves(raised.value)] == [True]
        assert await receiver.echo.call_one(1) == 1
        again = await procs.spawn("again", Stopping)
        assert await again.echo.call_one(2) == 2


def test_loop_waits_for_timers_that_trio_sets_and_no_longer_than_a_selector_can() -> None:
    """K04: a timer of the loop, set in a turn of Trio before its wait, beside a deadline in thirty years."""
    seconds: list[float] = []

    async def in_trio(loop: asyncio.AbstractEventLoop) -> None:
        with trio.move_on_after(1e9):
            for turn in range(4):
                came, began = trio.Event(), time.monotonic()
                # A thread wakes the loop first, so that the timer is set between two waits.
                threading.Timer(0.01, loop.call_soon_threadsafe, [came.set]).start()
                await came.wait()
                if turn % 2:
                    await trio.lowlevel.checkpoint()
                over = trio.Event()
                loop.call_later(0.01, over.set)
                await over.wait()
                seconds.append(time.monotonic() - began)

    async def host() -> None:
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        trio.lowlevel.start_guest_run(
            in_trio,
            loop,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            run_sync_soon_not_threadsafe=adopt_guest(loop, lambda _: None),
            done_callback=over.set_result,
            host_uses_signal_set_wakeup_fd=True,
        )
        rescue = threading.Timer(HANG_SECONDS, loop.call_soon_threadsafe, [over.cancel])
        rescue.start()
        (await over).unwrap()
        rescue.cancel()

    asyncio.run(host())
    assert max(seconds) < HANG_SECONDS / 2
