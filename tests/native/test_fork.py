"""A forked child of a process with links (DataLoader, multiprocessing) has none of them and disturbs none (O4)."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable

import pytest
import trio
from tests.conformance.transports import NativeBackend, World

from trimesh._transport.native.transport import NativeTransport
from trimesh.ids import ProcId

pytestmark = pytest.mark.real


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; return its exit status: 0 when nothing was raised."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing may leave a forked child
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("local", [True, False])
async def test_forked_child_has_dead_handles_and_the_parent_goes_on(local: bool):
    backend = NativeBackend(local=local)
    async with trio.open_nursery() as nursery:
        world = World(backend, nursery)
        here, there, here_sees, there_sees = world.pair()
        here.send(b"before")
        await there_sees.wait_messages(1)
        transport = here.transport

        def work() -> None:
            for action in (
                lambda: here.send(b"from the child"),
                transport.flush,
                lambda: transport.define_group([here]).cast(b"from the child"),
                lambda: transport.add_lifeline(0),
                here.statistics,
                here.close,
            ):
                with pytest.raises(trio.ClosedResourceError, match="forked"):
                    action()
            here.abort()

        assert in_child(work) == 0

        here.send(b"after")
        there.send(b"back")
        await there_sees.wait_messages(2)
        await here_sees.wait_messages(1)
        assert there_sees.heads() == [b"before", b"after"]
        assert here_sees.downs == there_sees.downs == []
        nursery.cancel_scope.cancel()
    backend.close()


def descriptors() -> set[tuple[str, str]]:
    """Return the numbers of those of this process, and what each is."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that by which they are listed
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def test_forked_child_inherits_no_descriptor_of_a_bus():
    """Else a peer's end of a link would never be seen."""
    before = descriptors()
    transport = NativeTransport(ProcId(1))
    sockets = NativeBackend().sockets()
    transport.open_link(sockets[0], local=True, lease=False)
    made = descriptors() - before

    def work() -> None:
        # libuv, where a test before has run it, makes a pipe anew in a forked child: it takes numbers that are free.
        left = {number for number, _ in descriptors() & made}
        assert left <= {str(sockets[1].fileno())}, (left, descriptors() - before)

    try:
        assert in_child(work) == 0
    finally:
        sockets[1].close()
        transport.close()


def test_forked_child_maps_no_shared_memory_of_a_bus():
    transport = NativeTransport(ProcId(1))
    sockets = NativeBackend().sockets()
    transport.open_link(sockets[0], local=True, lease=False)

    def work() -> None:
        with open("/proc/self/maps") as maps:
            assert "memfd:trimesh" not in maps.read()
        transport.close()
        transport.close()

    with open("/proc/self/maps") as maps:
        assert "memfd:trimesh-ring" in maps.read()
    assert in_child(work) == 0
    sockets[1].close()
    transport.close()


def test_forked_child_may_have_a_bus_of_its_own():
    transport = NativeTransport(ProcId(1))

    def work() -> None:
        backend = NativeBackend(local=True)

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                here, _, _, there_sees = World(backend, nursery).pair()
                here.send(b"hello")
                await there_sees.wait_messages(1)
                nursery.cancel_scope.cancel()

        trio.run(main)
        backend.close()

    assert in_child(work) == 0
    transport.close()


def test_fork_while_links_open_and_close_leaves_no_lock_behind():
    """The reactor is busy in every one of these forks."""
    transport = NativeTransport(ProcId(1), beat_seconds=0.001, lease_seconds=1.0)
    backend = NativeBackend()
    for _ in range(50):
        sockets = backend.sockets()
        link = transport.open_link(sockets[0], local=True, lease=True)
        assert in_child(lambda: None) == 0
        link.abort()
        sockets[1].close()
    transport.close()
