"""A process of a mesh, as its owner sees it."""

from __future__ import annotations

import trio
from tests.runtime.frames import RecordingTransport

from trimesh._runtime.life.proc import Proc
from trimesh._runtime.meshes.member import Member
from trimesh.ids import ProcId
from trimesh.shape.extent import Extent


async def test_kill_of_a_member_that_is_not_there_yet_returns():
    """P1: the one before it has ended; its follower, which is being started, is not waited for."""
    proc = Proc(ProcId(1), RecordingTransport(), seed=1)
    member = Member(proc, proc.peer(ProcId(2)), 0, "procs", Extent().point(0), 1, lambda *_: None)
    with trio.fail_after(1):
        await member.end_by_kill()
    assert not member.gone.is_set()
