"""What runs the pods of tests: see `api_server`."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import trio
from tests.agent_copies import CopiedProcess
from tests.jobs.pods.cluster import BOOT, IMAGE, Object

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

    def oom(self) -> None:
        """Kill its process, as the kernel does."""
        self.reason = "OOMKilled"
        self.kill()

    def node(self) -> None:
        """Evict it by its kubelet, which tells only when it has ended."""
        self.tell_at_end = {"reason": "Evicted", "message": "The node was low on resource: memory."}
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

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
        self.server.change("DELETED", "pods", self.pod)
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

    async def _run_container(self) -> None:
        spec = self.pod["spec"]
        container = spec["containers"][0]
        self.mounts = {}
        for mount in container["volumeMounts"]:
            folder = self.folder / mount["name"]
            folder.mkdir(parents=True)
            self.mounts[mount["mountPath"]] = folder
        self.look()
        env = {one["name"]: one["value"] for one in container.get("env", [])}
        words = [self._expanded(word, env) for word in container["command"]]
        with (self.folder / "log").open("wb") as log:
            async with self.starting:
                self.process = await self._started(words, log.fileno(), {**os.environ, **env})
        self.container({"running": {}})
        self.tell(phase="Running")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._probe, container["readinessProbe"]["exec"]["command"], env)
            code = await self.process.wait()
            nursery.cancel_scope.cancel()
        terminated: Object = {"exitCode": 128 - code if code < 0 else code}
        terminated["reason"] = self.reason or ("Completed" if code == 0 else "Error")
        if code < 0:
            terminated["signal"] = -code
        self.status.update(self.tell_at_end, phase="Failed" if code or self.tell_at_end else "Succeeded")
        self.container({"terminated": terminated})
        self.server.nursery.start_soon(self.server.expire, self.pod["metadata"]["ownerReferences"][0]["uid"])

    async def _started(self, words: list[str], log: int, env: Mapping[str, str]) -> trio.Process | CopiedProcess:
        template = self.server.template
        if words[0] == "trimesh" and template is not None:
            return CopiedProcess(template.copy(COMMAND, (None, log, log), env, arguments=["-c", *words[1:]]))
        if words[0] == "trimesh":  # what the image has
            words[:1] = [sys.executable, "-c", os.environ.get(BOOT, "from trimesh.cli.main import main; main()")]
        return await trio.lowlevel.open_process(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
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
