"""What simulated actors may not do is refused in words that name another way; what they may do takes virtual time."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import simulate


async def nothing() -> None:
    await asyncio.sleep(0)


class Program(Actor):
    """Does what programs do beside calling each other."""

    @endpoint
    async def listen(self) -> None:
        await trio.open_tcp_listeners(0, host="127.0.0.1")

    @endpoint
    async def connect(self) -> None:
        socket.create_connection(("127.0.0.1", 1))

    @endpoint
    async def pair(self) -> None:
        socket.socketpair()

    @endpoint
    async def subprocess_by_trio(self) -> None:
        await trio.run_process(["/bin/true"])

    @endpoint
    async def subprocess_by_hand(self) -> None:
        subprocess.run(["/bin/true"], check=True)  # noqa: ASYNC221 - as programs do

    @endpoint
    async def system(self) -> None:
        os.system("true")  # noqa: ASYNC221 - as programs do

    @endpoint
    async def thread(self) -> None:
        threading.Thread(target=print).start()

    @endpoint
    def asyncio_inline(self) -> None:
        asyncio.run(nothing())

    @endpoint(thread=True)
    def asyncio_thread(self) -> None:
        asyncio.run(nothing())

    @endpoint(thread=True)
    def back_to_trio(self) -> None:
        trio.from_thread.run(trio.sleep, 1)

    @endpoint(thread=True)
    def back_to_trio_sync(self) -> float:
        trio.from_thread.check_cancelled()
        return trio.from_thread.run_sync(trio.current_time)

    @endpoint
    async def write(self, path: str) -> str:
        with trio.fail_after(HANG_SECONDS):
            async with await trio.open_file(path, "w") as file:
                await file.write("text")
            return await trio.Path(path).read_text()


REFUSED = {
    "listen": "cannot open a socket",
    "connect": "cannot open a socket",
    "pair": "cannot open a socket",
    "subprocess_by_trio": "cannot start a subprocess",
    "subprocess_by_hand": "cannot start a subprocess",
    "system": "cannot start a subprocess",
    "thread": "cannot start a thread",
    "asyncio_inline": "cannot run asyncio",
    "asyncio_thread": "cannot run asyncio",
    "back_to_trio": "must not wait for Trio",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:coroutine 'nothing' was never awaited")
@simulate(seeds=2, per_host={"gpus": 1})
async def test_refused(mesh, name):
    program: Any = await mesh.spawn("program", Program)

    with pytest.raises(RuntimeError, match=REFUSED[name]) as caught:
        await getattr(program, name).call_one()

    assert 'mesh_backend("proc")' in str(caught.value)


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=5, per_host={"gpus": 2})
async def test_files_of_trio_work(mesh, tmp_path):
    program = await mesh.spawn("program", Program)

    for member in (0, 1):
        assert await program.slice(gpus=member).write.call_one(str(tmp_path / f"{member}")) == "text"


@simulate(seeds=5, per_host={"gpus": 1})
async def test_thread_calls_sync_functions_in_trio(mesh):
    program = await mesh.spawn("program", Program)

    assert await program.back_to_trio_sync.call_one() <= trio.current_time()


@simulate(seeds=2)
async def test_test_itself_may_do_all_of_it(tmp_path):
    del tmp_path
    async with trimesh.this_host().spawn_procs({"gpus": 1}):
        with socket.socket() as made:
            assert made.fileno() > 0
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


class Engine(trimesh.aio.Actor):
    """Is a program of asyncio."""

    @endpoint
    async def answer(self) -> int:
        return 42


@simulate(seeds=2, per_host={"gpus": 2})
async def test_actor_of_asyncio_is_refused_in_words(mesh):
    """The mesh goes on, and has nothing of it."""
    with pytest.raises(trimesh.MeshErrorGroup) as caught:
        await mesh.spawn("engines", Engine)
    for leaf in trimesh.leaves(caught.value):
        assert isinstance(leaf, RuntimeError)
        assert "must be a trimesh.Actor" in str(leaf)
    program = await mesh.spawn("programs", Program)
    assert len(program.alive()) == 2
