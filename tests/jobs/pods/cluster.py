"""A Kubernetes for tests, as they see it: see `api_server`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Object = dict[str, Any]
ROOT = Path(__file__).parents[3]
TOKEN = "token-of-the-user"
IMAGE = "example.org/trimesh:test"
NAMESPACE = "ml"
BOOT = "TRIMESH_TEST_POD_BOOT"
"""Variable of the API server: what its pods run in place of the command of their image."""

NETS = "TRIMESH_TEST_POD_NETS"
"""Variable of the API server: paths and addresses of the network namespaces of its pods, as JSON."""
PYTHON = "TRIMESH_TEST_POD_PYTHON"
"""Variable of the API server: the `python3` of its pods."""

KINDS = {
    "jobsets": ("JobSet", "jobset.x-k8s.io/v1alpha2"),
    "jobs": ("Job", "batch/v1"),
    "services": ("Service", "v1"),
    "secrets": ("Secret", "v1"),
    "pods": ("Pod", "v1"),
}
SERVER = "tests.jobs.pods.api_server"


def missing() -> str | None:
    """Return why no such Kubernetes can be run here, or None."""
    for module in ("kr8s", "kubernetes_validate", "h11"):
        try:
            __import__(module)
        except ImportError as error:
            return str(error)
    return None


class FakeKubernetes:
    """A running API server, as tests see it.

    Its pods are executed; or, with `are_copies`, forked from a process that has imported what they do.

    Attributes:
        config: A configuration of kubectl for it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        has_jobset: bool = True,
        env: Mapping[str, str] | None = None,
        are_copies: bool = False,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._env = dict(env or {})
        options = ["jobset" if has_jobset else "", "copies" if are_copies else ""]
        self._command = [sys.executable, "-m", SERVER, str(folder), *options]
        self.config = folder / "config"
        self.url = ""
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        env |= self._env
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=env)
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()
        if not self.url:
            raise RuntimeError("the API server did not start")
        context = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "contexts": [{"name": "x", "context": context}],
            "current-context": "x",
        }
        self.config.write_text(json.dumps(config))
        return process

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call the API server as another user of it does."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {TOKEN}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    def control(self, **said: Any) -> None:
        """Say how it behaves: `places` for pods; `forbid`, methods and kinds; `expired` tokens; `ttl`, seconds."""
        self.call("POST", "/fake", said)

    def listed(self, plural: str) -> list[Object]:
        """Return the objects of a kind."""
        return list(self.call("GET", f"{_base(plural)}/namespaces/{NAMESPACE}/{plural}")["items"])

    def everything(self) -> list[str]:
        """Return what is there, as kind and name."""
        there = [plural for plural in KINDS if plural != "jobsets" or self.call("GET", "/fake")["has_jobset"]]
        return [f"{plural}/{one['metadata']['name']}" for plural in there for one in self.listed(plural)]

    def named(self, plural: str) -> list[str]:
        """Return the names of the objects of a kind."""
        return [one["metadata"]["name"] for one in self.listed(plural)]

    def running(self) -> int:
        """Return how many pods run."""
        return [one["status"]["phase"] for one in self.listed("pods")].count("Running")

    def pod(self, index: int) -> Object:
        """Return the pod of an index."""
        label = "batch.kubernetes.io/job-completion-index"
        return next(one for one in self.listed("pods") if one["metadata"]["labels"].get(label) == str(index))

    def on_pod(self, index: int, action: str, body: Any = None) -> Any:
        """Post to a pod of an index: `eviction` of the API, `kill`, `oom` and `node` of the fake."""
        name = self.pod(index)["metadata"]["name"]
        if action == "eviction":
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
            return self.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction", body)
        return self.call("POST", f"/fake/{name}/{action}", body)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def _base(plural: str) -> str:
    version = KINDS[plural][1]
    return f"/apis/{version}" if "/" in version else f"/api/{version}"
