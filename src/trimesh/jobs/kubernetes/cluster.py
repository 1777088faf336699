"""Calls to the API server of a cluster, by kr8s: it reads the configuration of kubectl, or that of a pod."""

from __future__ import annotations

import importlib
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

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
CONFLICT: Final = 409
FORBIDDEN: Final = 403
GONE: Final = 410
NOT_FOUND: Final = 404


class ApiError(Exception):
    """The API server has refused a call, or it was not reached.

    Attributes:
        status: Of HTTP; 0 where no answer came.
    """

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Cluster:
    """One cluster, and one namespace in it. Made by `open_cluster`.

    Attributes:
        namespace: Where all objects of a run are.
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
        """Return what the API server says at a path that belongs to no namespace: "/version"."""
        text = await self._call("GET", base=path, version="", url="")
        return dict(json.loads(text))

    async def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Make an object, and return it as it then is.

        Raises:
            ApiError: With `CONFLICT` where one of its name is there.
        """
        version, plural = _PLURALS[manifest["kind"]]
        text = await self._call("POST", version=version, url=plural, content=json.dumps(manifest))
        return dict(json.loads(text))

    async def read(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object.

        Raises:
            ApiError: With `NOT_FOUND` where there is none.
        """
        version, plural = _PLURALS[kind]
        return dict(json.loads(await self._call("GET", version=version, url=f"{plural}/{name}")))

    async def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> None:
        """Merge a change into an object."""
        version, plural = _PLURALS[kind]
        url = f"{plural}/{name}"
        await self._call("PATCH", version=version, url=url, content=json.dumps(change), headers=_MERGE)

    async def delete(self, kind: str, name: str, uid: str, grace: int | None = None) -> None:
        """Delete an object and what it owns, if it is the one of this uid; returns before that has ended.

        `grace` are the seconds between SIGTERM and SIGKILL of a pod; None leaves them to the pod.

        Raises:
            ApiError: With `NOT_FOUND` where there is none, with `CONFLICT` where it is another one.
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
        """Return pods, and the version of that list."""
        found = json.loads(await self._call("GET", url="pods", params={"labelSelector": selector}))
        return list(found.get("items") or []), str(found["metadata"].get("resourceVersion", ""))

    async def changes(self, selector: str, since: str) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield what happens to pods from a version on: ("MODIFIED", pod); ends when the API server says so.

        Raises:
            ApiError: With `GONE` where the version is too old.
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
        """Return the last lines that a container has written; "" where they cannot be had."""
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
        response = getattr(error, "response", None)
        words = str(error) or type(error).__name__
        if response is None:
            return ApiError(0, f"the API server cannot be reached: {words}")
        return ApiError(int(response.status_code), words)


@asynccontextmanager
async def open_cluster(namespace: str | None) -> AsyncGenerator[Cluster, None]:
    """Reach the cluster of the current context of kubectl, or the one in which this program is a pod.

    Args:
        namespace: None takes that of the context, or of the pod.

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
    # An object of its own, not one that is shared by all of this thread: its connections belong to this Trio run.
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
    """Remove the files into which kr8s has written certificates and keys of a configuration that holds them itself."""
    user, cluster = auth._user, auth._cluster  # noqa: SLF001 - it leaves them in the folder of temporary files
    for said, key, attribute in (
        (user, "client-key-data", "client_key_file"),
        (user, "client-certificate-data", "client_cert_file"),
        (cluster, "certificate-authority-data", "server_ca_file"),
    ):
        path = getattr(auth, attribute)
        if key in said and path is not None:
            Path(path).unlink(missing_ok=True)
