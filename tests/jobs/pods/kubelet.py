"""What runs the pods of tests: see `api_server`."""

from __future__ import annotations

import base64
import ctypes
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from tests.agent_copies import CopiedProcess
from tests.jobs.pods.cluster import BOOT, IMAGE, PYTHON, Object

if TYPE_CHECKING:
    from tests.jobs.pods.api_server import Server

COMMAND = "tests.jobs.pods.kubelet:trimesh"


def trimesh() -> None:
    """Be the command `trimesh` in a copy: a host that joins forks its spawner, as agents of a template do."""
    from trimesh.cli.main import main
    from trimesh.jobs import agent

    be_agent = agent.be_agent
    agent.be_agent = lambda *given, **said: be_agent(*given, **said, prepared=agent._forked())
    main()


class PodNet:
    """A network namespace for one pod at a time; without a path that of the API server.

    Attributes:
        address: Its address.
    """

    def __init__(self, path: str, address: str) -> None:
        self.path = path
        self.address = address

    @property
    def prefix(self) -> list[str]:
        """Arguments before a command that is to run there."""
        return ["nsenter", f"--net={self.path}", "--"] if self.path else []

    def serve(self, virtual: str, port: int) -> None:
        """Have the connections to the address of a Service."""
        rule = f"ip daddr {virtual} tcp dport {port} dnat to {self.address}:{port}"
        table = f"table ip service {{\nchain inward {{\ntype nat hook prerouting priority -100\n{rule}\n}}\n}}\n"
        for words, text in (
            (["ip", "addr", "replace", f"{virtual}/24", "dev", "eth0"], ""),
            (["nft", "-f", "-"], table),
        ):
            subprocess.run([*self.prefix, *words], input=text, text=True, check=True)

    def leave(self, virtual: str) -> None:
        """Have them no longer."""
        for words in (["ip", "addr", "del", f"{virtual}/24", "dev", "eth0"], ["nft", "delete table ip service"]):
            subprocess.run([*self.prefix, *words], check=True)

    def connect(self, port: int) -> socket.socket:
        """Connect to a port at its loopback address."""
        made = list[socket.socket | OSError]()

        def connect() -> None:
            try:
                if self.path:
                    fd = os.open(self.path, os.O_RDONLY)
                    ctypes.CDLL(None).setns(fd, 0x40000000)
                    os.close(fd)
                made.append(socket.create_connection(("127.0.0.1", port)))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=connect)  # whose namespace it changes
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]


