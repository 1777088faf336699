"""Launcher of agents in pods of Kubernetes.

    open      connect to the cluster; with via="port-forward" apply the manifests of the relay pod
    allocate  apply the manifests; wait until the agents of all pods run and wait for their tokens
    start     for each host: put its token into the Secret, and change its pod so that the kubelet reads it soon
    grow      as allocate, for further pods: more hosts, or a replacement for a pod that has ended
    exit      delete everything

KL-1 Only objects with the label of this run, and the uid that was read with it, are deleted.
KL-2 An object is noted by its name before it is created, so one made by an interrupted call is deleted, too.
"""

from __future__ import annotations

import base64
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, Final

import attrs
import trio

from trimesh import limits
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.jobs.addresses import LOOPBACK, held_port, with_port
from trimesh.jobs.kubernetes import cluster as words
from trimesh.jobs.kubernetes.cluster import (
    CONFLICT,
    NOT_FOUND,
    RELAY_PLACE,
    ApiError,
    Cluster,
    HostPod,
    PodWatch,
    open_cluster,
)
from trimesh.jobs.kubernetes.job import (
    FIRST_LABEL,
    JOBSET_VERSION,
    PORT_FORWARD,
    RELAY_LABEL,
    RELAY_PORT,
    RUN_LABEL,
    KubernetesJob,
    Manifest,
    Manifests,
    agent_name,
    manifests_of,
    more_manifests,
    relay_manifests,
)
from trimesh.jobs.kubernetes.pod_agent import PodAgent, interface_towards
from trimesh.jobs.kubernetes.port_forward import PortForwarder
from trimesh.jobs.launcher import AgentOrder
from trimesh.jobs.ssh import SSH, RelayedLauncher

_log: Final = logging.getLogger("trimesh")
_OLDEST: Final = (1, 29)
"""The first version of Kubernetes in which a failed pod need not end the others of its Job (backoffLimitPerIndex)."""


