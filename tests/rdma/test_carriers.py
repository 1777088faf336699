"""The behaviours of buffers over each carrier of real processes, and between processes that count as two hosts (N4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
from tests.conformance import test_buffer_batches as batches
from tests.conformance import test_buffer_ends as ends
from tests.conformance import test_buffers as buffers
from tests.conformance.meshes import RealBackend
from tests.conformance.vault import LARGE, SMALL

from trimesh import Point, ProcMesh

pytestmark = pytest.mark.real

Test = Callable[[RealBackend], Awaitable[None]]


class ManyHosts(RealBackend):
    """Every process counts as a host of its own, so that nothing but the network joins them."""

    def procs(self, per_host: Mapping[str, int] | None = None, **options: Any) -> AbstractAsyncContextManager[ProcMesh]:
        return super().procs(per_host, env=host_of, **options)


def host_of(point: Point) -> dict[str, str]:
    return {"TRIMESH_HOST_ID": repr(point)}


TESTS: list[Test] = [
    *(partial(buffers.test_buffer_is_read_and_written, size=size) for size in (SMALL, LARGE)),
    buffers.test_owner_uses_its_own_buffer,
    buffers.test_parts_count_bytes,
    buffers.test_readonly_handle_refuses_writes,
    buffers.test_forged_handles_are_refused,
    buffers.test_atomic_additions_add_up,
    buffers.test_atomic_numbers_wrap,
    buffers.test_transfers_are_checkpoints,
    *(partial(ends.test_revoked_buffer_gives_no_bytes, size=size) for size in (SMALL, LARGE)),
    *(partial(ends.test_killed_owner_is_a_death, size=size) for size in (SMALL, LARGE)),
    ends.test_buffer_ends_with_its_actor,
    ends.test_cancelled_read_ends_at_once,
    ends.test_killed_owner_fails_the_block,
    ends.test_handle_of_an_old_incarnation_finds_its_death,
    ends.test_stopped_owner_is_no_death,
    *(partial(batches.test_batch_runs_when_the_block_is_left, size=size) for size in (SMALL, LARGE)),
    batches.test_batch_of_many_parts,
    batches.test_batch_tells_all_errors,
]


def name_of(test: Test) -> str:
    """Return what the test is called, with its size."""
    if isinstance(test, partial):
        return f"{test.func.__name__}-{test.keywords['size']}"
    return str(getattr(test, "__name__", test))


async def run_test(test: Test, backend: RealBackend) -> None:
    async with backend.open():
        await test(backend)
        await backend.check_clean()


ON_ONE_HOST: list[Test] = [
    buffers.test_forged_handles_are_refused,
    buffers.test_atomic_additions_add_up,
    partial(ends.test_revoked_buffer_gives_no_bytes, size=LARGE),
    partial(ends.test_killed_owner_is_a_death, size=LARGE),
    ends.test_cancelled_read_ends_at_once,
    batches.test_batch_tells_all_errors,
]
"""Of those, the ones for which it matters that the pid of the owner can be watched."""


@pytest.mark.parametrize("test", ON_ONE_HOST, ids=name_of)
async def test_over_tcp(test: Test, monkeypatch: pytest.MonkeyPatch):
    """N4, API 7: processes of one host that can do nothing else."""
    monkeypatch.setenv("TRIMESH_RDMA", "tcp")
    await run_test(test, RealBackend())


@pytest.mark.parametrize("test", TESTS, ids=name_of)
async def test_between_hosts(test: Test, monkeypatch: pytest.MonkeyPatch):
    """N4, API 7: nobody sees the other's pid; its death is told by the mesh."""
    monkeypatch.setenv("TRIMESH_RDMA", "shm,cma,tcp")
    await run_test(test, ManyHosts())
