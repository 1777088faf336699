r"""`trimesh dashboard`: a web page that shows a run, served by a process of its own.

    control socket --RunSource (threads)--> PageFeed --Board--> one event a second --> browsers
                                                  \-- details, stacks, logs, time lines on request

DX-1 Every served request has passed the guard: a name of this machine, the same origin, a token or a cookie (`site`).
DX-2 Data sent to a browser is bounded by `limits.PAGE_*`, however large the run: a mesh is a text of one letter a rank.
DX-3 Every text of the run passes `clean` (`detail`), which escapes terminal control characters and characters that
     change the reading direction. None of it becomes markup: the page makes text nodes only, and a policy enforces it.
DX-4 The run is polled only while a browser follows, one query at a time.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import trio
from cyclopts import Parameter

from trimesh import limits
from trimesh.cli.members import seconds_of


def dashboard(
    *,
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
    port: Annotated[int, Parameter(name="--port")] = 0,
    prefix: Annotated[str, Parameter(name="--prefix")] = "",
    allow_host: Annotated[tuple[str, ...], Parameter(name="--allow-host", negative="")] = (),
    every: Annotated[float, Parameter(name="--every")] = limits.PAGE_SECONDS,
) -> int:
    """Serve a web page on a run at 127.0.0.1: meshes, calls, wait graph, time lines, failures, logs, stacks.

    If several runs live, or none does and dead ones have left flight records, the page begins with the list of runs.

    Prints an address with a token, which admits one browser; another browser needs the address printed next.
    From another machine: `ssh -L 8787:127.0.0.1:8787 HOST`, with `--port 8787` here. Runs until Ctrl-C, even after the
    run has ended. It needs starlette and anycorn: pip install 'trimesh-actors[dashboard]'.

    Args:
        pid: Process id of the controller; otherwise the only living run, else the list.
        port: Port to listen at; 0 takes a free one.
        prefix: Prefix of all paths of the page, for a proxy that serves it there: `--prefix /runs/train`.
        allow_host: Host name under which such a proxy serves the page; can be repeated.
        every: Polling interval in seconds, at least 0.1.

    Exit codes: 0 ended by Ctrl-C, 1 a package is missing, 2 wrong usage, or the port is taken, 3 there is no run.
    """
    try:
        from trimesh.cli.dashboard.runs import first_run  # noqa: PLC0415 - as below
        from trimesh.cli.dashboard.site import PageServer, checked_prefix  # noqa: PLC0415 - packages may be missing
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("anycorn", "starlette"):
            raise
        sys.stderr.write("trimesh: dashboard needs starlette and anycorn: pip install 'trimesh-actors[dashboard]'\n")
        return 1
    logging.basicConfig(level=logging.WARNING)
    source = first_run(pid)

    def say() -> None:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()

    try:
        every = max(seconds_of("--every", every), limits.TOP_SECONDS_MIN)
        server = PageServer(
            source, port=port, prefix=checked_prefix(prefix), hosts=allow_host, every=every, on_used=say
        )
        say()
        trio.run(server.run_until_signal)
    except (ValueError, OSError, OverflowError) as error:
        sys.stderr.write(f"trimesh: {error}\n")
        return 2
    finally:
        if source is not None:
            source.close()
    return 0
