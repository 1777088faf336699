"""Agents in pods, and the address at which pods reach the program."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import trio

from trimesh import limits
from trimesh.errors import SpawnError
from trimesh.jobs.addresses import address_of, address_towards, is_loopback
from trimesh.jobs.kubernetes import cluster as words
from trimesh.jobs.kubernetes.cluster import CONFLICT, NOT_FOUND, ApiError, Cluster, HostPod
from trimesh.jobs.launcher import AgentExit

_log: Final = logging.getLogger("trimesh")


async def interface_towards(cluster: Cluster, interface: str | None, advertised: Sequence[str]) -> str:
    """Return the address at which this program listens for pods.

    Raises:
        SpawnError: It is a loopback address, which pods cannot reach.
    """
    if interface is not None:
        return await address_of(interface)
    found = await address_towards(*cluster.server)
    if is_loopback(found) and not advertised:
        raise SpawnError(
            f"pods must be able to reach this program, and its address towards the API server is {found}: pass "
            "interface=, the address of this machine at which pods reach it, or advertise=; a job with pods of its own "
            'takes via="port-forward" instead'
        )
    return found


class PodAgent:
    """An agent in a pod; see `StartedAgent`."""

    def __init__(self, seen: HostPod, cluster: Cluster, container: str) -> None:
        self.seen = seen
        self._cluster = cluster
        self._container = container

    async def wait(self) -> AgentExit:
        await self.seen.ended.wait()
        end = self.seen.end
        assert end is not None
        log = ""
        with trio.move_on_after(limits.AGENT_EXIT_SECONDS / 2):
            log = await self._cluster.log(self.seen.name, self._container)
        return AgentExit(end.text, log, end.reason)

    @trio.lowlevel.enable_ki_protection
    async def stop(self) -> None:
        """See `StartedAgent.stop`: deletes the pod if it still runs."""
        status: Mapping[str, Any] = self.seen.pod.get("status") or {}
        phase = status.get("phase")
        if phase in ("Succeeded", "Failed") or self.seen.gone.is_set():
            return
        with trio.CancelScope(shield=True), trio.move_on_after(limits.KUBERNETES_END_SECONDS):
            try:
                await self._cluster.delete("Pod", self.seen.name, self.seen.uid, grace=1)
            except ApiError as error:
                if error.status not in (NOT_FOUND, CONFLICT):
                    _log.warning("the pod %s could not be deleted: %s", self.seen.name, error)
                return
            while not await self._is_gone():  # noqa: ASYNC110 - state of another machine, which sets no event here
                await trio.sleep(limits.KUBERNETES_LOOK_SECONDS)

    async def _is_gone(self) -> bool:
        """Query whether the pod is deleted: the watch, which would report it, may have ended."""
        try:
            found = await self._cluster.read("Pod", self.seen.name)
        except ApiError as error:
            return error.status == NOT_FOUND
        return words.uid_of(found) != self.seen.uid
