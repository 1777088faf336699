"""How the processes of one mesh are started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trimesh.config import Settings
from trimesh.shape.point import Point


class ProcOptions(msgspec.Struct, frozen=True):
    """How the processes of one mesh are started; see `HostMesh.spawn_procs`."""

    env: Mapping[str, str] | Callable[[Point], Mapping[str, str]] | None = None
    setup: Callable[[], Any] | None = None
    python: str | None = None
    preload: tuple[str, ...] = ()
    grace: float = Settings().grace
    output: Any = "forward"
    seed: int | None = None
    pickled: bool | None = None
    rendezvous: bool = False
    settings: Settings = Settings()
