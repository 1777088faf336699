"""How the processes of one mesh are started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trimesh._runtime.system.cpu_binding import Bind, CpuBinding
from trimesh.config import Settings
from trimesh.shape.extent import Point


class ProcOptions(msgspec.Struct, frozen=True):
    """How the processes of one mesh are started; see `HostMesh.spawn_procs`.

    Attributes:
        binding: What has come of `bind` on the machine that they start on.
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
