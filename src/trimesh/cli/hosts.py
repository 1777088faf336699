"""`trimesh host`: what makes this machine a host of a mesh."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter

from trimesh.errors import TrimeshError

if TYPE_CHECKING:
    from trimesh.jobs import OwnPKI


app: Final = App(name="host", help="Make this machine a host of a mesh.", result_action="return_value")


def join(
    *addresses: str,
    token_file: Annotated[str, Parameter(name="--token-file", allow_leading_hyphen=True)],
    line: Annotated[int | None, Parameter(name="--line")] = None,
    wait: Annotated[float | None, Parameter(name="--wait")] = None,
    state_file: Annotated[str | None, Parameter(name="--state-file")] = None,
    certificate: Annotated[str | None, Parameter(name="--certificate")] = None,
    key: Annotated[str | None, Parameter(name="--key")] = None,
    authority: Annotated[str | None, Parameter(name="--authority")] = None,
    peer: Annotated[tuple[str, ...], Parameter(name="--peer", negative="")] = (),
) -> int:
    """Join a program that expects hosts (`trimesh.jobs.open_door`), and serve it until it ends.

    Args:
        addresses: Of the program, host:port, tried in order.
        token_file: A file of mode 0600 with a token a line; - reads one from standard input.
        line: Which line of the file, from 0 on; else that of the rank that mpirun, srun, torchrun or SkyPilot has set.
        wait: Wait for the file, until nothing has changed in its folder for so many seconds.
        state_file: Where to say "waiting", then "joined"; it is written every 5 s while the agent runs, for probes.
        certificate: Where the program uses certificates of your authority (pki=): of this host, in PEM.
        key: Its key, a file that no other user can read.
        authority: Who certifies the peers.
        peer: A name that peers may have in their certificates; may be said several times.

    Exit codes: 0 the program, or a signal, has said stop; 77 it does not let this host join, or is not there; 1 else:
    nothing was heard of the program for `limits.AGENT_LEASE_SECONDS`, or the spawner of this host is lost, say.
    """
    if not addresses:
        sys.stderr.write("trimesh host join needs the address of the program, as its door says it: host:port\n")
        return 2
    try:
        from trimesh.jobs.addresses import checked_address  # noqa: PLC0415 - as above
        from trimesh.jobs.agent import join as join_here  # noqa: PLC0415 - the native library is loaded by it

        for address in addresses:
            checked_address(address)
        pki = _pki_of((certificate, key, authority), peer)
    except (TrimeshError, ValueError) as error:  # a package is missing, or an option
        sys.stderr.write(f"trimesh: {error}\n")
        return 2
    return join_here(addresses, token_file, line, wait=wait, state_file=state_file, pki=pki)


def _pki_of(files: Sequence[str | None], peers: tuple[str, ...]) -> OwnPKI | None:
    """Return certificates of the user's, if they are said.

    Raises:
        ValueError: A part of them is missing.
    """
    from trimesh.jobs import OwnPKI  # noqa: PLC0415 - as above

    if not any(files) and not peers:
        return None
    certificate, key, authority = files
    if certificate is None or key is None or authority is None or not peers:
        raise ValueError("certificates of your own need all of --certificate, --key, --authority and --peer")
    certificate, key, authority = (str(Path(one).expanduser().absolute()) for one in (certificate, key, authority))
    return OwnPKI(certificate, key, authority, peers)


app.command(join)


# ---- `trimesh run`: a script with a job of the file ------------------------------------------------------------------


def run_script(
    script: str,
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    job: Annotated[str | None, Parameter(name="--job")] = None,
) -> int:
    """Run a Python script whose `trimesh.jobs.default()` is a job of trimesh.toml.

    Args:
        script: Its file.
        arguments: Its own, options with them; after `--` also one that is called --job.
        job: The name of the job; else what the file or TRIMESH_JOB says.

    Exit codes: of the script; 2 there is no such job or script.
    """
    if not Path(script).is_file():
        sys.stderr.write(f"trimesh run needs the file of a script, got {script!r}\n")
        return 2
    if job is not None:
        os.environ["TRIMESH_JOB"] = job
    try:
        from trimesh.jobs import default  # noqa: PLC0415 - packages may be missing

        default()
    except TrimeshError as error:
        sys.stderr.write(f"trimesh: {error}\n")
        return 2
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, script, *arguments])  # noqa: S606 - the user's own script
    raise AssertionError("execv does not return")
