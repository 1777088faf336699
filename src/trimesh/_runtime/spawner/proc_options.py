"""Launch options of the processes of one mesh.

They are apart from the records of the spawner, which a program that starts no process does not import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from trimesh._runtime.system.cpu_binding import Bind, CpuBinding
from trimesh.config import Settings
from trimesh.shape.extent import Point


class Shares(Protocol):
    """Shares that a placement has reserved for the processes of one mesh, by rank.

    Attributes:
        count: Number of shares.
    """

    count: int

    def request(self, request: Any) -> Any:
        """Return the launch request of a process with its share, or with the function that adds it."""
        ...

    def has_gpus(self, rank: int) -> bool:
        """Return whether a process gets GPUs, so that it sees no others."""
        ...

    def release(self) -> None:
        """Note that the mesh has ended. Idempotent."""


class ProcOptions(msgspec.Struct, frozen=True):
    """Launch options of the processes of one mesh; see `HostMesh.spawn_procs`.

    Attributes:
        binding: CPU binding, resolved from `bind` on the machine that they start on.
        shares: Shares of the host that a placement has reserved for them.
    """

    env: Mapping[str, str] | Callable[[Point], Mapping[str, str]] | None = None
    setup: Callable[[], Any] | None = None
    python: str | None = None
    preload: tuple[str, ...] = ()
    grace: float = Settings().grace
    output: Any = "forward"
    seed: int | None = None
    pickled: bool | None = None
    rendezvous: bool = False
    shared: bool = False
    bind: Bind | None = None
    binding: CpuBinding | None = None
    settings: Settings = Settings()
    shares: Shares | None = None