class Kubelet:
    """What runs one pod."""

    def __init__(self, server: Server, pod: Object) -> None:
        self.server = server
        self.pod = pod
        self.name = pod["metadata"]["name"]
        self.folder = server.folder / self.name
        self.process: trio.Process | CopiedProcess | None = None
        self.deleted = trio.Event()
        self.starting = trio.Lock()
        self.grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
        self.reason = ""
        self.net = PodNet("", "127.0.0.1")
        self.virtual = set[str]()
        self.forwards = set[trio.SocketStream]()

    @property
    def status(self) -> Object:
        """Of the pod."""
        return self.pod["status"]

    def tell(self, **said: Any) -> None:
        """Change the status of the pod."""
        self.status.update(said)
        if ("pods", self.name) in self.server.objects:
            self.server.change("MODIFIED", "pods", self.pod)

    def condition(self, kind: str, status: str, reason: str = "", message: str = "") -> None:
        """Set a condition of the pod."""
        others = [one for one in self.status["conditions"] if one["type"] != kind]
        self.tell(conditions=[*others, {"type": kind, "status": status, "reason": reason, "message": message}])

    def container(self, state: Object) -> None:
        """Set the state of its container."""
        container = self.pod["spec"]["containers"][0]
        self.tell(containerStatuses=[{"name": container["name"], "image": container["image"], "state": state}])

    def disrupt(self, reason: str, message: str) -> None:
        """Say who ends the pod."""
        self.condition("DisruptionTarget", "True", reason, message)

    def delete(self, grace: int | None) -> None:
        """Begin to end the pod."""
        if grace is not None:
            self.grace = min(self.grace, grace)
        self.pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.tell()
        self.deleted.set()

    # what tests let happen

    def kill(self) -> None:
        """Kill its process, as something on its node may."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)

    def kill_below(self) -> None:
        """Kill the process below its first one."""
        assert self.process is not None
        pid = self.process.pid
        os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]), signal.SIGKILL)

    def oom(self) -> None:
        """Kill its process, as the kernel does."""
        self.reason = "OOMKilled"
        self.kill()

    def node(self) -> None:
        """Evict it by its kubelet, which tells only when it has ended."""
        self.tell_at_end = {"reason": "Evicted", "message": "The node was low on resource: memory."}
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def cut(self) -> None:
        """Break the forwards to it, as an API server does that is restarted."""
        for stream in list(self.forwards):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.socket.close()

    tell_at_end: Mapping[str, str] = {}

    # its life

    async def run(self) -> None:
        """Give it a place, pull its image, run it, end it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._live)
            await self.deleted.wait()
            async with self.starting:  # then there is a process, or none will be
                pass
            if self.process is not None:
                with trio.move_on_after(self.grace):
                    if self.process.returncode is None:
                        self.process.send_signal(signal.SIGTERM)
                    await self.process.wait()
                if self.process.returncode is None:
                    self.process.send_signal(signal.SIGKILL)
                await self.process.wait()
            nursery.cancel_scope.cancel()
        for virtual in self.virtual:
            self.net.leave(virtual)
        self.server.free(self.net)
        self.server.change("DELETED", "pods", self.pod)
        self.server.follow(self.pod)
        self.server.nursery.start_soon(self.server.expire, self.pod["metadata"]["ownerReferences"][0]["uid"])
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _live(self) -> None:
        while self.server.places < 1:
            if not self.status["conditions"]:
                words = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
                self.condition("PodScheduled", "False", "Unschedulable", words)
            await self.server.happened.wait()
        self.server.places -= 1
        self.condition("PodScheduled", "True")
        image = self.pod["spec"]["containers"][0]["image"]
        if image != IMAGE:
            message = f'failed to pull and unpack image "{image}": not found'
            self.container({"waiting": {"reason": "ErrImagePull", "message": message}})
            await trio.sleep(0.05)
            message = f'Back-off pulling image "{image}": ErrImagePull'
            self.container({"waiting": {"reason": "ImagePullBackOff", "message": message}})
            await trio.sleep_forever()
        await self._run_container()

    def route(self) -> None:
        """Lead the Services of which it is the pod to it."""
        for virtual, port in self._services():
            if virtual not in self.virtual:
                self.virtual.add(virtual)
                self.net.serve(virtual, port)

    def _services(self) -> list[tuple[str, int]]:
        """Return addresses and ports of the Services that lead to it, where pods have networks."""
        labels = self.pod["metadata"]["labels"].items()
        found = [one["spec"] for (plural, _), one in self.server.objects.items() if plural == "services"]
        mine = [one for one in found if one["clusterIP"] != "None" and one["selector"].items() <= labels]
        return [(one["clusterIP"], one["ports"][0]["port"]) for one in mine] if self.net.path else []

    async def _run_container(self) -> None:
        spec = self.pod["spec"]
        container = spec["containers"][0]
        self.mounts = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        for mount in container.get("volumeMounts", []):
            folder = self.folder / mount["name"]
            folder.mkdir(parents=True)
            self.mounts[mount["mountPath"]] = folder
        self.look()
        self.net = self.server.net()
        self.tell(podIP=self.net.address)
        self.route()
        env = {one["name"]: one["value"] if "value" in one else self._field(one) for one in container.get("env", [])}
        words = [self._expanded(word, env) for word in container["command"]]
        is_first, code = True, 1
        while not self.deleted.is_set() and (is_first or (code and spec["restartPolicy"] == "OnFailure")):
            with (self.folder / "log").open("wb") as log:
                async with self.starting:
                    self.process = await self._started(words, log.fileno(), {**os.environ, **env})
            self.container({"running": {}})
            self.tell(phase="Running")
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                if "readinessProbe" in container:
                    nursery.start_soon(self._probe, container["readinessProbe"]["exec"]["command"], env)
                code = await self.process.wait()
                nursery.cancel_scope.cancel()
            if code and spec["restartPolicy"] == "OnFailure" and not is_first and trio.current_time() - began < 2:
                message = f"back-off 10s restarting failed container={container['name']} pod={self.name}_ml"
                self.container({"waiting": {"reason": "CrashLoopBackOff", "message": message}})
                await trio.sleep(3)
            is_first = False
        terminated: Object = {"exitCode": 128 - code if code < 0 else code}
        terminated["reason"] = self.reason or ("Completed" if code == 0 else "Error")
        if code < 0:
            terminated["signal"] = -code
        self.status.update(self.tell_at_end, phase="Failed" if code or self.tell_at_end else "Succeeded")
        self.container({"terminated": terminated})
        self.server.nursery.start_soon(self.server.expire, self.pod["metadata"]["ownerReferences"][0]["uid"])

    def _field(self, variable: Object) -> str:
        assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}, variable
        return self.net.address

    async def _started(self, words: list[str], log: int, env: Mapping[str, str]) -> trio.Process | CopiedProcess:
        template = self.server.template
        if words[0] == "trimesh" and template is not None:
            return CopiedProcess(template.copy(COMMAND, (None, log, log), env, arguments=["-c", *words[1:]]))
        if words[0] == "trimesh":  # what the image has
            words[:1] = [sys.executable, "-c", os.environ.get(BOOT, "from trimesh.cli.main import main; main()")]
        if words[0] == "python3":
            words[0] = os.environ.get(PYTHON, sys.executable)
        return await trio.lowlevel.open_process(
            [*self.net.prefix, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )

    def _expanded(self, word: str, env: Mapping[str, str]) -> str:
        for name, value in env.items():
            word = word.replace(f"$({name})", value)
        for path, folder in self.mounts.items():
            word = word.replace(path, str(folder))
        return word

    async def _probe(self, command: list[str], env: Mapping[str, str]) -> None:
        words = [self._expanded(word, env) for word in command]
        while True:
            done = await trio.run_process(words, check=False, stderr=subprocess.DEVNULL)
            if done.returncode == 0:
                self.condition("Ready", "True")
                return
            await trio.sleep(0.1)

    def look(self) -> None:
        """Write the Secrets of its volumes as they are now."""
        for volume in self.pod["spec"].get("volumes", []):
            secret = volume.get("secret")
            path = self.folder / volume["name"]
            if secret is None or not path.is_dir():
                continue
            found = self.server.objects.get(("secrets", secret["secretName"]), {})
            for key, value in found.get("data", {}).items():
                new = path / f"..{key}"
                new.write_bytes(base64.b64decode(value))
                new.chmod(secret["defaultMode"])
                new.rename(path / key)

    def log(self) -> str:
        """Return what its container has written."""
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""
