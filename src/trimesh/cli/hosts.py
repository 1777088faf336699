"""`trimesh host`: what makes this machine a host of a mesh."""

from __future__ import annotations

import sys
from typing import Annotated, Final

from cyclopts import App, Parameter

from trimesh.errors import TrimeshError

app: Final = App(name="host", help="Make this machine a host of a mesh.", result_action="return_value")


def join(
    *addresses: str,
    token_file: Annotated[str, Parameter(name="--token-file", allow_leading_hyphen=True)],
    line: Annotated[int | None, Parameter(name="--line")] = None,
) -> int:
    """Join a program that expects hosts (`trimesh.jobs.open_door`), and serve it until it ends.

    Args:
        addresses: Of the program, host:port, tried in order.
        token_file: A file of mode 0600 with a token a line; - reads one from standard input.
        line: Which line of the file, from 0 on; else that of the rank that mpirun, srun, torchrun or SkyPilot has set.

    Exit codes: 0 the program, or a signal, has said stop; 77 it does not let this host join, or is not there; 1 else.
    """
    if not addresses:
        sys.stderr.write("trimesh host join needs the address of the program, as its door says it: host:port\n")
        return 2
    try:
        from trimesh.jobs.joining import join as join_here  # noqa: PLC0415 - the native library is loaded by it
    except TrimeshError as error:  # a package is missing
        sys.stderr.write(f"trimesh: {error}\n")
        return 2
    return join_here(addresses, token_file, line)


app.command(join)
