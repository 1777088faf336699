"""The behaviours of buffers over each carrier of real processes, and between processes that count as two hosts (N4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
from tests.conformance import test_buffer_batches as batches
from tests.conformance import test_buffer_ends as ends
from tests.conformance import test_buffers as buffers
from tests.conformance.meshes import RealBackend, check_tables, drop_ports
from tests.conformance.vault import LARGE, SMALL, Reader, Vault

from trimesh import Point, ProcMesh, this_host
from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.current import current_proc

pytestmark = pytest.mark.real

Test = Callable[[RealBackend], Awaitable[None]]


class ManyHosts(RealBackend):
    """Every process counts as a host of its own, so that nothing but the network joins them."""

    def procs(self, per_host: Mapping[str, int] | None = None, **options: Any) -> AbstractAsyncContextManager[ProcMesh]:
        return super().procs(per_host, env=host_of, **options)


def host_of(point: Point) -> dict[str, str]:
    return {"TRIMESH_HOST_ID": repr(point)}


async def run_tests(backend: RealBackend, tests: Sequence[Test]) -> None:
    """Run tests one after the other. They share a spawner, whose start takes longer than most of them."""
    async with backend.open():
        async with lease_proc():
            async with this_host().warm():
                for test in [tcp_is_what_carries, *tests]:
                    with told(name_of(test)):
                        await test(backend)
            await drop_ports()
            check_tables(current_proc())
        await backend.check_clean()


async def tcp_is_what_carries(backend: RealBackend) -> None:
    """What all of them are about."""
    async with backend.procs() as procs:
        vault = await procs.slice(gpus=0).spawn("vault", Vault)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await vault.handle.call_one()
        assert (handle.backend, await reader.backend.call_one(handle)) == ("tcp", "tcp")


@contextmanager
def told(name: str) -> Iterator[None]:
    """Add to an error in which test it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {name}")
        raise


def name_of(test: Test) -> str:
    """Return what the test is called, with its size."""
    if isinstance(test, partial):
        return f"{test.func.__name__}-{test.keywords['size']}"
    return str(getattr(test, "__name__", test))


WITH_PIDS: list[Test] = [
    buffers.test_forged_handles_are_refused,
    buffers.test_atomic_additions_add_up,
    partial(ends.test_revoked_buffer_gives_no_bytes, size=LARGE),
    partial(ends.test_killed_owner_is_a_death, size=LARGE),
    ends.test_cancelled_read_ends_at_once,
    batches.test_batch_tells_all_errors,
]
"""Those for which it matters that the pid of the owner can be watched."""


@pytest.mark.daily
async def test_over_tcp(monkeypatch: pytest.MonkeyPatch):
    """N4, API 7: processes of one host that can do nothing else."""
    monkeypatch.setenv("TRIMESH_RDMA", "tcp")
    await run_tests(RealBackend(), WITH_PIDS)


async def run_between_hosts(monkeypatch: pytest.MonkeyPatch, tests: Sequence[Test]) -> None:
    """Nobody sees the other's pid; its death is told by the mesh."""
    monkeypatch.setenv("TRIMESH_RDMA", "shm,cma,tcp")
    await run_tests(ManyHosts(), tests)


async def test_bytes_between_hosts(monkeypatch: pytest.MonkeyPatch):
    """API 7: what moves, and what is refused."""
    await run_between_hosts(
        monkeypatch,
        [
            *(partial(buffers.test_buffer_is_read_and_written, size=size) for size in (SMALL, LARGE)),
            buffers.test_owner_uses_its_own_buffer,
            buffers.test_parts_count_bytes,
            buffers.test_readonly_handle_refuses_writes,
            buffers.test_forged_handles_are_refused,
            buffers.test_atomic_additions_add_up,
            buffers.test_atomic_numbers_wrap,
            buffers.test_transfers_are_checkpoints,
        ],
    )


async def test_ends_between_hosts(monkeypatch: pytest.MonkeyPatch):
    """N4: revocations, deaths, cancels."""
    await run_between_hosts(
        monkeypatch,
        [
            *(partial(ends.test_revoked_buffer_gives_no_bytes, size=size) for size in (SMALL, LARGE)),
            *(partial(ends.test_killed_owner_is_a_death, size=size) for size in (SMALL, LARGE)),
            ends.test_buffer_ends_with_its_actor,
            ends.test_cancelled_read_ends_at_once,
            ends.test_killed_owner_fails_the_block,
            ends.test_handle_of_an_old_incarnation_finds_its_death,
            ends.test_stopped_owner_is_no_death,
        ],
    )


async def test_batches_between_hosts(monkeypatch: pytest.MonkeyPatch):
    """API 7: many transfers at once."""
    await run_between_hosts(
        monkeypatch,
        [
            *(partial(batches.test_batch_runs_when_the_block_is_left, size=size) for size in (SMALL, LARGE)),
            batches.test_batch_of_many_parts,
            batches.test_batch_tells_all_errors,
        ],
    )