class KubernetesLauncher(RelayedLauncher):
    """Starts agents in pods."""

    starts_again = False

    def __init__(self, job: KubernetesJob) -> None:
        self.interface = ""
        self.port = job.port
        self.advertised = job.advertise
        self.hosts = [""] * job.pods.count
        self._job = job
        self._run = secrets.token_hex(6)
        self._name = job.name or f"trimesh-{self._run}"
        self._container = agent_name(job.pods.template)
        self._cluster: Cluster
        self._watch: PodWatch
        self._nursery: trio.Nursery
        self._addresses: tuple[str, ...] = ()
        self._batches: list[PodBatch] = []
        self._forwarder: PortForwarder | None = None

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        async with open_cluster(self._job.namespace) as self._cluster, AsyncExitStack() as stack:
            self._watch = PodWatch(self._cluster, f"{RUN_LABEL}={self._run}", self._container)
            try:
                await self._check_version()
                await self._find_way(stack)
                async with trio.open_nursery() as self._nursery:
                    try:
                        yield
                    finally:
                        self._nursery.cancel_scope.cancel(reason="the hosts are left")
                        with trio.CancelScope(shield=True):
                            await self._delete_all()
            except ApiError as error:
                raise SpawnError(f"Kubernetes, namespace {self._cluster.namespace}: {error}") from error

    async def _find_way(self, stack: AsyncExitStack) -> None:
        job = self._job
        if job.via == PORT_FORWARD:
            try:
                await self._apply_relay(stack.enter_context(held_port()))
            except BaseException:
                with trio.CancelScope(shield=True):
                    await self._delete_all()
                raise
        elif isinstance(job.via, SSH):
            await self.relay(stack, job.via, job.interface, "")
        else:
            self.interface = await interface_towards(self._cluster, job.interface, self.advertised)

    async def _apply_relay(self, port: int) -> None:
        """Apply the relay pod, and let the program listen behind it; the pod may run later than this."""
        batch = PodBatch(f"{self._name}-relay", (RELAY_PLACE,))
        await self._apply(batch, relay_manifests(self._job.pods, name=self._name, run=self._run))
        service = await self._cluster.read("Service", batch.name)
        address = with_port(str(service["spec"]["clusterIP"]), RELAY_PORT)
        self.interface, self.port, self.advertised = LOOPBACK, port, (address,)
        order = {
            "namespace": self._cluster.namespace,
            "selector": f"{RELAY_LABEL}={self._run}",
            "container": self._container,
            "port": RELAY_PORT,
            "door": port,
        }
        self._forwarder = PortForwarder(order, self._watch.tell)

    async def _check_version(self) -> None:
        said = await self._cluster.get("/version")
        found = tuple(int("".join(filter(str.isdigit, str(said.get(key, "0")))) or 0) for key in ("major", "minor"))
        if found < _OLDEST:
            raise SpawnError(
                f"a KubernetesJob needs Kubernetes {_OLDEST[0]}.{_OLDEST[1]}, got {said.get('gitVersion')}"
            )

    # ---- pods ------------------------------------------------------------------------------------------------

    async def allocate(self, addresses: tuple[str, ...], say: Callable[[str], None]) -> None:
        self._addresses = addresses
        batch = PodBatch(self._name, range(len(self.hosts)))
        try:
            has_jobset = await self._has_jobset()
        except ApiError as error:
            raise _not_taken(error) from error
        manifests = manifests_of(
            self._job.pods, name=self._name, run=self._run, address=addresses, has_jobset=has_jobset
        )
        await self._apply(batch, manifests)
        self._nursery.start_soon(self._watch.run)
        if self._forwarder is not None:
            self._nursery.start_soon(self._forward, self._forwarder)
        await self._wait_running(batch, say)

    async def _forward(self, forwarder: PortForwarder) -> None:
        """Reach the relay once it runs: it waits for less long than hosts may be in a queue."""
        await self._watch.until(
            lambda: any(words.is_running(one.pod, self._container) for one in self._seen((RELAY_PLACE,)))
        )
        await forwarder.keep()

    async def grow(self, count: int, say: Callable[[str], None]) -> Sequence[int]:
        """Create further pods; see `Launcher.grow`."""
        first = len(self.hosts)
        batch = PodBatch(f"{self._name}-{first}", range(first, first + count))
        self.hosts = [*self.hosts, *("" for _ in batch.ranks)]  # reserves these places while this waits
        pods = attrs.evolve(self._job.pods, count=count)
        try:
            manifests = more_manifests(pods, name=batch.name, run=self._run, address=self._addresses, first=first)
            await self._apply(batch, manifests)
            await self._wait_running(batch, say)
        except BaseException:
            await self._take_back(batch)
            raise
        return batch.ranks

    async def give_back(self, ranks: Sequence[int]) -> None:
        await self._take_back(self._batch_of(ranks[0]))

    def _batch_of(self, rank: int) -> PodBatch:
        return next(batch for batch in self._batches if rank in batch.ranks)

    async def _apply(self, batch: PodBatch, manifests: Manifests) -> None:
        self._batches.append(batch)
        owner: Manifest | None = None
        try:
            for manifest in manifests:
                made = await self._make(batch, manifest, owner)
                owner = owner or _owner_of(made)
        except ApiError as error:
            raise _not_taken(error) from error

    async def _wait_running(self, batch: PodBatch, say: Callable[[str], None]) -> None:
        """Wait until the agents of all pods run, and store the names of the pods.

        Raises:
            SpawnError: One of them will never run.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat, batch)
            await self._watch.until(lambda: self._looked(batch, say))
            nursery.cancel_scope.cancel()
        failed = await self._failure(batch)
        if failed is not None:
            raise SpawnError(failed)
        names = {rank: self._watch.hosts[rank].name for rank in batch.ranks}
        self.hosts = [names.get(rank, name) for rank, name in enumerate(self.hosts)]

    async def _has_jobset(self) -> bool:
        try:
            said = await self._cluster.get(f"/apis/{JOBSET_VERSION}")
        except ApiError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        resources: list[dict[str, Any]] = said.get("resources") or []
        return any(one.get("name") == "jobsets" for one in resources)

    async def _make(self, batch: PodBatch, manifest: Manifest, owner: Manifest | None) -> dict[str, Any]:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        owners = {} if owner is None else {"ownerReferences": [owner]}
        batch.made.append((kind, name))  # KL-2
        try:
            return await self._create({**manifest, "metadata": {**manifest["metadata"], **owners}})
        except ApiError as error:
            if 0 < error.status < HTTPStatus.INTERNAL_SERVER_ERROR:  # it was certainly not created
                batch.made.pop()
            if error.status == CONFLICT:
                raise SpawnError(
                    f"the objects of a run must not exist before, and {kind} {name} does in the namespace "
                    f"{self._cluster.namespace}: pass another name=, or delete it if it is yours "
                    f"(kubectl delete {kind.lower()} {name})"
                ) from error
            raise

    @trio.lowlevel.enable_ki_protection
    async def _create(self, manifest: Manifest) -> dict[str, Any]:
        made = dict[str, Any]()
        with trio.CancelScope(shield=True):  # so that it is known whether the object was created
            made = await self._cluster.create(manifest)
        return made  # noqa: RET504 - type checkers assume that a scope may end its block early

    def _seen(self, places: Sequence[int]) -> Sequence[HostPod]:
        return [self._watch.hosts[place] for place in places if place in self._watch.hosts]

    def _awaited(self, batch: PodBatch) -> Sequence[int]:
        """Return the places of pods that must run before the hosts of a batch can join."""
        return batch.ranks if self._forwarder is None else (RELAY_PLACE, *batch.ranks)

    def _looked(self, batch: PodBatch, say: Callable[[str], None]) -> bool:
        """Report progress; return whether all pods run, or one never will."""
        awaited = self._awaited(batch)
        seen = self._seen(awaited)
        forwarder = self._forwarder
        has_failed = self._watch.failure is not None or (forwarder is not None and bool(forwarder.failure))
        if has_failed or any(self._over(one) is not None for one in seen):
            return True
        running = sum(words.is_running(one.pod, self._container) for one in seen)
        waiting = [words.waits_for(one.pod) for one in seen if not words.is_running(one.pod, self._container)]
        said = next((f": {one}" for one in waiting if one), "")
        say(f"{running} of {len(awaited)} pods run{said}")
        return running == len(awaited) and (forwarder is None or forwarder.is_ready)

    def _over(self, one: HostPod) -> str | None:
        is_started_again = words.place_of(one.pod) == RELAY_PLACE
        return words.hopeless(one.pod) if one.end is None or is_started_again else one.end.text

    async def _failure(self, batch: PodBatch) -> str | None:
        if self._watch.failure is not None:
            return f"the API server does not report the pods of {batch.name}: {self._watch.failure}"
        for one in self._seen(self._awaited(batch)):
            text = self._over(one)
            if text is not None:
                log = await self._cluster.log(one.name, self._container)
                what = "the relay" if words.place_of(one.pod) == RELAY_PLACE else "a host"
                return f"the pod {one.name} cannot be {what}: {text}" + (f"; its last words: {log}" if log else "")
        return None if self._forwarder is None else self._forwarder.failure or None

    async def _beat(self, batch: PodBatch) -> None:
        """Change the Secret at intervals: pods that wait for their tokens see that the program lives."""
        while True:
            await trio.sleep(limits.POD_BEAT_SECONDS)
            try:
                await self._cluster.patch("Secret", batch.name, {"data": {"beat": _encoded(str(time.time()))}})
            except ApiError as error:
                _log.warning("cannot signal to the waiting pods of %s that this program lives: %s", batch.name, error)

    # ---- agents ----------------------------------------------------------------------------------------------

    async def start(self, rank: int, order: AgentOrder) -> PodAgent:
        """See `Launcher.start`; for a pod that has ended, `grow` creates another one."""
        batch = self._batch_of(rank)
        tokens = batch.take(rank, order.token)
        if tokens is not None:
            try:
                data = {str(one): _encoded(f"{token}\n") for one, token in tokens.items()}
                await self._cluster.patch("Secret", batch.name, {"data": data})
                await self._notify(batch, 0)
                self._nursery.start_soon(self._keep_notifying, batch)
            except ApiError as error:
                batch.gave(error)
            else:
                batch.gave(None)
        await batch.wait_given()
        return PodAgent(self._watch.hosts[rank], self._cluster, self._container)

    async def _notify(self, batch: PodBatch, number: int) -> None:
        """Change an annotation of each pod, so that its kubelet reads the Secret now, not within a minute."""
        change = {"metadata": {"annotations": {"trimesh-actors/look": f"{self._run}-{number}"}}}
        late = [one for one in self._seen(batch.ranks) if one.end is None and not words.is_ready(one.pod)]
        bound = trio.CapacityLimiter(limits.KUBERNETES_CALLS_AT_ONCE)

        async def look(one: HostPod) -> None:
            async with bound:
                try:
                    await self._cluster.patch("Pod", one.name, change)
                except ApiError as error:
                    if error.status != NOT_FOUND:
                        refused.append(error)

        refused = list[ApiError]()
        async with trio.open_nursery() as nursery:
            for one in late:
                nursery.start_soon(look, one)
        if refused:
            raise refused[0]

    async def _keep_notifying(self, batch: PodBatch) -> None:
        """Repeat that until all have had time to join: a kubelet may have read the Secret before it changed."""
        until, number = trio.current_time() + limits.HOST_JOIN_SECONDS, 1
        while trio.current_time() < until:
            await trio.sleep(limits.POD_HURRY_SECONDS)
            try:
                await self._notify(batch, number)
            except ApiError as error:
                _log.info("cannot notify the pods of %s of their tokens: %s", batch.name, error)
            number += 1

    # ---- the end ---------------------------------------------------------------------------------------------

    async def _delete_all(self) -> None:
        """Delete all objects of this run, and wait until its pods are gone; log what could not be deleted."""
        left = list[str]()
        with trio.move_on_after(limits.KUBERNETES_END_SECONDS):
            made = [one for batch in self._batches for one in batch.made]
            for kind, name in made:
                left.append(f"{kind} {name}")
                await self._delete(kind, name)
                left.pop()
            if made:
                left.append(f"pods of {self._name}")
                await self._wait_no_pods(f"{RUN_LABEL}={self._run}")
                left.pop()
        if left:
            after = f"limits.KUBERNETES_END_SECONDS ({limits.KUBERNETES_END_SECONDS:g} s)"
            _log.error(
                "the API server has not deleted %s in the namespace %s within %s; it does so %g s after the pods have "
                "ended, or now by: kubectl delete jobset,job,service,secret,pod -l %s=%s",
                *(left[0], self._cluster.namespace, after, limits.POD_KEPT_SECONDS, RUN_LABEL, self._run),
            )

    async def _take_back(self, batch: PodBatch) -> None:
        """Delete pods that `grow` created; if that takes too long, `_delete_all` tries again."""
        with trio.CancelScope(shield=True), trio.move_on_after(limits.KUBERNETES_END_SECONDS):
            for kind, name in batch.made:
                await self._delete(kind, name)
            await self._wait_no_pods(f"{RUN_LABEL}={self._run},{FIRST_LABEL}={batch.ranks[0]}")
            if batch in self._batches:
                self._batches.remove(batch)

    async def _delete(self, kind: str, name: str) -> None:
        while True:
            try:
                found = await self._cluster.read(kind, name)
                metadata: dict[str, Any] = found["metadata"]
                labels: dict[str, Any] = metadata.get("labels") or {}
                if labels.get(RUN_LABEL) == self._run:  # KL-1
                    await self._cluster.delete(kind, name, metadata["uid"])
            except ApiError as error:
                if error.status not in (NOT_FOUND, CONFLICT):
                    await trio.sleep(limits.KUBERNETES_RETRY_SECONDS)
                    continue
            return

    async def _wait_no_pods(self, selector: str) -> None:
        while True:
            try:
                found, _ = await self._cluster.pods(selector)
                if not found:
                    return
            except ApiError as error:
                if error.status == NOT_FOUND:
                    return
            await trio.sleep(limits.KUBERNETES_LOOK_SECONDS)


def _owner_of(made: dict[str, Any]) -> Manifest:
    return {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "name": made["metadata"]["name"],
        "uid": made["metadata"]["uid"],
    }


def _not_taken(error: ApiError) -> SpawnError:
    return SpawnError(f"Kubernetes refused the objects of this job: {error}")


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# ---- pod batch -------------------------------------------------------------------------------------------------------


class PodBatch:
    """Pods of one Job, the first of a run or those of one `grow`. One change of the Secret gives all their tokens.

    Args:
        name: Name of the Secret.
        ranks: Places of the pods among those of the run.

    Attributes:
        made: Kinds and names of the objects that were created, or may have been.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name = name
        self.ranks = ranks
        self.made: list[tuple[str, str]] = []
        self._tokens: dict[int, str] = {}
        self._given = trio.Event()
        self._refused: ApiError | None = None

    def take(self, rank: int, token: str) -> dict[int, str] | None:
        """Store the token of a pod; return all tokens by index once the last one is stored, else None.

        Raises:
            SpawnError: The pod has had its token.
        """
        index = rank - self.ranks[0]
        if index in self._tokens:
            raise SpawnError("a pod starts one agent, and that of this pod has ended: add another host with grow()")
        self._tokens[index] = token
        return self._tokens if len(self._tokens) == len(self.ranks) else None

    def gave(self, refused: ApiError | None) -> None:
        """Report that all pods have their tokens, or why not."""
        self._refused = refused
        self._given.set()

    async def wait_given(self) -> None:
        """Wait until all pods have their tokens.

        Raises:
            SpawnError: The API server refused to change the Secret or a pod.
        """
        await self._given.wait()
        if self._refused is not None:
            raise SpawnError(f"the pods of {self.name} cannot be given their tokens: {self._refused}")
