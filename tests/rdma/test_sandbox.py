"""Buffers where a sandbox lets no process look at the memory of another: what is left carries them, or says why."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.vault import LARGE, SMALL, Reader, Vault, pattern
from tests.native.sandbox import refuse, why_not

from trimesh import LinkLost, ProcMesh, current_rank, this_host

pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can")]

ROOT = Path(__file__).parents[2]
REPORT = """
import runpy
from tests.native.sandbox import refuse
refuse("process_vm_readv", "process_vm_writev")
runpy.run_module("trimesh.rdma", run_name="__main__")
"""


def refuse_to_second() -> None:
    """The `setup` of processes of which the second one is in a sandbox."""
    if current_rank() == 1:
        refuse("process_vm_readv", "process_vm_writev")


async def handle_and_reader(procs: ProcMesh, size: int, **options: Any) -> tuple[Any, Any]:
    """Return a buffer of the first process, and an actor of the second that reads."""
    vault = await procs.slice(procs=0).spawn("vault", Vault, size, **options)
    reader = await procs.slice(procs=1).spawn("reader", Reader)
    return await vault.handle.call_one(), reader


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_reader_that_is_refused_takes_tcp(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setenv("TRIMESH_RDMA", "shm,cma,tcp")
    async with this_host().spawn_procs({"procs": 2}, setup=refuse_to_second) as procs:
        handle, reader = await handle_and_reader(procs, size)
        assert await reader.read.call_one(handle) == pattern(size)
        assert await reader.backend.call_one(handle) == "tcp"
        assert handle.backend == "cma"  # this process is not in the sandbox


async def test_reader_that_is_refused_maps_what_was_allocated() -> None:
    async with this_host().spawn_procs({"procs": 2}, setup=refuse_to_second) as procs:
        handle, reader = await handle_and_reader(procs, SMALL, allocated=True)
        assert await reader.read.call_one(handle) == pattern(SMALL)
        assert await reader.backend.call_one(handle) == "shm"


async def test_reader_that_is_refused_says_so_if_nothing_else_is_left() -> None:
    """The owner found that it may look at memory, and does not listen."""
    async with this_host().spawn_procs({"procs": 2}, setup=refuse_to_second) as procs:
        handle, reader = await handle_and_reader(procs, SMALL)
        with pytest.raises(LinkLost, match=r"cma: this process may not read .* sandbox"):
            await reader.read.call_one(handle)


def test_report_says_what_the_sandbox_refuses_and_what_works_instead() -> None:
    """All processes of it are in the sandbox, as in a container: they listen without being told."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = dict(re.findall(r"^  (\w+) +((?:yes|no) +\S.*)$", done.stdout, re.MULTILINE))
    assert lines["shm"].startswith("yes")
    assert lines["cma"].startswith("no")
    assert "may not read the other one's memory" in lines["cma"]
    assert "errno 1" in lines["cma"]
    assert lines["tcp"].startswith("yes")
