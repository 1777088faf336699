"""One host of a job, as what is above it sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trimesh._runtime.life.job_hosts import HostCode
from trimesh._runtime.peers.host import HostChild, LaunchRequest
from trimesh._runtime.peers.losses import HostLoss
from trimesh._runtime.system.exits import ExitReport
from trimesh._transport.interface import Link
from trimesh.ids import ProcId

OnExit = Callable[[ExitReport], None]


class JobHost(Protocol):
    """One host of a job, real or simulated; see `RemoteHost` and `Host`."""

    name: str
    loss: HostLoss | None
    is_loss_taken: bool
    on_lost: Callable[[HostLoss], None]
    code: HostCode | None

    async def launch(self, request: LaunchRequest, on_exit: OnExit) -> HostChild: ...

    async def connect(self, target: ProcId) -> Link: ...

    async def exit_of(self, target: ProcId) -> ExitReport: ...

    async def flush_output(self) -> None:
        """Wait until what was written there is shown."""
