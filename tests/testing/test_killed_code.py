"""What was killed runs no more, in simulations as over real processes: no `finally`, no clean-up, no generator."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio
from tests.conformance.meshes import SimBackend

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import simulate


class Holder(Actor):
    """Writes down all clean-up that it runs."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.stack = AsyncExitStack()

    def note(self, what: str) -> None:
        with self.path.open("a") as file:
            file.write(what + "\n")

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        try:
            yield
        finally:
            self.note("context manager")

    @asynccontextmanager
    async def held_long(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.note("exit stack")

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        await self.stack.enter_async_context(self.held_long())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.background)
                yield
                nursery.cancel_scope.cancel()
            await self.stack.aclose()
        finally:
            self.note("lifespan")

    async def background(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.note("background task")

    @endpoint
    async def hold(self) -> None:
        try:
            with self.held(), trio.CancelScope(shield=True):
                await trio.sleep(1000)
        finally:
            self.note("endpoint")

    @endpoint(concurrency=2)
    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(1000):
                yield number
                await trio.sleep(0.1)
        finally:
            self.note("generator")


async def use_until_it_dies(holder, faults, how: str) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(trimesh.ProcDied), flatten_subgroups=True, allow_unwrapped=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(holder.hold.call_one)
            stream = await nursery.start(read_one, holder)
            del stream
            faults.kill({"gpus": 1}, how)


async def read_one(holder, *, task_status) -> None:
    async with holder.items.stream() as items:
        async for _ in items:
            task_status.started()
            break
        await trio.sleep_forever()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sigkill", "sigterm", "exit(3)"])
@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=4, per_host={"gpus": 2}, supervision=trimesh.Isolate())
async def test_no_clean_up_of_a_killed_process_runs(mesh, faults, tmp_path, how):
    path = tmp_path / "log"
    path.write_text("")
    holder = await mesh.slice(gpus=1).spawn("holder", Holder, str(path))

    await use_until_it_dies(holder, faults, how)

    await trio.sleep(0.1)
    gc.collect()
    assert path.read_text() == ""


class Sender(Actor):
    """Offers an item that is never received."""

    @endpoint
    async def offer(self, port: trimesh.Port[int], seconds: float) -> None:
        with trio.move_on_after(seconds):
            await port.send(1)


@pytest.mark.parametrize("seconds", [math.inf, 0.1], ids=["sent", "recalled"])
@simulate(seeds=5, per_host={"gpus": 1}, supervision=trimesh.Isolate())
async def test_killed_sender_of_a_channel_leaves_no_task(mesh, faults, seconds):
    """A sent item is recalled when its sender is cancelled, and the sender waits for the reply, which never comes."""
    sender = await mesh.spawn("sender", Sender)
    async with trimesh.open_channel(int, capacity=0) as (port, _), trio.open_nursery() as nursery:
        nursery.start_soon(fail, sender.offer, port, seconds)
        await trio.sleep(0.05)
        async with faults.partition("controller", {"gpus": 0}):
            await trio.sleep(10)


async def fail(offer, *arguments) -> None:
    with pytest.raises(trimesh.ProcDied):
        await offer.call_one(*arguments)


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=5)
async def test_clean_up_of_a_process_that_ends_runs(tmp_path):
    path = tmp_path / "log"
    path.write_text("")

    async with trimesh.this_host().spawn_procs({"gpus": 1}) as procs:
        await procs.spawn("holder", Holder, str(path))

    assert path.read_text().splitlines() == ["background task", "exit stack", "lifespan"]


LEFT: list[str] = []


class Sloppy(Actor):
    """Leaves generators behind that the collector finds."""

    @endpoint
    async def hold(self) -> None:
        self.me = self  # a cycle
        self.running = self.generate()
        next(self.running)
        await trio.sleep_forever()

    def generate(self) -> Generator[None, None, None]:
        try:
            yield
        finally:
            LEFT.append("generator")


