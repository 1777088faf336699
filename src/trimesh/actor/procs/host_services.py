"""What the methods of a mesh of hosts do beside spawning, as packages above this floor provide it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trimesh._runtime.life import JobHosts
    from trimesh.actor.host_mesh import HostMesh
    from trimesh.shape.output_line import OutputLine
    from trimesh.shape.value_mesh import ValueMesh


class HostServices(Protocol):
    """What the methods of a mesh of hosts do beside spawning; see those of `HostMesh`."""

    async def run(
        self,
        hosts: HostMesh,
        command: Sequence[str | os.PathLike[str]],
        *,
        output: Callable[[OutputLine], object] | None,
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
        check: bool,
        grace: float | None,
    ) -> ValueMesh[int]:
        """Run a command on each host."""
        ...

    def forward(self, hosts: HostMesh, local: int, remote: int | str) -> AbstractAsyncContextManager[Forwarded]:
        """Let a port of this machine lead to one of a host."""
        ...

    async def shell(
        self,
        hosts: HostMesh,
        command: Sequence[str | os.PathLike[str]] | None,
        *,
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
        terminal: str | os.PathLike[str] | None,
    ) -> int:
        """Run a shell on a host."""
        ...

    def sync(
        self,
        hosts: HostMesh,
        job: JobHosts | None,
        paths: Sequence[str | os.PathLike[str]],
        exclude: Sequence[str],
        *,
        watch: bool,
    ) -> AbstractAsyncContextManager[Synced]:
        """Bring code to the hosts."""
        ...

    def install(
        self, hosts: HostMesh, job: JobHosts | None, file: str | os.PathLike[str]
    ) -> AbstractAsyncContextManager[Installed]:
        """Make the environment of a file of requirements on the hosts."""
        ...


class Forwarded(Protocol):
    """A port of this machine that leads to one of a host, while its block is open.

    Attributes:
        port: Number of the port on 127.0.0.1.
        connections: How many are open.
        failures: The last reasons why the host could not connect to its service.
    """

    port: int
    connections: int
    failures: deque[str]

    @property
    def address(self) -> str:
        """Where it listens, as `127.0.0.1:8888`."""
        ...


class Synced(Protocol):
    """Code of the program on hosts, while its block is open; see `HostMesh.sync`.

    Attributes:
        version: How often it has changed there: 1 when the block is entered.
        digest: Of names and contents.
        files: How many there are.
        sent_bytes: Of contents, sent for this version.
    """

    version: int
    digest: str
    files: int
    sent_bytes: int

    async def update(self) -> bool:
        """Bring what has changed since; return whether anything had. A checkpoint, cancellable."""
        ...


class Installed(Protocol):
    """Packages on hosts, while their block is open; see `HostMesh.install`.

    Attributes:
        digest: Of the file, and what it takes in.
        made: On how many hosts it was made; the others had it.
    """

    digest: str
    made: int
