"""The pods of one run, as the API server tells of them.

PW-1 The first pod of a place is its host. Another one of the same place is none, and is deleted with the rest.
PW-2 A watch that breaks is begun again, by a new list: what has happened meanwhile is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import msgspec
import trio

from trimesh import limits
from trimesh.jobs.kubernetes.cluster import ApiError, Cluster


class PodSeen:
    """A pod that is a host.

    Attributes:
        pod: What the API server has said last.
        end: How it has ended; None while it lives.
        ended: Set then.
        gone: Set when it is not there any more.
    """

    def __init__(self, pod: Pod) -> None:
        self.name = name_of(pod)
        self.uid = uid_of(pod)
        self.pod = pod
        self.end: PodEnd | None = None
        self.ended = trio.Event()
        self.gone = trio.Event()

    def update(self, pod: Pod, container: str) -> None:
        """Learn what it is now."""
        self.pod = pod
        end = end_of(pod, container)
        if end is not None and self.end is None:
            self.end = end
            self.ended.set()

    def deleted(self) -> None:
        """Learn that it is not there any more."""
        if self.end is None:
            self.end = PodEnd("the pod was deleted", "cancelled")
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
        uids = {uid_of(pod) for pod in found}
        for pod in found:
            self._update(pod)
        for uid in [one for one in self.present if one not in uids]:
            self._delete(uid)
        self._tell()

    def _happened(self, kind: str, pod: Pod) -> None:
        if kind == "DELETED":
            self._update(pod)
            self._delete(uid_of(pod))
        elif kind in ("ADDED", "MODIFIED"):
            self._update(pod)
        self._tell()

    def _update(self, pod: Pod) -> None:
        place, uid = place_of(pod), uid_of(pod)
        self.present[uid] = name_of(pod)
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


# ---- what Kubernetes says of a pod, and which of it means that its agent lives ---------------------------------------

# A pod is a value of JSON, as the API server writes it. What is not known to live has ended: a phase that nothing here
# knows, a pod that is being deleted, one of whose node nothing is heard.

Pod = Mapping[str, Any]
_NOTHING: Final[Mapping[str, Any]] = {}

_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_FIRST: Final = "trimesh-actors/first"
_HOPELESS: Final = frozenset(
    (
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    )
)
"""Why a container waits that will wait for ever, unless a person changes something. A first failed pull is none."""

_REASONS: Final = {
    "OOMKilled": "out of memory",
    "PreemptionByScheduler": "preempted",
    "Preempting": "preempted",
    "EvictionByEvictionAPI": "evicted",
    "Evicted": "evicted",
    "TerminationByKubelet": "evicted",
    "DeletionByTaintManager": "node failed",
    "DeletionByPodGC": "node failed",
    "NodeLost": "node failed",
    "NodeShutdown": "node failed",
    "Terminated": "node failed",
    "DeadlineExceeded": "time limit",
}
"""Words of Kubernetes, of a pod, of its condition DisruptionTarget, or of a container, and reasons of `HostLost`."""


class PodEnd(msgspec.Struct, frozen=True):
    """How a pod has ended, or is about to.

    Attributes:
        text: In the words of Kubernetes.
        reason: See `HostLost.reason`.
    """

    text: str
    reason: str


def name_of(pod: Pod) -> str:
    return str(_part(pod, "metadata").get("name", ""))


def uid_of(pod: Pod) -> str:
    """Return what no other pod has, also none of the same name."""
    return str(_part(pod, "metadata").get("uid", ""))


def place_of(pod: Pod) -> int | None:
    """Return its place among the pods of its run; None where it has none.

    Those of the beginning are the indices of their Job, those that come later follow the place that their label says.
    """
    metadata = _part(pod, "metadata")
    labels = _part(metadata, "labels")
    first = str(labels.get(_FIRST) or "0")
    index = str(labels.get(_INDEX) or _part(metadata, "annotations").get(_INDEX) or "")
    return int(first) + int(index) if first.isdecimal() and index.isdecimal() else None


def is_running(pod: Pod, container: str) -> bool:
    """Tell whether the container of the agent runs."""
    return end_of(pod, container) is None and "running" in _state(pod, container)


def is_ready(pod: Pod) -> bool:
    """Tell whether the probes of a pod say that it is ready: its agent has joined."""
    return _condition(pod, "Ready").get("status") == "True"


def end_of(pod: Pod, container: str) -> PodEnd | None:
    """Return how a pod has ended, or is being ended; None while it lives."""
    status, metadata = _part(pod, "status"), _part(pod, "metadata")
    phase = str(status.get("phase", "Pending"))
    terminated = _part(_state(pod, container), "terminated")
    disruption = _condition(pod, "DisruptionTarget")
    if disruption.get("status") != "True":
        disruption = _NOTHING
    is_deleted = bool(metadata.get("deletionTimestamp"))
    if phase in ("Pending", "Running") and not terminated and not is_deleted:
        return None
    words = list[str]()
    if is_deleted:
        words.append("the pod is being deleted")
    elif not terminated or phase not in ("Pending", "Running"):
        words.append(f"the pod is {phase}")
    words += _said(disruption)
    words += _said(status)
    if terminated:
        words.append(_of_container(terminated))
    said = (disruption.get("reason"), status.get("reason"), terminated.get("reason"))
    by_default = "cancelled" if is_deleted else "agent exit"
    return PodEnd("; ".join(words), next((_REASONS[one] for one in said if one in _REASONS), by_default))


def hopeless(pod: Pod) -> str | None:
    """Return why no container of a pod will ever run, in the words of Kubernetes; None where one may."""
    for one in _containers(pod):
        waiting = _part(_part(one, "state"), "waiting")
        if waiting.get("reason") in _HOPELESS:
            return f"container {one.get('name')}: {'; '.join(_said(waiting))}"
    return None


def waits_for(pod: Pod) -> str:
    """Return what a pod that does not run yet waits for, or ""."""
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return "; ".join(_said(scheduled))
    return next(
        ("; ".join(_said(_part(_part(one, "state"), "waiting"))) for one in _containers(pod) if _part(one, "state")), ""
    )


def _said(part: Mapping[str, Any]) -> list[str]:
    words = [str(part[key]).strip() for key in ("reason", "message") if part.get(key)]
    return [": ".join(words)] if words else []


def _of_container(terminated: Mapping[str, Any]) -> str:
    signum, code = terminated.get("signal"), terminated.get("exitCode")
    end = f"signal {signum}" if signum else f"exit code {code}"
    return ": ".join([*_said(terminated), end])


def _containers(pod: Pod) -> list[Mapping[str, Any]]:
    status = _part(pod, "status")
    kinds = ("initContainerStatuses", "containerStatuses")
    return [one for kind in kinds for one in cast("list[Mapping[str, Any]]", status.get(kind) or [])]


def _state(pod: Pod, container: str) -> Mapping[str, Any]:
    return next((_part(one, "state") for one in _containers(pod) if one.get("name") == container), _NOTHING)


def _condition(pod: Pod, kind: str) -> Mapping[str, Any]:
    found = cast("list[Mapping[str, Any]]", _part(pod, "status").get("conditions") or [])
    return next((one for one in found if one.get("type") == kind), _NOTHING)


def _part(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", of.get(key) or {})