@simulate(seeds=10, per_host={"gpus": 2}, supervision=trimesh.Isolate())
async def test_collector_runs_nothing_of_a_killed_process(mesh, faults):
    LEFT.clear()
    sloppy = await mesh.slice(gpus=1).spawn("sloppy", Sloppy)
    with pytest.RaisesGroup(trimesh.ProcDied):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sloppy.hold.call_one)
            await trio.sleep(1)
            faults.kill({"gpus": 1})

    await trio.sleep(1)
    gc.collect()
    assert LEFT == []


class Locker(Actor):
    """Has a lock file while it works, as many programs do."""

    @endpoint
    async def work(self, path: str) -> None:
        await trio.Path(path).touch(exist_ok=False)
        try:
            await trio.sleep_forever()
        finally:
            os.unlink(path)


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=10, per_host={"gpus": 1}, supervision=trimesh.Restart())
async def test_lock_file_of_a_killed_process_is_left(mesh, faults, tmp_path):
    path = tmp_path / "lock"
    path.unlink(missing_ok=True)
    locker = await mesh.spawn("locker", Locker)
    with pytest.RaisesGroup(trimesh.ProcDied):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(locker.work.call_one, str(path))
            while not path.exists():  # noqa: ASYNC110 - a file has no event
                await trio.sleep(0.01)
            faults.kill({"gpus": 0})

    with pytest.raises(FileExistsError):
        await locker.work.call_one(str(path))


class Opener(Actor):
    """Opens files, and closes none."""

    @endpoint
    async def lock(self, path: str) -> None:
        number = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @endpoint
    async def hold(self, locked: str, written: str) -> None:
        self.file = open(written, "w")  # noqa: ASYNC230, SIM115 - as some programs do
        self.file.write("in the buffer")
        self.me = self  # the file is freed late
        await self.lock(locked)
        await trio.sleep_forever()


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=5, per_host={"gpus": 1}, supervision=trimesh.Restart())
async def test_descriptors_of_a_killed_process_are_closed(mesh, faults, tmp_path):
    locked, written = tmp_path / "locked", tmp_path / "written"
    locked.unlink(missing_ok=True)
    opener = await mesh.spawn("opener", Opener)
    with pytest.RaisesGroup(trimesh.ProcDied):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(opener.hold.call_one, str(locked), str(written))
            while not locked.exists():  # noqa: ASYNC110 - a file has no event
                await trio.sleep(0.01)
            faults.kill({"gpus": 0})

    await opener.lock.call_one(str(locked))  # of the next incarnation: the lock is free
    gc.collect()
    assert written.read_text() == ""


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=3)
async def test_numbers_that_a_process_leaves_open_end_with_it(tmp_path):
    for _ in range(2):
        async with trimesh.this_host().spawn_procs({"gpus": 2}) as procs:
            opener = await procs.spawn("opener", Opener)
            await opener.slice(gpus=0).lock.call_one(str(tmp_path / "locked"))


class Nesting(Actor):
    """Owns a mesh of its own, in the midst of which it is killed."""

    def __init__(self) -> None:
        self.is_open = trio.Event()

    @endpoint
    async def own(self) -> None:
        async with trimesh.this_proc().spawn("inner", Nesting):
            self.is_open.set()
            await trio.sleep_forever()

    @endpoint(group="others", concurrency=2)
    async def opened(self) -> None:
        await self.is_open.wait()


def test_block_that_a_killed_process_had_open_leaves_ctrl_c_to_others():
    """O6: the handler of blocks goes with the last that is open, also when that is never left."""
    backend = SimBackend(0)

    async def main() -> None:
        async with backend.open():
            with trio.CancelScope() as scope:
                async with backend.procs(supervision=trimesh.Isolate()) as procs:
                    nesting = await procs.spawn("nesting", Nesting)
                    await nesting.own.broadcast()
                    await nesting.opened.call()
                    backend.kill(nesting, 0)
                    with pytest.raises(trimesh.ProcDied):
                        await nesting.slice(gpus=0).opened.call_one()
                    scope.cancel()

    backend.run(main)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
