"""What Kubernetes says of a pod, and which of it means that its agent lives; PURE.

A pod is a value of JSON, as the API server writes it. What is not known to live has ended: a phase that nothing here
knows, a pod that is being deleted, one of whose node nothing is heard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

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
