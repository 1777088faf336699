"""Faults of members are the same on each back end: one body in simulation, over processes and over hosts (S3)."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import trio

import trimesh
from trimesh import Actor, LinkLost, ProcDied, endpoint
from trimesh.testing import simulate

MEMBERS = {"member": 2}


class Member(Actor):
    @endpoint
    async def meet(self, members: Any) -> None:
        self.members = members

    @endpoint(concurrency=8)
    async def ping(self) -> int:
        return os.getpid()

    @endpoint
    async def reaches(self, other: dict[str, int]) -> bool:
        with trio.move_on_after(0.5) as scope:
            await self.members.slice(**other).ping.options(abandon_after=0.05).call_one()
        return not scope.cancelled_caught

    @endpoint
    async def look_up(self) -> str:
        return socket.gethostbyname("localhost")

    @endpoint
    async def note(self, path: str) -> None:
        Path(path).write_text("noted")  # noqa: ASYNC240 - its disk is what is tested


async def check_faults(mesh: Any, faults: Any, fault_log: Any, tmp_path: Path) -> None:
    one, two = [dict(point) for point in mesh.points()]
    members = await mesh.spawn("members", Member)
    await members.meet.call(members)
    first, second = members.slice(**one), members.slice(**two)
    assert await first.reaches.call_one(two)

    for direction in ("both", "a_to_b", "b_to_a"):
        async with faults.partition(one, two, direction):
            assert not await first.reaches.call_one(two)
        assert await first.reaches.call_one(two)
    faults.link("controller", two).duplicate()
    faults.link(one, two).reorder(0.02)
    faults.at(second.ping).delays(0.01)
    faults.processor(two).slow(0.01)
    faults.loop(two).lag(0.01)
    faults.kill(two, "hold_gil(0.01)")
    faults.clock(two).jump(5)
    go_on = faults.kill(two, "sigstop")
    go_on()
    for _ in range(4):
        assert await first.reaches.call_one(two)
        await second.ping.call_one()
    faults.heal()

    heal = faults.names(two).fails()
    with pytest.raises(socket.gaierror):
        await second.look_up.call_one()
    heal()
    assert await second.look_up.call_one() == "127.0.0.1"
    heal = faults.disk(two).full()
    with pytest.raises(OSError, match="No space left"):
        await second.note.call_one(str(tmp_path / "note"))
    heal()
    await second.note.call_one(str(tmp_path / "note"))
    faults.call(second.ping).lose("reply")
    with pytest.raises((ProcDied, LinkLost)):
        await second.ping.call_one()

    faults.kill(one)
    with trio.fail_after(30):
        while list(members.alive().points()):  # noqa: ASYNC110 - nothing else happens meanwhile
            await trio.sleep(0.01)
    kinds = {str(fired.fault).partition(" ")[0] for fired in fault_log}
    assert kinds == {"at", "call", "clock", "disk", "kill", "link", "loop", "names", "partition", "processor"}


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=3, per_host=MEMBERS, supervision=trimesh.Isolate())
async def test_faults_of_processes(mesh, faults, fault_log, tmp_path):
    """S3."""
    await check_faults(mesh, faults, fault_log, tmp_path)


@pytest.mark.mesh_backend("sim", "net")
@simulate(seeds=3, hosts=2, per_host={"member": 1}, supervision=trimesh.Isolate())
async def test_faults_of_hosts(mesh, faults, fault_log, tmp_path):
    """S3."""
    await check_faults(mesh, faults, fault_log, tmp_path)
