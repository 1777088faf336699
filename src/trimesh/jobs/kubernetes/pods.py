"""The pods of one run, as the API server tells of them.

PW-1 The first pod of a place is its host. Another one of the same place is none, and is deleted with the rest.
PW-2 A watch that breaks is begun again, by a new list: what has happened meanwhile is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from trimesh import limits
from trimesh.jobs.kubernetes.cluster import ApiError, Cluster
from trimesh.jobs.words import kubernetes as words


class PodSeen:
    """A pod that is a host.

    Attributes:
        pod: What the API server has said last.
        end: How it has ended; None while it lives.
        ended: Set then.
        gone: Set when it is not there any more.
    """

    def __init__(self, pod: words.Pod) -> None:
        self.name = words.name_of(pod)
        self.uid = words.uid_of(pod)
        self.pod = pod
        self.end: words.PodEnd | None = None
        self.ended = trio.Event()
        self.gone = trio.Event()

    def update(self, pod: words.Pod, container: str) -> None:
        """Learn what it is now."""
        self.pod = pod
        end = words.end_of(pod, container)
        if end is not None and self.end is None:
            self.end = end
            self.ended.set()

    def deleted(self) -> None:
        """Learn that it is not there any more."""
        if self.end is None:
            self.end = words.PodEnd("the pod was deleted", "cancelled")
        self.ended.set()
        self.gone.set()


class PodWatch:
    """Follows the pods of one run.

    Args:
        cluster: Where they are.
        selector: By labels, of these pods only.
        container: Of the agent.

    Attributes:
        hosts: By their places among the pods of the run.
        present: Names of all pods that are there.
        failure: Why nothing was heard of the API server for long, or never will be; None while that is not so.
    """

    def __init__(self, cluster: Cluster, selector: str, container: str) -> None:
        self.hosts: dict[int, PodSeen] = {}
        self.present: dict[str, str] = {}
        self.failure: str | None = None
        self._cluster = cluster
        self._selector = selector
        self._container = container
        self._changed = trio.Event()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so, which is asked after each change."""
        while not is_so():
            await self._changed.wait()

    async def run(self) -> None:
        """Follow them until it is cancelled."""
        heard = trio.current_time()
        while True:
            try:
                with trio.move_on_after(limits.KUBERNETES_WATCH_SECONDS + limits.KUBERNETES_CALL_SECONDS):
                    found, version = await self._cluster.pods(self._selector)
                    self._listed(found)
                    async for kind, pod in self._cluster.changes(self._selector, version):
                        self._happened(kind, pod)
                heard = trio.current_time()
            except ApiError as error:
                silent = trio.current_time() - heard
                if self.failure is None and (error.status in (401, 403) or silent > limits.KUBERNETES_SILENT_SECONDS):
                    self.failure = str(error)
                    self._tell()
            await trio.sleep(limits.KUBERNETES_RETRY_SECONDS)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _listed(self, found: list[dict[str, Any]]) -> None:
        self.failure = None
        uids = {words.uid_of(pod) for pod in found}
        for pod in found:
            self._update(pod)
        for uid in [one for one in self.present if one not in uids]:
            self._delete(uid)
        self._tell()

    def _happened(self, kind: str, pod: words.Pod) -> None:
        if kind == "DELETED":
            self._update(pod)
            self._delete(words.uid_of(pod))
        elif kind in ("ADDED", "MODIFIED"):
            self._update(pod)
        self._tell()

    def _update(self, pod: words.Pod) -> None:
        place, uid = words.place_of(pod), words.uid_of(pod)
        self.present[uid] = words.name_of(pod)
        if place is None:
            return
        seen = self.hosts.setdefault(place, PodSeen(pod))
        if seen.uid == uid:  # PW-1
            seen.update(pod, self._container)

    def _delete(self, uid: str) -> None:
        self.present.pop(uid, None)
        for seen in self.hosts.values():
            if seen.uid == uid:
                seen.deleted()
