"""A Kubernetes of its own for tests: an API server that is strict, and pods that are processes of this machine.

Objects are checked by the published schemas (`jobset_schema`). Run as a program it is the API server, the controllers
of JobSets and Jobs, the garbage collector and one kubelet. What differs from a cluster: a container is a process
without namespaces, in whose arguments the paths of its mounts are replaced by folders; Secrets are written again only
when their pod changes (a kubelet does that once a minute, too).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import h11
import trio
from tests.jobs.pods.cluster import KINDS, NAMESPACE, NETS, TOKEN, Object
from tests.jobs.pods.kubelet import Kubelet, PodNet
from tests.spawner_template import WARM, SpawnerTemplate
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping
from wsproto.utilities import LocalProtocolError

FORWARDS = "v4.channel.k8s.io"
POD = (
    "h11",
    "kr8s",
    "kubernetes_validate",
    "tests.jobs.pods.kubelet",
    "tests.jobs.sshd",
    "trimesh.jobs.agent",
    "trimesh.testing.plugin",
    "trimesh.testing.real",
)
"""What the module of the tests imports, and with it each process in a pod: half a second of a processor."""


class RefusedError(Exception):
    """What a call is answered with when it is refused."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": reason,
            "message": message,
            "code": code,
        }


class Server:
    """All objects of one namespace, and what is done about them."""

    def __init__(
        self, folder: Path, *, has_jobset: bool, nursery: trio.Nursery, template: SpawnerTemplate | None
    ) -> None:
        self.folder = folder
        self.has_jobset = has_jobset
        self.template = template
        self.nursery = nursery
        self.objects: dict[tuple[str, str], Object] = {}
        self.history: list[tuple[int, str, Object]] = []
        self.version = 0
        self.places = 1000
        self.ttl = 1e9
        self.forbid: list[list[str]] = []
        self.expired: list[str] = []
        self.happened = trio.Event()
        self.kubelets: dict[str, Kubelet] = {}
        self.nets = [PodNet(path, address) for path, address in json.loads(os.environ.get(NETS, "[]"))]
        self.virtual = 240

    def net(self) -> PodNet:
        """Take the first network that no pod has; without networks that of this process."""
        return self.nets.pop(0) if self.nets else PodNet("", "127.0.0.1")

    def free(self, net: PodNet) -> None:
        """Let the next pod have a network."""
        if net.path:
            self.nets = sorted([net, *self.nets], key=lambda one: one.address)

    def follow(self, pod: Object) -> None:
        """Make another pod for the Job of one that was deleted, as its controller does."""
        owner = pod["metadata"]["ownerReferences"][0]["uid"]
        for job in [one for (plural, _), one in self.objects.items() if plural == "jobs"]:
            if job["metadata"]["uid"] == owner and "completionMode" not in job["spec"]:
                self._of_job(job)

    def change(self, kind: str, plural: str, one: Object) -> Object:
        """Note that an object was ADDED, MODIFIED or DELETED, and return it."""
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        key = (plural, one["metadata"]["name"])
        if kind == "DELETED":
            del self.objects[key]
        else:
            self.objects[key] = one
        if plural == "pods":
            self.history.append((self.version, kind, json.loads(json.dumps(one))))
        self.happened.set()
        self.happened = trio.Event()
        return one

    def make(self, plural: str, one: Object) -> Object:
        """Add an object, and let what controls its kind begin."""
        one["metadata"].setdefault("namespace", NAMESPACE)
        one["metadata"]["uid"] = secrets.token_hex(8)
        if plural == "services" and "clusterIP" not in one["spec"]:
            self.virtual += 1
            one["spec"]["clusterIP"] = f"198.51.100.{self.virtual}"
        self.change("ADDED", plural, one)
        match plural:
            case "jobsets":
                self._of_jobset(one)
            case "jobs":
                self._of_job(one)
            case "services":
                for kubelet in self.kubelets.values():
                    kubelet.route()
            case "pods":
                name = one["metadata"]["name"]
                self.kubelets[name] = Kubelet(self, one)
                self.nursery.start_soon(self.kubelets[name].run)
        return one

    def _of_jobset(self, jobset: Object) -> None:
        name = jobset["metadata"]["name"]
        for replicated in jobset["spec"]["replicatedJobs"]:
            for number in range(replicated.get("replicas", 1)):
                template = json.loads(json.dumps(replicated["template"]))
                template["spec"]["template"]["spec"]["subdomain"] = name
                metadata = {**template.get("metadata", {}), "name": f"{name}-{replicated['name']}-{number}"}
                metadata["ownerReferences"] = [owner_of(jobset)]
                self.make(
                    "jobs", {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": template["spec"]}
                )
        service = {"clusterIP": "None", "selector": {"jobset.sigs.k8s.io/jobset-name": name}}
        metadata = {"name": name, "ownerReferences": [owner_of(jobset)]}
        self.make("services", {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service})

    def _of_job(self, job: Object) -> None:
        for index in range(job["spec"].get("completions", 1)):
            template = json.loads(json.dumps(job["spec"]["template"]))
            is_indexed = job["spec"].get("completionMode") == "Indexed"
            label = "batch.kubernetes.io/job-completion-index"
            labels = {**template["metadata"].get("labels", {}), **({label: str(index)} if is_indexed else {})}
            name = f"{job['metadata']['name']}-{f'{index}-' if is_indexed else ''}{secrets.token_hex(3)[:5]}"
            metadata = {**template["metadata"], "name": name, "labels": labels, "ownerReferences": [owner_of(job)]}
            for container in template["spec"]["containers"] if is_indexed else ():
                container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
            status = {"phase": "Pending", "conditions": []}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": status}
            self.make("pods", pod)

    def remove(self, plural: str, name: str, *, grace: int | None = None) -> None:
        """Delete an object, and what it owns."""
        one = self.objects[plural, name]
        if plural == "pods":
            self.kubelets[name].delete(grace)
            return
        self.change("DELETED", plural, one)
        for owned_plural, owned in list(self.objects):
            if owners_of(self.objects[owned_plural, owned]) == [one["metadata"]["uid"]]:
                self.remove(owned_plural, owned)

    async def expire(self, uid: str) -> None:
        """Delete what has an uid once all its pods have ended, after the time that it says, or `ttl`."""
        found = [key for key, one in self.objects.items() if one["metadata"]["uid"] == uid]
        if not found:
            return
        (plural, name) = found[0]
        owner = self.objects[plural, name]["metadata"].get("ownerReferences")
        if owner:
            await self.expire(owner[0]["uid"])
            return
        jobs = {one["metadata"]["uid"] for one in self.objects.values() if owners_of(one) == [uid]}
        pods = [one for (kind, _), one in self.objects.items() if kind == "pods" and {uid, *jobs} & {*owners_of(one)}]
        if all(one["status"]["phase"] in ("Succeeded", "Failed") for one in pods):
            await trio.sleep(min(self.ttl, self.objects[plural, name]["spec"]["ttlSecondsAfterFinished"]))
            if (plural, name) in self.objects:
                self.remove(plural, name)

    # ---- calls -----------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Any:
        """Return what a call is answered with, as a value of JSON, or as text."""
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if not token.startswith(TOKEN) or token in self.expired:
            raise RefusedError(401, "Unauthorized", "Unauthorized")
        parts = path.strip("/").split("/")
        said = json.loads(body) if body else {}
        match method, parts:
            case "GET", ["version"]:
                return {"major": "1", "minor": "33+", "gitVersion": "v1.33.1-fake"}
            case "GET", ["apis", "jobset.x-k8s.io", "v1alpha2"] if self.has_jobset:
                return {"kind": "APIResourceList", "resources": [{"name": "jobsets", "kind": "JobSet"}]}
            case "GET", ["fake"]:
                return {"has_jobset": self.has_jobset}
            case "POST", ["fake"]:
                for name, value in said.items():
                    setattr(self, name, value)
                self.happened.set()
                self.happened = trio.Event()
                return {}
            case "POST", ["fake", pod, action]:
                getattr(self.kubelets[pod], action)()
                return {}
        group = parts[1:3] if parts[0] == "apis" else parts[1:2]
        rest = parts[len(group) + 1 :]
        if len(rest) < 3 or rest[0] != "namespaces" or rest[2] not in KINDS or "/".join(group) != KINDS[rest[2]][1]:
            raise RefusedError(404, "NotFound", "the server could not find the requested resource")
        if rest[2] == "jobsets" and not self.has_jobset:
            raise RefusedError(404, "NotFound", "the server could not find the requested resource")
        if [method, rest[2]] in self.forbid:
            what = f'{rest[2]} is forbidden: User "u" cannot {method.lower()} resource "{rest[2]}"'
            raise RefusedError(403, "Forbidden", what)
        if rest[1] != NAMESPACE:
            raise RefusedError(404, "NotFound", f'namespaces "{rest[1]}" not found')
        return self._of_kind(method, rest[2], rest[3:], headers, said)

    def _of_kind(  # noqa: C901 - a table
        self, method: str, plural: str, rest: list[str], headers: Mapping[str, str], said: Any
    ) -> Any:
        kind, version = KINDS[plural]
        wanted = "application/merge-patch+json" if method == "PATCH" else "application/json"
        if said and headers.get("content-type") != wanted:
            raise RefusedError(415, "UnsupportedMediaType", f"{method} needs {wanted}")
        if rest and (plural, rest[0]) not in self.objects:
            raise RefusedError(404, "NotFound", f'{plural} "{rest[0]}" not found')
        one = self.objects[plural, rest[0]] if rest else {}
        match method, rest:
            case "GET", []:
                items = [value for (found, _), value in self.objects.items() if found == plural]
                return {"kind": f"{kind}List", "metadata": {"resourceVersion": str(self.version)}, "items": items}
            case "POST", []:
                return self._posted(kind, version, plural, said)
            case "GET", [_]:
                return one
            case "GET", [name, "log"] if plural == "pods":
                return self.kubelets[name].log()
            case "POST", [name, "eviction"] if plural == "pods":
                self.kubelets[name].disrupt("EvictionByEvictionAPI", "Eviction API: evicting")
                self.remove("pods", name)
                return {"kind": "Status", "status": "Success"}
            case "PATCH", [name]:
                merge(one, said)
                self.change("MODIFIED", plural, one)
                if plural == "pods":
                    self.kubelets[name].look()
                return one
            case "DELETE", [name]:
                uid = said.get("preconditions", {}).get("uid")
                if uid is not None and uid != one["metadata"]["uid"]:
                    raise RefusedError(409, "Conflict", f"the UID in the precondition ({uid}) does not match")
                if said.get("propagationPolicy") != "Background":
                    raise RefusedError(422, "Invalid", "Jobs would leave their pods")
                self.remove(plural, name, grace=said.get("gracePeriodSeconds"))
                return one
        raise RefusedError(405, "MethodNotAllowed", f"{method} is not supported")

    def _posted(self, kind: str, version: str, plural: str, said: Object) -> Object:
        from tests.jobs.pods.jobset_schema import check_manifest

        if (said.get("kind"), said.get("apiVersion")) != (kind, version):
            raise RefusedError(400, "BadRequest", f"the object is no {kind} of {version}")
        try:
            check_manifest(said, "1.33")
        except Exception as error:
            raise RefusedError(
                422, "Invalid", f'{kind} "{said["metadata"].get("name")}" is invalid: {error}'
            ) from error
        name = said["metadata"]["name"]
        if (plural, name) in self.objects:
            raise RefusedError(409, "AlreadyExists", f'{plural} "{name}" already exists')
        return self.make(plural, said)


def owner_of(one: Object) -> Object:
    """Return the reference of what an object owns."""
    metadata = one["metadata"]
    found = {"apiVersion": one["apiVersion"], "kind": one["kind"], "name": metadata["name"], "uid": metadata["uid"]}
    return {**found, "controller": True}


def owners_of(one: Object) -> list[str]:
    """Return the uids of what owns an object."""
    return [owner["uid"] for owner in one["metadata"].get("ownerReferences", [])]


def merge(one: Object, change: Object) -> None:
    """Merge a change as RFC 7396 says."""
    for key, value in change.items():
        if value is None:
            one.pop(key, None)
        elif isinstance(value, dict):
            merge(one.setdefault(key, {}), value)
        else:
            one[key] = value


async def serve_connection(server: Server, stream: trio.SocketStream) -> None:
    """Serve one connection."""
    connection = h11.Connection(h11.SERVER)

    async def next_event() -> Any:
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(65536))
        return event

    async def send(code: int, body: bytes, kind: bytes) -> None:
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        data = connection.send(h11.Response(status_code=code, headers=headers)) or b""
        data += connection.send(h11.Data(data=body)) or b""
        await stream.send_all(data + (connection.send(h11.EndOfMessage()) or b""))

    async with stream:
        while True:
            request = await next_event()
            if not isinstance(request, h11.Request):
                return
            body = b""
            while isinstance(event := await next_event(), h11.Data):
                body += event.data
            target = urlsplit(request.target.decode())
            query = {key: values[0] for key, values in parse_qs(target.query).items()}
            headers = {key.decode().lower(): value.decode() for key, value in request.headers}
            if target.path.endswith("/portforward"):
                await forward(server, request, target.path, query, headers, stream, send)
                return
            if query.get("watch") == "true":
                await watch(server, connection, stream, query)
                return
            try:
                found = server.answer(request.method.decode(), target.path, headers, body)
            except RefusedError as error:
                await send(error.code, json.dumps(error.status).encode(), b"application/json")
            else:
                is_text = isinstance(found, str)
                data = found.encode() if is_text else json.dumps(selected(found, query)).encode()
                await send(200, data, b"text/plain" if is_text else b"application/json")
            if connection.our_state is h11.MUST_CLOSE:
                return
            connection.start_next_cycle()


