"""Network namespaces of tests: who is in them, and when."""

from __future__ import annotations

import os

import pytest
import trio

from trimesh.testing.real.host_network import NetNamespace, why_no_networks

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(why_no_networks() is not None, reason=why_no_networks() or "there are networks"),
]


def here() -> str:
    """Return which namespace this thread is in."""
    return os.readlink("/proc/thread-self/ns/net")


async def of_threads(count: int) -> set[str]:
    """Return which namespaces some threads of Trio are in, and processes that they start."""
    found, met = set[str](), trio.Event()
    limiter, waiting = trio.CapacityLimiter(count), 0

    async def look() -> None:
        nonlocal waiting
        found.add(await trio.to_thread.run_sync(here, limiter=limiter))
        waiting += 1
        if waiting == count:
            met.set()

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(look)
    await met.wait()
    done = await trio.run_process(["readlink", "/proc/self/ns/net"], capture_stdout=True)
    return {*found, done.stdout.decode().strip()}


async def test_threads_of_trio_go_there_and_back() -> None:
    """Also those that wait for work: what they start next is where the test is, and after it outside."""
    outside = here()
    namespace = NetNamespace()
    assert await of_threads(4) == {outside}
    with namespace.entered():
        inside = here()
        assert inside != outside
        assert await of_threads(6) == {inside}
    assert await of_threads(6) == {outside}
    namespace.close()
