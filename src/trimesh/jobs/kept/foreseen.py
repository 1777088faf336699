"""When the hosts of a kept job end, as far as that is known before: by its lease, and by a limit of time of the job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from trimesh import limits
from trimesh.jobs.launcher import Launcher


class ForeseenEnd:
    """The ends that are known, for the program that is attached.

    Args:
        seconds_left: Returns those of the lease.
        wait_job_notice: Waits for the notice that the job gives to its own program.
    """

    def __init__(
        self,
        name: str,
        seconds_left: Callable[[], float],
        launcher: Launcher,
        wait_job_notice: Callable[[], Awaitable[str]],
    ) -> None:
        self._name = name
        self._seconds_left = seconds_left
        self._launcher = launcher
        self._wait_job_notice = wait_job_notice

    async def wait_notice(self) -> str:
        """Wait until the first end is so near that a program is to save what it has; return why."""
        return await _first(partial(self._wait_lease, limits.KEPT_NOTICE_SECONDS), self._wait_job_notice)

    async def wait_end(self, grace: float) -> str:
        """Wait until a program whose blocks take `grace` seconds has to leave; return why."""
        seconds = grace + limits.KEPT_LEAVE_SECONDS
        return await _first(partial(self._wait_lease, seconds), partial(self._launcher.wait_end, seconds))

    async def _wait_lease(self, seconds: float) -> str:
        """Wait until so many seconds are left, or half of what is left now; the lease may be extended meanwhile."""
        ahead = min(seconds, self._seconds_left() / 2)
        while (left := self._seconds_left()) > ahead:  # noqa: ASYNC110 - a clock that counts sleep has no event
            await trio.sleep(min(left - ahead, limits.KEPT_LOOK_SECONDS))
        return f"the lease of the kept job {self._name} ends in {max(left, 0):.0f} s"


async def _first(*waits: Callable[[], Awaitable[str]]) -> str:
    found = list[str]()
    async with trio.open_nursery() as nursery:

        async def run(wait: Callable[[], Awaitable[str]]) -> None:
            found.append(await wait())
            nursery.cancel_scope.cancel(reason="another end is nearer")

        for wait in waits:
            nursery.start_soon(run, wait)
    return found[0]