async def forward(
    server: Server,
    request: h11.Request,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    stream: trio.SocketStream,
    send: Callable[[int, bytes, bytes], Awaitable[None]],
) -> None:
    """Forward one port of a pod by a WebSocket, as kubelets and containerd do: `v4.channel.k8s.io`."""
    name = path.split("/")[-2]
    try:
        if ["GET", "pods/portforward"] in server.forbid:
            words = f'pods "{name}" is forbidden: User "u" cannot get resource "pods/portforward" in API group ""'
            raise RefusedError(403, "Forbidden", words)
        pod = server.answer(request.method.decode(), path.removesuffix("/portforward"), headers, b"")
        if "podIP" not in pod["status"]:
            raise RefusedError(400, "BadRequest", f"pod {name} does not have a host assigned")
        if request.method != b"GET" or set(query) != {"ports"} or not 0 < int(query["ports"]) < 65536:
            raise RefusedError(400, "BadRequest", f"a forward needs GET and ports, got {request.method!r} {query}")
        wanted = {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-version": "13"}
        if not wanted.items() <= {key: value.lower() for key, value in headers.items()}.items():
            raise RefusedError(400, "BadRequest", "unable to upgrade: the request is no WebSocket's")
        offered = headers.get("sec-websocket-protocol", "").replace(" ", "").split(",")
        if FORWARDS not in offered:
            raise RefusedError(400, "BadRequest", f"unable to upgrade: no protocol of {offered} is {FORWARDS}")
    except RefusedError as error:
        await send(error.code, json.dumps(error.status).encode(), b"application/json")
        return
    digest = hashlib.sha1(f"{headers['sec-websocket-key']}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
    lines = (
        "HTTP/1.1 101 Switching Protocols",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}",
        f"Sec-WebSocket-Protocol: {FORWARDS}",
    )
    await stream.send_all("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    try:
        await carry(server.kubelets[name], int(query["ports"]), stream)
    except* (trio.BrokenResourceError, trio.ClosedResourceError, LocalProtocolError):
        pass


async def carry(kubelet: Kubelet, port: int, stream: trio.SocketStream) -> None:
    """Connect a WebSocket with a port of a pod: channel 0 is that of data, channel 1 that of an error."""
    websocket = Connection(ConnectionType.SERVER)

    async def write(channel: int, data: bytes) -> None:
        await stream.send_all(websocket.send(BytesMessage(bytes((channel,)) + data)))

    for channel in (0, 1):
        await write(channel, struct.pack("<H", port))
    try:
        found = kubelet.net.connect(port)
    except OSError as error:
        await write(1, f"error forwarding port {port} to pod {kubelet.name}: {error}".encode())
    else:
        there = trio.SocketStream(trio.socket.from_stdlib_socket(found))
        kubelet.forwards.add(stream)
        try:
            async with there, trio.open_nursery() as nursery:

                async def back() -> None:
                    async for data in there:
                        await write(0, bytes(data))
                    nursery.cancel_scope.cancel()

                nursery.start_soon(back)
                await read_messages(websocket, stream, there)
                nursery.cancel_scope.cancel()
        finally:
            kubelet.forwards.discard(stream)
    await stream.send_all(websocket.send(CloseConnection(1000)))


async def read_messages(websocket: Connection, stream: trio.SocketStream, there: trio.SocketStream) -> None:
    """Write to a pod what a client sends, until it closes."""
    message = b""
    while data := await stream.receive_some(65536):
        websocket.receive_data(data)
        for event in websocket.events():
            match event:
                case Ping():
                    await stream.send_all(websocket.send(event.response()))
                case BytesMessage():
                    message += event.data
                    if event.message_finished:
                        if message[:1] != b"\0":
                            return  # a client writes to the channel of data only
                        await there.send_all(message[1:])
                        message = b""
                case _:
                    return


def selected(found: Any, query: Mapping[str, str]) -> Any:
    """Return a list with the objects only that have the labels that were asked for."""
    if "labelSelector" not in query:
        return found
    items = [one for one in found["items"] if fits(one, query["labelSelector"])]
    return {**found, "items": items}


def fits(one: Object, selector: str) -> bool:
    """Tell whether an object has all labels of a selector."""
    labels = one["metadata"].get("labels", {})
    wanted = [part.partition("=") for part in selector.split(",")]
    return all(labels.get(key) == value for key, _, value in wanted)


async def watch(server: Server, connection: Any, stream: trio.SocketStream, query: Mapping[str, str]) -> None:
    """Send what happens to pods, from a version on."""
    headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    await stream.send_all(connection.send(h11.Response(status_code=200, headers=headers)))
    since = int(query["resourceVersion"])
    with trio.move_on_after(float(query["timeoutSeconds"])):
        while True:
            happened = server.happened
            for version, kind, pod in server.history:
                if version > since and fits(pod, query["labelSelector"]):
                    line = json.dumps({"type": kind, "object": pod}) + "\n"
                    await stream.send_all(connection.send(h11.Data(data=line.encode())))
            since = max(since, server.version)
            await happened.wait()
    await stream.send_all(connection.send(h11.EndOfMessage()))


async def main(folder: Path, *, has_jobset: bool, are_copies: bool) -> None:
    """Serve until standard input is closed."""
    template = SpawnerTemplate(os.environ, (*WARM, *POD)) if are_copies else None
    async with trio.open_nursery() as nursery:
        server = Server(folder, has_jobset=has_jobset, nursery=nursery, template=template)

        async def serve(stream: trio.SocketStream) -> None:
            try:
                await serve_connection(server, stream)
            except (trio.BrokenResourceError, h11.RemoteProtocolError):
                pass

        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        print(f"http://127.0.0.1:{listener.socket.getsockname()[1]}", flush=True)
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            while await stdin.receive_some():
                pass
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(lambda: main(Path(sys.argv[1]), has_jobset=bool(sys.argv[2]), are_copies=bool(sys.argv[3])))
