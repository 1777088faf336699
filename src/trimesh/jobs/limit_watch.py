"""What a job does before an end of its hosts that is known: it says so, and then leaves their block while they live.

    wait_notice --> `HostMesh.wait_notice` returns
    wait_end    --> the block fails, and is cancelled

Each once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from trimesh._runtime.life import HostsNotice
from trimesh.errors import HostLost
from trimesh.jobs.launcher import Launcher

_log: Final = logging.getLogger("trimesh")
_REASON: Final = "time limit"
"""See `HostLost.reason`."""


class LimitWatch:
    """The watch over one run of a job; `notice` tells the program."""

    def __init__(self, launcher: Launcher) -> None:
        self.notice = HostsNotice()
        self._launcher = launcher

    async def run(self, fail: Callable[[Exception], None]) -> None:
        """Tell the program, then end its block in order, by `fail`; until it is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell)
            text = await self._launcher.wait_end()
            self.notice.tell(text)
            fail(HostLost(f"the block of the hosts is left while they live: {text}", reason=_REASON))
            nursery.cancel_scope.cancel(reason="it is too late for a notice")

    async def _tell(self) -> None:
        text = await self._launcher.wait_notice()
        _log.warning("%s", text)
        self.notice.tell(text)
