"""Devices, as a process finds them; the threads that open their memory."""

from __future__ import annotations

import sys
import threading

import pytest
import trio
import trio.testing

from trimesh import limits
from trimesh.rdma.memory.device import find_device, in_thread

NOWHERE = "cuda:00000000-0000-0000-0000-000000000000"


def test_process_without_torch_says_so(monkeypatch: pytest.MonkeyPatch):
    """A reader that has no use for torch is not made to import it."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert find_device(NOWHERE) == (None, "torch is not imported in this process")
    assert "torch" not in sys.modules


@pytest.mark.torch
def test_process_without_the_device_says_what_it_has():
    torch = pytest.importorskip("torch", reason="torch is an extra")
    index, why_not = find_device(NOWHERE)
    assert index is None
    assert ("CUDA_VISIBLE_DEVICES" if torch.cuda.is_available() else "torch sees no CUDA device") in why_not


async def test_threads_are_bounded_and_a_cancel_waits_for_them():
    go = threading.Event()
    started = list[int]()
    ended = list[int]()

    def work(number: int) -> int:
        started.append(number)
        assert go.wait(60)
        ended.append(number)
        return number

    found = list[int]()

    async def call(number: int) -> None:
        found.append(await in_thread(work, number))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for number in range(limits.CUDA_THREADS + 2):
                nursery.start_soon(call, number)
            while len(started) < limits.CUDA_THREADS:
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            assert len(started) == limits.CUDA_THREADS
            nursery.cancel_scope.cancel()
            go.set()
    assert sorted(ended) == sorted(started) == sorted(found)
    assert len(found) == limits.CUDA_THREADS
