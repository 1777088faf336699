"""Where synchronized files are, as a process sees it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from trimesh.jobs.code.manifest import is_inside

VARIABLE: Final = "TRIMESH_SYNCED"
"""Of the environment of processes and commands on a host: the folder of its tree."""


def synced(path: str | os.PathLike[str]) -> Path:
    """Return where a file or folder is that was given to `hosts.sync`: on a host its copy, elsewhere the path itself.

    So one line works in the program, on a laptop and on a host: `synced("configs") / "small.yaml"`.

    Args:
        path: Relative, as given to `hosts.sync`, or below what was. What was outside of the working directory there
            has its last name.

    Raises:
        ValueError: On a host: the path is absolute, or leads out of the tree.

    Blocking: never; it looks at no file.
    """
    root = os.environ.get(VARIABLE, "")
    if not root:
        return Path(path)
    name = os.path.normpath(path)
    if name != "." and not is_inside(name):
        raise ValueError(f"synced() takes a relative path as `hosts.sync` was given it, got {os.fspath(path)!r}")
    return Path(root, name)
