"""Hosts that are pods of others: of a JobSet, Kueue, Volcano or an operator, found by their labels.

    open      connect to the cluster, follow the pods of the selector
    allocate  make the Secret, unless there is one; wait until a pod of each rank runs
    start     for each host: put its token and the addresses of the program into the Secret, change its pod
    exit      remove what was put there

KA-1 Pods are never deleted, and of the Secret only what this run has put there is removed.
KA-2 A pod of an earlier attempt that has ended is no host, whatever its rank.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import trio

from trimesh import limits
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.jobs.job import Job, checked_hosts
from trimesh.jobs.kubernetes import cluster as words
from trimesh.jobs.kubernetes.cluster import CONFLICT, NOT_FOUND, ApiError, Cluster, PodWatch, open_cluster
from trimesh.jobs.kubernetes.pod_agent import PodAgent, interface_towards
from trimesh.jobs.launcher import AgentOrder, Launcher

_log: Final = logging.getLogger("trimesh")

RANKS: Final = (
    "batch.kubernetes.io/job-completion-index",
    "apps.kubernetes.io/pod-index",
    "leaderworkerset.sigs.k8s.io/worker-index",
    "training.kubeflow.org/replica-index",
    "volcano.sh/task-index",
)
"""Labels or annotations with the index of a pod: of Indexed Jobs and JobSets, StatefulSets, LeaderWorkerSets, the
training operator of Kubeflow, and Volcano."""


def _checked_text(_: object, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{attribute.name}= of pods of others must be a text that names them, got {value!r}")


def _texts(advertise: Sequence[str]) -> tuple[str, ...]:
    return tuple(advertise)


@attrs.frozen
class AttachedPods(Job):
    """Hosts that are pods which something else has made; see `KubernetesJob.attach`.

    Attributes:
        hosts: Number of pods, or a mapping of mesh names to numbers.
        selector, secret, namespace, container, rank, interface, port, advertise: See `KubernetesJob.attach`.
    """

    hosts: int | Mapping[str, int] = attrs.field(converter=checked_hosts)
    selector: str = attrs.field(kw_only=True, validator=_checked_text)
    secret: str = attrs.field(kw_only=True, validator=_checked_text)
    namespace: str | None = attrs.field(default=None, kw_only=True)
    container: str = attrs.field(default="trimesh", kw_only=True)
    rank: str | None = attrs.field(default=None, kw_only=True)
    interface: str | None = attrs.field(default=None, kw_only=True)
    port: int = attrs.field(default=0, kw_only=True)
    advertise: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=_texts)

    def launcher(self) -> Launcher:
        """See `Job.launcher`."""
        return AttachedLauncher(self)

    def place_of(self, pod: words.Pod) -> int | None:
        """Return the rank of a pod; None if it has no number there."""
        metadata: Mapping[str, Any] = pod.get("metadata") or {}
        found: dict[str, Any] = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
        for name in RANKS if self.rank is None else (self.rank,):
            text = str(found.get(name, ""))
            if text.isascii() and text.isdecimal():
                return int(text)
        return None


class AttachedLauncher(Launcher):
    """Gives tokens to pods that wait for them."""

    starts_again = False

    def __init__(self, job: AttachedPods) -> None:
        self.interface = ""
        self.port = job.port
        self.advertised = job.advertise
        self.hosts = [""] * sum(job.parts.values())
        self._job = job
        self._cluster: Cluster
        self._watch: PodWatch
        self._nursery: trio.Nursery
        self._addresses: tuple[str, ...] = ()
        self._made: str | None = None
        self._keys = set[str]()
        self._calls = trio.CapacityLimiter(limits.KUBERNETES_CALLS_AT_ONCE)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        job = self._job
        async with open_cluster(job.namespace) as self._cluster:
            self._watch = PodWatch(self._cluster, job.selector, job.container, job.place_of, skips_ended=True)
            try:
                await self._cluster.get("/version")  # the first calls at once would make several sessions in kr8s
                self.interface = await interface_towards(self._cluster, job.interface, job.advertise)
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self._watch.run)
                    try:
                        yield
                    finally:
                        with trio.CancelScope(shield=True), trio.move_on_after(limits.KUBERNETES_END_SECONDS):
                            await self._clear()
                        self._nursery.cancel_scope.cancel(reason="the hosts are left")
            except ApiError as error:
                raise SpawnError(f"Kubernetes, namespace {self._cluster.namespace}: {error}") from error

    async def allocate(self, addresses: tuple[str, ...], say: Callable[[str], None]) -> None:
        self._addresses = addresses
        await self._make_secret()
        await self._watch.until(lambda: self._looked(say))
        if self._watch.failure is not None:
            raise SpawnError(f"the API server does not report the pods of {self._job.selector}: {self._watch.failure}")
        seen = self._watch.hosts
        if not self._is_complete:
            names = ", ".join(sorted(self._watch.unplaced.values()))
            known = "one of " + ", ".join(RANKS) if self._job.rank is None else self._job.rank
            raise SpawnError(f"each pod of {self._job.selector} must have its rank as {known}, and {names} has none: "
                             "name another label or annotation by rank=")  # fmt: skip
        self.hosts = [seen[rank].name for rank in range(len(self.hosts))]

    @property
    def _is_complete(self) -> bool:
        """True if a pod of each rank runs."""
        seen, container = self._watch.hosts, self._job.container
        return all(rank in seen and words.is_running(seen[rank].pod, container) for rank in range(len(self.hosts)))

    def _looked(self, say: Callable[[str], None]) -> bool:
        """Report progress; return whether a pod of each rank runs, or never will."""
        seen, count = self._watch.hosts, len(self.hosts)
        running = [one for one in seen.values() if words.is_running(one.pod, self._job.container)]
        say(f"{len(running)} of {count} pods of {self._job.selector} run")
        is_unranked = bool(self._watch.unplaced) and not seen
        return self._watch.failure is not None or self._is_complete or is_unranked

    async def _make_secret(self) -> None:
        metadata = {"name": self._job.secret, "labels": {"app.kubernetes.io/managed-by": "trimesh"}}
        manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}
        try:
            self._made = (await self._cluster.create(manifest))["metadata"]["uid"]
        except ApiError as error:
            if error.status != CONFLICT:  # there is one: pods mount it already
                raise SpawnError(f"Kubernetes refused the Secret of these pods: {error}") from error

    async def start(self, rank: int, order: AgentOrder) -> AttachedAgent:
        """See `Launcher.start`."""
        seen = self._watch.hosts[rank]
        if seen.end is not None:
            raise SpawnError(f"the pod {seen.name} has ended: {seen.end.text}")
        keys = (str(rank), seen.name)
        self._keys.update(keys)
        line = " ".join((order.token, *order.addresses))
        await self._put(dict.fromkeys(keys, base64.b64encode(f"{line}\n".encode()).decode()))
        self._nursery.start_soon(self._notify, seen.name)
        return AttachedAgent(seen, self._cluster, self._job.container)

    async def _put(self, data: Mapping[str, str | None]) -> None:
        async with self._calls:
            try:
                await self._cluster.patch("Secret", self._job.secret, {"data": data})
            except ApiError as error:
                raise SpawnError(f"the pods of {self._job.selector} cannot be given their tokens: {error}") from error

    async def _notify(self, pod: str) -> None:
        """Change an annotation of a pod now and then, so that its kubelet reads the Secret before a minute is over."""
        for number in range(limits.POD_HURRIES):
            async with self._calls:
                try:
                    change = {"metadata": {"annotations": {"trimesh-actors/look": str(number)}}}
                    await self._cluster.patch("Pod", pod, change)
                except ApiError as error:
                    _log.info("cannot notify the pod %s of its token, so it reads it within a minute: %s", pod, error)
                    return
            await trio.sleep(limits.POD_HURRY_SECONDS)

    async def _clear(self) -> None:
        """Remove the tokens (KA-1)."""
        try:
            if self._made is not None:
                await self._cluster.delete("Secret", self._job.secret, self._made)
            elif self._keys:
                await self._cluster.patch("Secret", self._job.secret, {"data": dict.fromkeys(sorted(self._keys))})
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                _log.warning("used tokens are left in the Secret %s: %s", self._job.secret, error)


class AttachedAgent(PodAgent):
    """An agent in a pod of others; see `StartedAgent`."""

    @trio.lowlevel.enable_ki_protection
    async def stop(self) -> None:
        """See `StartedAgent.stop`: the agent ends with its session, or its lease; the pod is its owner's (KA-1)."""
        with trio.CancelScope(shield=True), trio.move_on_after(limits.AGENT_LEASE_SECONDS):
            await self.seen.ended.wait()
