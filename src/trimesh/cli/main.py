"""Entry point of the command `trimesh`; names the package to install if the extra `cli` is missing."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Run the command with the arguments of the process, and exit with its code."""
    _open_streams()
    try:
        from trimesh.cli.commands import run  # noqa: PLC0415 - what it needs may be missing
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("cyclopts", "rich"):
            raise
        sys.stderr.write(f"the command trimesh needs the package {error.name}: pip install 'trimesh-actors[cli]'\n")
        sys.exit(2)
    sys.exit(run(sys.argv[1:]))


def _open_streams() -> None:
    """Make standard output take every text: where it was closed at the start, or its encoding has few characters.

    Standard error writes escapes for those by itself.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process
    stdout: object = sys.stdout
    if isinstance(stdout, io.TextIOWrapper):
        stdout.reconfigure(errors="backslashreplace")
