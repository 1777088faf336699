"""Finalizers of what only reference cycles keep run when a worker ends (O3)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import trio

from trimesh import Actor, endpoint, limits, this_host

pytestmark = pytest.mark.real


class Cyclic(Actor):
    """Is in a cycle, writes a file when it is finalized, and may never come back from that."""

    def __init__(self, folder: Path, *, hangs: bool = False) -> None:
        self.folder = folder
        self.hangs = hangs
        self.itself = self

    def __del__(self) -> None:
        (self.folder / "deleted").touch()
        while self.hangs:
            time.sleep(1)

    @endpoint
    async def ping(self) -> None:
        """Live."""


def run(folder: Path, *, hangs: bool = False) -> None:
    async def main() -> None:
        async with this_host().spawn_procs({"n": 1}) as procs:
            cyclic = await procs.spawn("cyclic", Cyclic, folder, hangs=hangs)
            await cyclic.ping.call_one()

    trio.run(main)


@pytest.mark.daily
def test_actor_in_a_cycle_is_finalized(tmp_path: Path) -> None:
    """O3: as at the end of the interpreter."""
    run(tmp_path)
    assert (tmp_path / "deleted").exists()


def test_finalizer_that_does_not_return_is_cut_off(tmp_path: Path) -> None:
    """O3: within a bound, and the process ends as it would have."""
    began = time.monotonic()
    run(tmp_path, hangs=True)
    assert (tmp_path / "deleted").exists()
    assert time.monotonic() - began > limits.FINALIZE_SECONDS
