"""Disks that are full, slow, fail or are left in the middle of a write, simulated and over real processes."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import trimesh
from trimesh import Actor, ProcDied, endpoint, this_host
from trimesh.testing import simulate

BOTH = pytest.mark.mesh_backend("sim", "proc")


class Log(Actor):
    """Appends lines to a file, in the ways that Python has."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = open(path, "a")  # noqa: SIM115 - as long as the actor

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        with self.file:
            yield

    @endpoint
    async def append(self, line: str) -> None:
        self.file.write(line + "\n")
        self.file.flush()

    @endpoint(thread=True)
    def append_in_thread(self, line: str) -> None:
        self.file.write(line + "\n")
        self.file.flush()

    @endpoint(thread=True, concurrency=8)
    def rename_in_threads(self, times: int) -> int:
        return sum(self.is_refused() for _ in range(times))

    def is_refused(self) -> bool:
        try:
            os.replace(self.path, self.path)
        except OSError as error:
            return error.errno == errno.EIO
        return False

    @endpoint
    async def append_by_number(self, line: str) -> None:
        os.write(self.file.fileno(), f"{line}\n".encode())

    @endpoint
    async def sync(self) -> None:
        os.fsync(self.file.fileno())

    @endpoint
    async def rewrite(self, text: str) -> None:
        made = Path(self.path + ".new")
        made.write_text(text)  # noqa: ASYNC240 - its disk is what is tested
        made.replace(self.path)  # noqa: ASYNC240

    @endpoint
    async def read(self) -> str:
        return Path(self.path).read_text()  # noqa: ASYNC240

    @endpoint
    async def kinds(self) -> list[str]:
        return kinds_of_files(self.path)


MODES: list[tuple[str, int]] = [("r", -1), ("rb", -1), ("ab", -1), ("r+b", -1), ("rb", 0), ("a", 1), ("w+", 4096)]


def kinds_of_files(path: str) -> list[str]:
    """Return what `open` makes, by mode; of a raw file the class that it extends."""
    found: list[str] = []
    for mode, buffering in MODES:
        with open(path, mode, buffering) as file:
            kind = next(kind for kind in type(file).__mro__ if kind.__module__ == "_io")
            found.append(f"{kind.__name__} {file.mode} {file.name == path} {file.closed}")
    return found


@BOTH
@simulate(seeds=3)
async def test_files_are_what_open_makes(mesh, tmp_path):
    path = str(tmp_path / "log")
    log = await mesh.slice(gpus=0).spawn("log", Log, path)

    assert await log.kinds.call_one() == kinds_of_files(path)


@BOTH
@pytest.mark.parametrize("way", ["append", "append_in_thread", "append_by_number"])
@simulate(seeds=3)
async def test_full_disk_refuses_writes_until_it_has_room(mesh, faults, fault_log, tmp_path, way):
    path = tmp_path / "log"
    path.write_text("")
    log = await mesh.slice(gpus=0).spawn("log", Log, str(path))
    append = getattr(log, way)
    await append.call_one("first")

    heal = faults.disk({"gpus": 0}).full()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as caught:
            await log.append_by_number.call_one("refused") if way == "append_by_number" else await log.rewrite.call_one(
                "refused"
            )
        assert caught.value.errno == errno.ENOSPC
    heal()

    await append.call_one("last")
    assert path.read_text() == "first\nlast\n"
    assert {fired.site for fired in fault_log} == {"disk"}


@BOTH
@pytest.mark.parametrize(
    ("operation", "name"),
    [("open", "rewrite"), ("read", "read"), ("write", "append_by_number"), ("sync", "sync"), ("rename", "rewrite")],
)
@simulate(seeds=3)
async def test_nth_operation_fails(mesh, faults, tmp_path, operation, name):
    path = tmp_path / "log"
    path.write_text("before\n")
    log = await mesh.slice(gpus=0).spawn("log", Log, str(path))
    arguments = () if name in ("read", "sync") else ("text",)
    operations = getattr(log, name)

    faults.disk({"gpus": 0}).fails(operation, nth=1 if operation == "read" else 2)

    if operation != "read":
        await operations.call_one(*arguments)
    before = path.read_text()
    with pytest.raises(OSError, match="Input/output error"):
        await operations.call_one(*arguments)
    assert path.read_text() == before
    await operations.call_one(*arguments)


@BOTH
@simulate(seeds=3)
async def test_torn_write_leaves_its_first_half(faults, tmp_path):
    path = tmp_path / "log"
    path.write_text("")
    with pytest.RaisesGroup(ProcDied) as caught:
        async with this_host().spawn_procs({"gpus": 2}, setup=faults.armed()) as procs:
            log = await procs.slice(gpus=1).spawn("log", Log, str(path))
            faults.disk(procs.slice(gpus=1)).tears(nth=2)
            await log.append.call_one("first")
            await log.append.call_one("second!")
    assert trimesh.coords(caught.value) == [{"gpus": 1}]
    assert path.read_text() == "first\nseco"


@BOTH
@simulate(seeds=2, per_host={"gpus": 1})
async def test_faults_in_threads_are_all_reported(mesh, faults, fault_log, tmp_path):
    """The link is of Trio's thread, which sends other messages at the same time."""
    log = await mesh.spawn("log", Log, str(tmp_path / "log"))
    faults.disk(mesh).fails("rename", times=1_000_000)
    refused = list[int]()

    async def rename() -> None:
        refused.append(await log.rename_in_threads.call_one(60))

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(rename)
        for _ in range(60):
            await log.kinds.call_one()

    assert sum(refused) == len(fault_log) == 480


@BOTH
@simulate(seeds=2)
async def test_write_is_torn_in_a_thread(faults, fault_log, tmp_path):
    """S3: the fault is reported before the process is killed."""
    path = tmp_path / "log"
    path.write_text("")
    with pytest.RaisesGroup(ProcDied):
        async with this_host().spawn_procs({"gpus": 1}, setup=faults.armed()) as procs:
            log = await procs.spawn("log", Log, str(path))
            faults.disk(procs).tears(nth=1)
            await log.append_in_thread.call_one("torn!")
    assert path.read_text() == "tor"
    assert len(fault_log) == 1


@simulate(seeds=3)
async def test_slow_disk_takes_its_time(mesh, faults, tmp_path):
    log = await mesh.slice(gpus=0).spawn("log", Log, str(tmp_path / "log"))
    start = trio.current_time()

    faults.disk({"gpus": 0}).slow(2.0)
    await log.append.call_one("late")
    await log.sync.call_one()

    assert trio.current_time() - start >= 4


@BOTH
@simulate(seeds=3)
async def test_disk_of_another_member_is_its_own(mesh, faults, tmp_path):
    logs = [await mesh.slice(gpus=n).spawn(f"log{n}", Log, str(tmp_path / f"log{n}")) for n in range(2)]

    faults.disk({"gpus": 1}).full()
    await logs[0].append.call_one("fits")
    with pytest.raises(OSError, match="No space left"):
        await logs[1].append.call_one("does not")


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda disk: disk.slow(0), "seconds must be above 0"),
        (lambda disk: disk.fails("delete"), "the operation must be one of open, read, write, sync, rename"),
        (lambda disk: disk.fails("write", "ENOENT"), "the error must be one of"),
        (lambda disk: disk.tears(nth=0), "nth must be a whole number from 1"),
    ],
)
@simulate(seeds=1)
async def test_wrong_disk_faults_are_refused(mesh, faults, act, text):
    with pytest.raises(ValueError, match=text):
        act(faults.disk(mesh))
