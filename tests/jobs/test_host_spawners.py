"""Modules that are imported once on a host, by a spawner of their own; processes of all spawners know each other."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Actor, MeshErrorGroup, ProcDied, SpawnError, endpoint, leaves

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that knows which process has imported it."""
    (tmp_path / "imported_once.py").write_text("import os\nPID = os.getpid()\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "imported_once"


class Worker(Actor):
    """What the tests call."""

    @endpoint
    async def places(self) -> tuple[int, int, int]:
        """Return the pids of this process, of its parent, and of who has imported the module."""
        return os.getpid(), os.getppid(), getattr(sys.modules.get("imported_once"), "PID", 0)

    @endpoint
    async def ask(self, others: Worker) -> int:
        return (await others.places.call_one())[0]

    @endpoint
    async def find_dead(self, others: Worker) -> int:
        """Return by which signal the other one was ended."""
        try:
            await others.wait.call_one()
        except ProcDied as died:
            return died.signal or 0
        return 0

    @endpoint
    async def wait(self) -> None:
        await trio.sleep_forever()

    @endpoint
    async def say(self) -> None:
        print("said by", "the one" if "imported_once" in sys.modules else "the other")


async def test_module_is_imported_once_on_each_host(module: str) -> None:
    """H1: by the spawner, which forks all processes there that preload it; those of other meshes have another one."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({"gpus": 2}, preload=(module,)) as procs,
            hosts.spawn_procs({"cpus": 1}) as plain,
            procs.spawn("workers", Worker) as workers,
            plain.spawn("others", Worker) as others,
        ):
            places = list(await workers.places.call())
            assert [parent == imported for _, parent, imported in places] == [True] * 4
            assert len({imported for *_, imported in places}) == 2
            assert [imported for *_, imported in await others.places.call()] == [0, 0]


async def test_processes_of_two_spawners_of_a_host_reach_each_other(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """H1: links, ends and output are those of one spawner; nothing of it goes through the program."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            jobs.LocalJob(1) as hosts,
            hosts.spawn_procs({"cpus": 1}) as plain,
            plain.spawn("others", Worker) as others,
            hosts.spawn_procs({"gpus": 1}, preload=(module,)) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            one, other = workers.slice(hosts=0, gpus=0), others.slice(hosts=0, cpus=0)
            pid = (await one.places.call_one())[0]
            assert await other.ask.call_one(one) == pid
            await workers.say.call()
            await others.say.call()
            os.kill(pid, signal.SIGKILL)
            await other.find_dead.call_one(one)
    assert all(isinstance(leaf, ProcDied) and leaf.signal == signal.SIGKILL for leaf in leaves(caught.value))
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line.partition(" | ")[2] for line in lines] == ["said by the other", "said by the one"]


async def test_module_that_cannot_be_imported_fails_its_mesh_and_no_other() -> None:
    """H1: the host goes on, and the text says why."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts, hosts.spawn_procs({"cpus": 1}) as plain:
            for _ in range(2):
                with pytest.raises((SpawnError, MeshErrorGroup)) as caught:
                    async with hosts.spawn_procs({"gpus": 1}, preload=("there_is_no_such_module",)):
                        pytest.fail("the processes were started")
                errors = list(leaves(caught.value)) if isinstance(caught.value, MeshErrorGroup) else [caught.value]
                assert any("there_is_no_such_module" in str(one) for one in errors)
            async with plain.spawn("others", Worker) as others:
                assert len(list(await others.places.call())) == 1
