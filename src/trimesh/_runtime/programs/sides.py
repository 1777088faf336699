"""What two programs tell each other of themselves before anything else, and whether they fit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trimesh._native.lib import ABI_VERSION
from trimesh._runtime.spawner import wire
from trimesh.errors import ConnectError
from trimesh.ids import ProcId


def side_of(*, pickled: bool, proc_id: ProcId) -> wire.Side:
    """Return what this program says of itself."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - few programs need it

    try:
        own = version("trimesh-actors")
    except PackageNotFoundError:  # run from its sources
        own = "unknown"
    return wire.Side(
        trimesh=own,
        protocol=ABI_VERSION,
        python=f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}",
        pickle="on" if pickled else "off",
        pid=os.getpid(),
        program=Path(sys.argv[0] or "python").name,
        proc_id=proc_id,
    )


def check_fit(ours: wire.Side, theirs: wire.Side) -> None:
    """Refuse a program whose messages this one could not read, or must not.

    Raises:
        ConnectError: They differ; both are named.
    """
    for what, own, other in (
        ("the same version of trimesh", (ours.trimesh, ours.protocol), (theirs.trimesh, theirs.protocol)),
        ("the same Python", ours.python, theirs.python),
        ("the same pickle=", ours.pickle, theirs.pickle),
    ):
        if own != other:
            raise ConnectError(
                f"programs that connect must have {what}: {_name(ours)} has {_text(own)}, "
                f"{_name(theirs)} has {_text(other)}"
            )


def _name(side: wire.Side) -> str:
    return f"{side.program} (pid {side.pid})"


def _text(value: str | tuple[str, int]) -> str:
    return value if isinstance(value, str) else f"{value[0]} (protocol {value[1]})"
