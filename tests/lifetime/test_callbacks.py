"""Callbacks of ctypes in forked workers: libffi maps their code from a file that its process had open."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import pytest

from trimesh import Actor, endpoint, this_host

pytestmark = pytest.mark.real


class Calling(Actor):
    @endpoint
    def call(self, count: int) -> int:
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
        with contextlib.ExitStack() as files:
            for _ in range(20):  # they get the numbers of descriptors that were closed
                files.enter_context(Path("/dev/null").open())
            return sum(callback(1) for callback in [kind(int) for _ in range(count)])


@pytest.mark.executed("the spawner loads ctypes")
async def test_forked_workers_can_make_many_callbacks() -> None:
    async with this_host().spawn_procs({"n": 1}, preload=("ctypes",)) as procs:
        calling = await procs.spawn("calling", Calling)
        assert await calling.call.call_one(20_000) == 20_000
