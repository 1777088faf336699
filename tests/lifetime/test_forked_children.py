"""Children that code of actors forks: no second workers, and no users of handles (O4)."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import trio

import trimesh
from trimesh import Actor, endpoint, this_host

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Served(Actor):
    """Is called by others."""

    @endpoint
    async def value(self) -> int:
        return 1


class Forker(Actor):
    """Forks children in each kind of endpoint."""

    def __init__(self, served: Any, port: trimesh.Port[int]) -> None:
        self.served = served
        self.port = port

    def fork(self, how: str) -> int:
        pid = os.fork()
        if pid == 0:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - of the child
            self.be_child(how)
        return pid

    def be_child(self, how: str) -> None:
        if how == "raise":
            raise ValueError("in the child")
        if how == "exit":
            sys.exit(7)

    @endpoint(thread=True)
    def threaded(self, how: str) -> int:
        return self.fork(how)

    @endpoint
    def inline(self, how: str) -> int:
        return self.fork(how)

    @endpoint
    async def awaited(self, how: str) -> int:
        return self.fork(how)

    @endpoint
    async def waiting(self, how: str) -> int:
        pid = os.fork()
        if pid == 0:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115, ASYNC230 - of the child
            try:
                await self.served.value.call_one()
            except RuntimeError:
                self.be_child(how)
                await trio.sleep_forever()
            os._exit(9)
        return pid

    @endpoint(thread=True)
    def code_of(self, pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    @endpoint(thread=True)
    def used_in_a_child(self) -> list[str]:
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_use, args=(self.served, self.port, queue))
        child.start()
        try:
            return [queue.get(timeout=20) for _ in range(4)]
        finally:
            child.kill()
            child.join()


def _use(served: Any, port: trimesh.Port[int], queue: Any) -> None:
    def told(function: Callable[[], object]) -> None:
        try:
            queue.put(f"returned {function()}")
        except BaseException as error:  # noqa: BLE001 - what came is what the test wants to know
            queue.put(f"{type(error).__name__}: {error}")

    async def own() -> int:
        async with this_host().spawn_procs({"n": 1}) as procs:
            return int(await (await procs.spawn("own", Served)).value.call_one())

    told(served.value.call_one.from_thread)
    told(lambda: trimesh.from_thread.run(served.value.call_one))
    told(lambda: trimesh.from_thread.run(port.send, 1))
    told(lambda: trio.run(own))


async def _spawn(procs: Any, port: trimesh.Port[int]) -> Any:
    served = await procs.spawn("served", Served)
    return (await procs.spawn("forker", Forker, served.slice(n=1), port)).slice(n=0)


@pytest.mark.daily
def test_child_ends_where_it_would_go_on_as_a_worker() -> None:
    """O4: as the interpreter ends, whatever kind of endpoint has forked it; the worker goes on."""

    async def main() -> None:
        async with (
            this_host().spawn_procs({"n": 2}) as procs,
            trimesh.open_channel(int, capacity=1) as (port, _),
        ):
            forker = await _spawn(procs, port)
            for fork in (forker.threaded, forker.inline, forker.awaited, forker.waiting):
                for how, code in (("raise", 1), ("exit", 7), ("return", 0)):
                    with trio.fail_after(20):
                        assert await forker.code_of.call_one(await fork.call_one(how)) == code

    trio.run(main)


def test_child_of_the_controller_ends_with_its_block() -> None:
    """O4."""

    async def main() -> None:
        async with this_host().spawn_procs({"n": 1}) as procs:
            served = await procs.spawn("served", Served)
            for error, code in ((KeyError("in the child"), 1), (SystemExit(3), 3), (None, 0)):
                pid = os.fork()
                if pid == 0:
                    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, ASYNC230 - of the child
                    if error is not None:
                        raise error
                    return
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code  # noqa: ASYNC222 - it ends at once
            assert await served.value.call_one() == 1

    trio.run(main)


@pytest.mark.daily
def test_handles_are_refused_in_words_in_a_forked_child() -> None:
    """O4: each way in; a child may have meshes of its own."""

    async def main() -> None:
        async with (
            this_host().spawn_procs({"n": 2}) as procs,
            trimesh.open_channel(int, capacity=1) as (port, _),
        ):
            forker = await _spawn(procs, port)
            with trio.fail_after(50):
                *refused, own = await forker.used_in_a_child.call_one()
            for text in refused:
                assert "this process was forked from one" in text
            assert own == "returned 1"

    trio.run(main)
