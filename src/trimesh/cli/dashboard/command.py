"""The command: starts the server in this process, and says where it is."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import trio
from cyclopts import Parameter

from trimesh import limits
from trimesh.cli.dashboard.source import RunSource


def dashboard(
    *,
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
    port: Annotated[int, Parameter(name="--port")] = 0,
    prefix: Annotated[str, Parameter(name="--prefix")] = "",
    allow_host: Annotated[tuple[str, ...], Parameter(name="--allow-host", negative="")] = (),
    every: Annotated[float, Parameter(name="--every")] = limits.PAGE_SECONDS,
) -> int:
    """Serve a page on a run at 127.0.0.1: meshes, calls, who waits for whom, time lines, failures, logs, stacks.

    It prints an address with a token, which lets one browser in; another browser gets the address that is printed next.
    From another machine: `ssh -L 8787:127.0.0.1:8787 HOST`, with `--port 8787` here. It runs until Ctrl-C, also after
    the run has ended. It needs starlette and anycorn: pip install 'trimesh-actors[dashboard]'.

    Args:
        pid: Of the controller.
        port: At which it listens; 0 for a free one.
        prefix: Of all its paths, for a proxy that serves it below one: `--prefix /runs/train`.
        allow_host: A name under which such a proxy makes it available.
        every: Seconds between two looks at the run, at least 0.1.

    Exit codes: 0 it was ended by Ctrl-C, 1 a package is missing, 2 it was called wrongly, or the port is taken, 3 there
    is no run.
    """
    try:
        from trimesh.cli.dashboard.serving import PageServer, checked_prefix  # noqa: PLC0415 - packages are an extra
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("anycorn", "starlette"):
            raise
        sys.stderr.write("trimesh: dashboard needs starlette and anycorn: pip install 'trimesh-actors[dashboard]'\n")
        return 1
    logging.basicConfig(level=logging.WARNING)
    source = RunSource(pid)

    def say() -> None:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()

    try:
        every = max(every, limits.TOP_SECONDS_MIN)
        server = PageServer(
            source, port=port, prefix=checked_prefix(prefix), hosts=allow_host, every=every, on_used=say
        )
        say()
        trio.run(server.run_until_signal)
    except (ValueError, OSError, OverflowError) as error:
        sys.stderr.write(f"trimesh: {error}\n")
        return 2
    finally:
        source.close()
    return 0
