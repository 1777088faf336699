"""An agent whose session has reached a limit."""

from __future__ import annotations

import socket

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh._runtime.hosts.agent import open_agent
from trimesh._runtime.hosts.remote_host import SessionPipe, far_caller
from trimesh._runtime.spawner import wire
from trimesh._runtime.system.records import WorkerConfig
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId

pytestmark = pytest.mark.real


class FullSession:
    """A session with as many channels as it may have."""

    def open_channel(self, sock: socket.socket, purpose: bytes) -> int:
        del sock, purpose
        raise LimitExceeded("HOST_CHANNELS_MAX", 1, "a session must have at most so many open channels")


async def test_process_without_a_channel_is_a_failed_launch() -> None:
    """E11: its launch says why, and it is ended."""
    pipe, theirs = SessionPipe.pair()
    pipe.session = FullSession()  # type: ignore[assignment]
    controller = SessionPipe(theirs)
    config = WorkerConfig(proc_id=3, parent_id=1, root_id=1, mesh="m", is_far=True)
    with trio.fail_after(HANG_SECONDS):
        async with open_agent(pipe, controller=ProcId(1), own=ProcId(2)) as agent, trio.open_nursery() as nursery:
            nursery.start_soon(agent.serve)
            controller.put(wire.Launch(request=7, config=config, context=far_caller({})))
            assert controller.flush()
            seen = list[wire.AnyRecord]()
            while not {wire.LaunchFailed, wire.Exited} <= {type(record) for record in seen}:
                received = controller.receive()
                if received is None:
                    await controller.wait_readable()
                else:
                    seen.append(received.record)
            [failed] = [record for record in seen if isinstance(record, wire.LaunchFailed)]
            assert (failed.request, failed.text) == (7, "a session must have at most so many open channels")
            controller.put(wire.Stop())
            assert controller.flush()
        pipe.close()
        controller.close()
