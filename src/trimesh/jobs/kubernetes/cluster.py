"""Client of a cluster's API server, by kr8s with the configuration of kubectl or of a pod; watch of a run's pods.

A pod's *place* is its index among the pods of its run, and the rank of its host.

PW-1 The first pod of a place is its host. Further pods of the same place are ignored, and deleted with the rest. Only
     a relay that has ended is followed by the next one.
PW-2 A watch that breaks is restarted with a new list, which includes the changes meanwhile.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec
import trio

from trimesh import limits
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError

_PLURALS: Final = {
    "JobSet": ("jobset.x-k8s.io/v1alpha2", "jobsets"),
    "Job": ("batch/v1", "jobs"),
    "Service": ("v1", "services"),
    "Secret": ("v1", "secrets"),
    "Pod": ("v1", "pods"),
}
_MERGE: Final = {"content-type": "application/merge-patch+json"}
_FORWARDS: Final = "v4.channel.k8s.io"
"""Protocol of forwards over WebSockets: a byte before each message is its channel, 0 for data, 1 for an error."""

_DATA: Final = 0
_SWITCHING_PROTOCOLS: Final = 101
CONFLICT: Final = 409
UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
GONE: Final = 410
NOT_FOUND: Final = 404


class ApiError(Exception):
    """The API server refused a call, or could not be reached.

    Attributes:
        status: HTTP status; 0 without a response.
    """

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Cluster:
    """One cluster, and one namespace in it. Made by `open_cluster`.

    Attributes:
        namespace: Namespace of all objects of a run.
    """

    def __init__(self, api: Any, errors: tuple[type[Exception], ...]) -> None:
        self.namespace: str = api.namespace
        self._api = api
        self._errors = errors

    @property
    def server(self) -> tuple[str, int]:
        """Name and port of the API server."""
        found = urlsplit(str(self._api.auth.server))
        return found.hostname or "", found.port or (443 if found.scheme == "https" else 80)

    async def get(self, path: str) -> dict[str, Any]:
        """Return the response at a path that belongs to no namespace, such as "/version"."""
        text = await self._call("GET", base=path, version="", url="")
        return dict(json.loads(text))

    async def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object, and return it as the API server completed it.

        Raises:
            ApiError: With `CONFLICT` if an object of its kind and name exists.
        """
        version, plural = _PLURALS[manifest["kind"]]
        text = await self._call("POST", version=version, url=plural, content=json.dumps(manifest))
        return dict(json.loads(text))

    async def read(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object.

        Raises:
            ApiError: With `NOT_FOUND` if it does not exist.
        """
        version, plural = _PLURALS[kind]
        return dict(json.loads(await self._call("GET", version=version, url=f"{plural}/{name}")))

    async def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> None:
        """Merge a change into an object."""
        version, plural = _PLURALS[kind]
        url = f"{plural}/{name}"
        await self._call("PATCH", version=version, url=url, content=json.dumps(change), headers=_MERGE)

    async def delete(self, kind: str, name: str, uid: str, grace: int | None = None) -> None:
        """Delete an object and what it owns, if it has this uid; returns before the deletion is complete.

        `grace` is the time from SIGTERM to SIGKILL of a pod in seconds; None takes that of the pod.

        Raises:
            ApiError: With `NOT_FOUND` if it does not exist, with `CONFLICT` if it has another uid.
        """
        version, plural = _PLURALS[kind]
        options: dict[str, Any] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        await self._call("DELETE", version=version, url=f"{plural}/{name}", content=json.dumps(options))

    async def pods(self, selector: str) -> tuple[list[dict[str, Any]], str]:
        """Return the pods of a label selector, and the version of that list."""
        found = json.loads(await self._call("GET", url="pods", params={"labelSelector": selector}))
        return list(found.get("items") or []), str(found["metadata"].get("resourceVersion", ""))

    async def changes(self, selector: str, since: str) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield changes of pods since a version, as ("MODIFIED", pod), until the API server ends the watch.

        Raises:
            ApiError: With `GONE` if the version is too old.
        """
        seconds = str(int(limits.KUBERNETES_WATCH_SECONDS))
        params = {"labelSelector": selector, "watch": "true", "resourceVersion": since, "timeoutSeconds": seconds}
        call = {"version": "v1", "namespace": self.namespace, "url": "pods", "params": params, "stream": True}
        try:
            async with self._api.call_api("GET", **call) as response:
                async for line in response.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        said: dict[str, Any] = event["object"]
                        raise ApiError(int(said.get("code", 0)), str(said.get("message", "")))
                    yield event["type"], event["object"]
        except self._errors as error:
            raise self._api_error(error) from error

    async def log(self, pod: str, container: str) -> str:
        """Return the last lines of a container's log; "" if the API server does not return them."""
        params = {
            "container": container,
            "tailLines": str(limits.AGENT_LINES_KEPT),
            "limitBytes": str(limits.AGENT_LINES_KEPT * limits.AGENT_LINE_BYTES_MAX),
        }
        try:
            text = await self._call("GET", url=f"pods/{pod}/log", params=params)
        except ApiError:
            return ""
        return text.strip("\n")

    @asynccontextmanager
    async def forward(self, pod: str, port: int) -> AsyncGenerator[Forward, None]:
        """Connect to a port at the loopback address of a pod, through the API server.

        Raises:
            ApiError: The API server refuses it. A port at which nothing listens is a forward that ends.
        """
        websockets: Any = importlib.import_module("httpx_ws")
        protocol: Any = importlib.import_module("wsproto.utilities")
        httpx: Any = importlib.import_module("httpx")
        auth = self._api.auth
        async with AsyncExitStack() as stack:
            try:
                # A client for each forward: that of kr8s has at most 100 connections.
                client = httpx.AsyncClient(
                    headers={"Authorization": f"Bearer {auth.token}"} if auth.token else {},
                    verify=await auth.ssl_context(),
                    timeout=limits.KUBERNETES_CALL_SECONDS,
                    proxy=auth.proxy,
                    event_hooks={"response": [_check_upgrade]},
                )
                await stack.enter_async_context(client)
                socket = websockets.aconnect_ws(
                    f"{auth.server.rstrip('/')}/api/v1/namespaces/{self.namespace}/pods/{pod}/portforward",
                    client,
                    subprotocols=[_FORWARDS],
                    keepalive_ping_timeout_seconds=None,  # a pong waits behind bytes that the door does not take
                    params={"ports": str(port)},
                    extensions={"sni_hostname": auth.tls_server_name} if auth.tls_server_name else {},
                )
                forward = Forward(
                    await stack.enter_async_context(socket), (websockets.HTTPXWSException, protocol.ProtocolError)
                )
            except self._errors as error:
                failure = self._api_error(error)
                if failure.status == UNAUTHORIZED:  # an expired token; kr8s replaces it in its own calls only
                    await auth.reauthenticate()
                raise failure from error
            yield forward

    async def _call(self, method: str, *, version: str = "v1", base: str = "", **said: Any) -> str:
        namespace = None if base else self.namespace
        try:
            with trio.fail_after(limits.KUBERNETES_CALL_SECONDS):
                async with self._api.call_api(
                    method, version=version, base=base, namespace=namespace, **said
                ) as response:
                    return str(response.text)
        except trio.TooSlowError:
            seconds = f"limits.KUBERNETES_CALL_SECONDS ({limits.KUBERNETES_CALL_SECONDS:g} s)"
            raise ApiError(0, f"the API server has not answered within {seconds}") from None
        except self._errors as error:
            raise self._api_error(error) from error

    @staticmethod
    def _api_error(error: Exception) -> ApiError:
        response: Any = getattr(error, "response", None)
        words = str(error) or type(error).__name__
        with suppress(Exception):  # of a proxy before the API server, or not read
            words = response.json()["message"]
        if response is None:
            return ApiError(0, f"the API server cannot be reached: {words}")
        return ApiError(int(response.status_code), words)


async def _check_upgrade(response: Any) -> None:
    if response.status_code != _SWITCHING_PROTOCOLS:
        await response.aread()
        response.raise_for_status()


class Forward:
    """Bytes to a port of a pod and back. Made by `Cluster.forward`.

    Attributes:
        failure: Why it has ended, in the words of the API server; "" until then, or without words.
    """

    def __init__(self, socket: Any, ended: tuple[type[Exception], ...]) -> None:
        self.failure = ""
        self._socket = socket
        self._ended = ended
        self._begun = set[int]()

    async def send(self, data: bytes | bytearray) -> None:
        """Send bytes; nothing happens if it has ended."""
        with suppress(*self._ended):
            await self._socket.send_bytes(bytes((_DATA,)) + data)

    async def receive(self) -> bytes:
        """Return the next bytes; b"" at the end."""
        while not self.failure:
            try:
                message = await self._socket.receive_bytes()
            except self._ended:
                break
            channel, data = message[0], message[1:]
            if channel not in self._begun:  # the first message of each channel is the number of the port
                self._begun.add(channel)
            elif channel == _DATA and data:
                return bytes(data)
            elif data:
                self.failure = data.decode(errors="replace").strip()
        return b""


@asynccontextmanager
async def open_cluster(namespace: str | None) -> AsyncGenerator[Cluster, None]:
    """Connect to the cluster of kubectl's current context, or to the one in which this program is a pod.

    Args:
        namespace: Namespace of the run; None takes that of the context, or of the pod.

    Raises:
        SpawnError: There is no configuration, or kr8s is missing.
    """
    try:
        kr8s: Any = importlib.import_module("kr8s.asyncio")
        httpx: Any = importlib.import_module("httpx")
        base: Any = importlib.import_module("kr8s")
    except ImportError as error:
        raise SpawnError(
            f"a KubernetesJob needs the extra `kubernetes`: pip install 'trimesh-actors[kubernetes]'; {error}"
        ) from None
    # Not the object that kr8s shares in this thread: its connections belong to this Trio run.
    api = kr8s.Api(bypass_factory=True, namespace=namespace)
    again = api.auth.reauthenticate

    async def reauthenticate() -> None:
        _remove_files(api.auth)
        await again()

    api.auth.reauthenticate = reauthenticate
    try:
        try:
            with trio.fail_after(limits.KUBERNETES_CALL_SECONDS):
                await api.auth
        except (ValueError, KeyError, OSError, trio.TooSlowError) as error:
            raise SpawnError(
                "a KubernetesJob needs the configuration of a cluster: KUBECONFIG, ~/.kube/config, or the service "
                f"account of a pod; {type(error).__name__}: {error}"
            ) from error
        yield Cluster(api, (httpx.HTTPError, base.ServerError, base.APITimeoutError, OSError))
    finally:
        _remove_files(api.auth)
        session = api._session  # noqa: SLF001 - kr8s closes it when the object is collected, in no task
        if session is not None:
            with trio.CancelScope(shield=True), trio.move_on_after(1), suppress(Exception):
                await session.aclose()


def _remove_files(auth: Any) -> None:
    """Remove the temporary files into which kr8s wrote certificates and keys that are inline in the configuration."""
    user, cluster = auth._user, auth._cluster  # noqa: SLF001 - kr8s never removes these files
    for said, key, attribute in (
        (user, "client-key-data", "client_key_file"),
        (user, "client-certificate-data", "client_cert_file"),
        (cluster, "certificate-authority-data", "server_ca_file"),
    ):
        path = getattr(auth, attribute)
        if key in said and path is not None:
            Path(path).unlink(missing_ok=True)


# ---- the pods of one run, as the API server reports them -------------------------------------------------------------


class HostPod:
    """A pod that is a host.

    Attributes:
        pod: Its last report from the API server.
        end: How it ended; None while it lives.
        ended: Set when `end` is.
        gone: Set when the pod is deleted.
    """

    def __init__(self, pod: Pod) -> None:
        self.name = name_of(pod)
        self.uid = uid_of(pod)
        self.pod = pod
        self.end: PodEnd | None = None
        self.ended = trio.Event()
        self.gone = trio.Event()

    def update(self, pod: Pod, container: str) -> None:
        """Store a new report."""
        self.pod = pod
        end = end_of(pod, container)
        if end is not None and self.end is None:
            self.end = end
            self.ended.set()

    def deleted(self) -> None:
        """Mark the pod as deleted."""
        if self.end is None:
            self.end = PodEnd("the pod was deleted", "cancelled")
        self.ended.set()
        self.gone.set()


class PodWatch:
    """Follows the pods of one run.

    Args:
        cluster: Client of their cluster.
        selector: Label selector of these pods only.
        container: Name of the agent's container.
        place: Returns the place of a pod, or None.
        skips_ended: Whether a pod that has ended before it was seen alive is no host.

    Attributes:
        hosts: The pods that are hosts, by their places.
        present: Names of all existing pods, by uid.
        unplaced: Names of those without a place.
        failure: Why the API server has been unreachable for long, or refuses access; None otherwise.
    """

    def __init__(
        self,
        cluster: Cluster,
        selector: str,
        container: str,
        place: Callable[[Pod], int | None] | None = None,
        *,
        skips_ended: bool = False,
    ) -> None:
        self._place = place or place_of
        self._skips_ended = skips_ended
        self.hosts: dict[int, HostPod] = {}
        self.present: dict[str, str] = {}
        self.unplaced: dict[str, str] = {}
        self.failure: str | None = None
        self._cluster = cluster
        self._selector = selector
        self._container = container
        self._changed = trio.Event()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked after each change."""
        while not is_so():
            await self._changed.wait()

    async def run(self) -> None:
        """Follow the pods until cancelled."""
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
                if self.failure is None and (
                    error.status in (UNAUTHORIZED, FORBIDDEN) or silent > limits.KUBERNETES_SILENT_SECONDS
                ):
                    self.failure = str(error)
                    self.tell()
            await trio.sleep(limits.KUBERNETES_RETRY_SECONDS)

    def tell(self) -> None:
        """Let conditions be checked again."""
        self._changed.set()
        self._changed = trio.Event()

    def _listed(self, found: list[dict[str, Any]]) -> None:
        self.failure = None
        uids = {uid_of(pod) for pod in found}
        for pod in found:
            self._update(pod)
        for uid in [one for one in self.present if one not in uids]:
            self._delete(uid)
        self.tell()

    def _happened(self, kind: str, pod: Pod) -> None:
        if kind == "DELETED":
            self._update(pod)
            self._delete(uid_of(pod))
        elif kind in ("ADDED", "MODIFIED"):
            self._update(pod)
        self.tell()

    def _update(self, pod: Pod) -> None:
        place, uid = self._place(pod), uid_of(pod)
        self.present[uid] = name_of(pod)
        is_late = self._skips_ended and place not in self.hosts and end_of(pod, self._container) is not None
        if place is None:
            self.unplaced[uid] = name_of(pod)
        if place is None or is_late:
            return
        seen = self.hosts.get(place)
        if seen is None or (place == RELAY_PLACE and seen.end is not None):
            seen = self.hosts[place] = HostPod(pod)
        if seen.uid == uid:  # PW-1
            seen.update(pod, self._container)

    def _delete(self, uid: str) -> None:
        self.present.pop(uid, None)
        self.unplaced.pop(uid, None)
        for seen in self.hosts.values():
            if seen.uid == uid:
                seen.deleted()


# ---- status of a pod: does its agent live? ---------------------------------------------------------------------------

# A pod is a JSON value, as the API server writes it. It counts as ended unless it is known to live: unknown phases, a
# pod that is being deleted, and one whose node is unreachable count as ended.

Pod = Mapping[str, Any]
_NOTHING: Final[Mapping[str, Any]] = {}

_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_FIRST: Final = "trimesh-actors/first"
_RELAY: Final = "trimesh-actors/relay"
RELAY_PLACE: Final = -1
"""Place of the relay pod, which is no host."""

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
"""Reasons of a waiting container that only a change by its owner can end. A first failed pull is not one of them."""

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
"""Reasons in Kubernetes, of a pod, of its condition DisruptionTarget, or of a container, to reasons of `HostLost`."""


class PodEnd(msgspec.Struct, frozen=True):
    """End of a pod, past or imminent.

    Attributes:
        text: Reasons and messages of Kubernetes.
        reason: See `HostLost.reason`.
    """

    text: str
    reason: str


def name_of(pod: Pod) -> str:
    return str(_part(pod, "metadata").get("name", ""))


def uid_of(pod: Pod) -> str:
    """Return the uid of a pod, which differs also from that of a later pod of the same name."""
    return str(_part(pod, "metadata").get("uid", ""))


def place_of(pod: Pod) -> int | None:
    """Return the place of a pod among the pods of its run; None if it has no index.

    The place is the index in its Job, plus, for pods added later, the first place of that Job, which is a label.
    """
    metadata = _part(pod, "metadata")
    labels = _part(metadata, "labels")
    if _RELAY in labels:
        return RELAY_PLACE
    first = str(labels.get(_FIRST) or "0")
    index = str(labels.get(_INDEX) or _part(metadata, "annotations").get(_INDEX) or "")
    return int(first) + int(index) if first.isdecimal() and index.isdecimal() else None


def is_running(pod: Pod, container: str) -> bool:
    """Return whether the container of the agent runs."""
    return end_of(pod, container) is None and "running" in _state(pod, container)


def is_ready(pod: Pod) -> bool:
    """Return whether the readiness probe of a pod succeeds: its agent has joined."""
    return _condition(pod, "Ready").get("status") == "True"


def end_of(pod: Pod, container: str) -> PodEnd | None:
    """Return how a pod ended, or is being ended; None while it lives."""
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
    """Return why a container of a pod will never run, as Kubernetes reports it; None if all may run."""
    for one in _containers(pod):
        waiting = _part(_part(one, "state"), "waiting")
        if waiting.get("reason") in _HOPELESS:
            return f"container {one.get('name')}: {'; '.join(_said(waiting))}"
    return None


def waits_for(pod: Pod) -> str:
    """Return what a pod that does not run yet waits for, or "" if that is unknown."""
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
