"""`trimesh host`, `trimesh run` and `trimesh job`: joining hosts, scripts with a job, kept jobs."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import trio
from cyclopts import App, Parameter

from trimesh.cli.text import clean, one_line
from trimesh.errors import (
    ConnectError,
    DeviceMeshError,
    MeshErrorGroup,
    ShapeError,
    TrimeshError,
    leaves,
    origin,
    place_name,
)

if TYPE_CHECKING:
    from trimesh.actor.host_mesh import HostMesh
    from trimesh.jobs import KeptJob, OutputLine, OwnPKI


hosts: Final = App(name="host", help="Make this machine a host of a mesh.", result_action="return_value")


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

    Exit codes: 0 the program or a signal stopped it; 77 the program rejects this host, or cannot be reached; 1 any
    other error, such as silence of the program for `limits.AGENT_LEASE_SECONDS`, or loss of this host's spawner.

    Args:
        addresses: Addresses of the program, host:port, tried in order; with --wait they may stand behind the token.
        token_file: A file of mode 0600 with one token per line; - reads one from standard input.
        line: Line of the file, from 0; by default the rank that mpirun, srun, torchrun or SkyPilot has set.
        wait: Wait for the file; give up when its folder has not changed for this many seconds.
        state_file: File for the state, "waiting", then "joined"; written every 5 s while the agent runs, for probes.
        certificate: PEM file with the certificate of this host, if the program uses your own authority (pki=).
        key: PEM file with its key, which no other user can read.
        authority: PEM file with the authority that certifies the peers.
        peer: Accepted name in the certificates of peers; can be repeated.
    """
    if not addresses and wait is None:
        sys.stderr.write("trimesh: host join needs an address of the program, host:port, as door.addresses shows it\n")
        return 2
    try:
        from trimesh.jobs.addresses import checked_address  # noqa: PLC0415 - packages may be missing
        from trimesh.jobs.agent import join as join_here  # noqa: PLC0415 - it loads the native library

        for address in addresses:
            checked_address(address)
        pki = _pki_of((certificate, key, authority), peer)
    except (TrimeshError, ValueError) as error:  # a package is missing, or an option
        sys.stderr.write(f"trimesh: {error}\n")
        return 2
    return join_here(addresses, token_file, line, wait=wait, state_file=state_file, pki=pki)


def _pki_of(files: Sequence[str | None], peers: tuple[str, ...]) -> OwnPKI | None:
    """Return the certificates that the options name; None without such options.

    Raises:
        ValueError: One of the options is missing.
    """
    from trimesh.jobs import OwnPKI  # noqa: PLC0415 - packages may be missing

    if not any(files) and not peers:
        return None
    certificate, key, authority = files
    if certificate is None or key is None or authority is None or not peers:
        raise ValueError("your own certificates need all of --certificate, --key, --authority and --peer, got some")
    certificate, key, authority = (str(Path(one).expanduser().absolute()) for one in (certificate, key, authority))
    return OwnPKI(certificate, key, authority, peers)


hosts.command(join)


# ---- `trimesh run`: a script with a job of the file ------------------------------------------------------------------


def run_script(
    script: str,
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    job: Annotated[str | None, Parameter(name="--job")] = None,
) -> int:
    """Run a Python script whose `trimesh.jobs.default()` is a job of trimesh.toml.

    Exit codes: that of the script; 2 there is no such job or script.

    Args:
        script: File of the script.
        arguments: Arguments and options of the script; after `--` even one named --job.
        job: Name of the job; by default that of TRIMESH_JOB or of the file.
    """
    if not Path(script).is_file():
        sys.stderr.write(f"trimesh: run needs the file of a script, got {script!r}\n")
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


# ---- `trimesh job`: hosts that outlive the program that starts them --------------------------------------------------

kept_jobs: Final = App(
    name="job", help="Keep hosts for several programs in turn, until a lease ends.", result_action="return_value"
)

FOUND: Final = 1
WRONG: Final = 2
NOT_KEPT: Final = 3
NOT_STARTED: Final = 127
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

Json = Annotated[bool, Parameter(name="--json", negative="")]
Lease = Annotated[str, Parameter(name="--lease")]


def start(name: str, /, *, lease: Lease, job: Annotated[str, Parameter(name="--job")] = "", json: Json = False) -> int:
    """Start a job of trimesh.toml and keep its hosts until the lease ends. Waits until the hosts are ready.

    Exit codes: 0, 1 the hosts could not be started, 2 there is no such job, 3 the name is taken.

    Args:
        name: Name by which programs attach.
        lease: Time from when the hosts are ready: 7200, 90m, 2h, 1d. Its end stops the job and the attached program.
        job: Name of the job in the file; by default that of TRIMESH_JOB or of the file.
        json: Print one JSON document.
    """
    from trimesh import jobs  # noqa: PLC0415 - packages may be missing

    try:
        seconds = _seconds(lease)
        chosen = jobs.named_job(job) if job else jobs.default()
        made = _done(partial(jobs.keep, name, chosen, lease=seconds))
    except (ValueError, TypeError) as error:
        return _said(error, WRONG)
    _show([made], json=json)
    return 0


def list_(*, json: Json = False) -> int:
    """Show your kept jobs: hosts, end of the lease, attached program, or why a job has ended.

    Exit codes: 0 all are kept, 1 one has ended, 3 there is none.

    Args:
        json: Print one JSON document: a list.
    """
    from trimesh import jobs  # noqa: PLC0415 - packages may be missing

    found = _done(jobs.kept)
    _show(found, json=json)
    if not found:
        sys.stderr.write("trimesh: no job of this user is kept\n")
        return NOT_KEPT
    return FOUND if any(one.gone for one in found) else 0


def attach(
    name: str,
    script: str = "",
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    host: Annotated[int, Parameter(name="--host")] = 0,
) -> int:
    """Run a Python script whose `trimesh.jobs.default()` is the kept job; without a script, open a shell on a host.

    Exit codes: that of the script or the shell; 2 there is no such script or host, 3 no job of that name is kept, or
    another program is attached.

    Args:
        name: Name of the kept job.
        script: File of the script.
        arguments: Arguments and options of the script; after `--` even one named --host.
        host: Number of the host for the shell, from 0.
    """
    from trimesh import jobs  # noqa: PLC0415 - packages may be missing

    try:
        job = jobs.attach(name)
    except ValueError as error:
        return _said(error, WRONG)
    if script:
        kept = [one for one in _done(jobs.kept) if one.name == name]
        if not kept or kept[0].gone:
            gone = kept[0].gone if kept else "trimesh job list shows those that are"
            raise ConnectError(f"no job is kept as {name!r}: {gone}")
        os.environ["TRIMESH_JOB"] = f"{jobs.KEPT}{name}"
        return run_script(script, *arguments)
    code: int = _done(partial(_shell, job, host))
    return code


async def _shell(job: Any, host: int) -> int:
    async with job as hosts:
        if not 0 <= host < len(hosts):
            sys.stderr.write(f"trimesh: --host must be 0 to {len(hosts) - 1}, the hosts of {job.name}, got {host}\n")
            return WRONG
        code: int = await hosts.slice(hosts=host).shell()
        return code


def exec_(
    name: str,
    /,
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    at: Annotated[str, Parameter(name="--at")] = "",
) -> int:
    """Run a command on all hosts of a kept job, or some: `trimesh job exec exp7 --at hosts=0 -- nvidia-smi -L`.

    Each line of output has its host in front. Ctrl-C sends SIGTERM to the command, SIGKILL after the setting `grace`.

    Exit codes: the largest one of the command, 128+N where signal N ended it, 127 where it could not be started; 2
    wrong usage; 3 no job of that name is kept, or a program is attached.

    Args:
        name: Name of the kept job.
        command: Program and arguments, after `--`; no shell reads them.
        at: Hosts, `hosts=0` or `hosts=0:4`, or the name of a part of the job, `trainers`; all by default.
    """
    from trimesh import jobs  # noqa: PLC0415 - packages may be missing

    try:
        if not command:
            raise ValueError(f"job exec needs a command: write trimesh job exec {name} -- nvidia-smi -L")
        job = jobs.attach(name)
    except ValueError as error:
        return _said(error, WRONG)
    try:
        code: int = _done(partial(_exec, job, command, at))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        return 128 + signal.SIGINT
    return code


async def _exec(job: Any, command: Sequence[str], at: str) -> int:
    async with job as hosts:
        try:
            chosen = _hosts_at(hosts, at)
        except (ShapeError, KeyError, ValueError) as error:
            return _said(f"--at: {error.args[0]}", WRONG)
        try:
            codes = await chosen.run(command, output=_show_line)
        except MeshErrorGroup as group:
            for one in leaves(group):
                _said(f"{_place_of(one)}{one}", FOUND)
            return NOT_STARTED
        return max(128 - code if code < 0 else code for code in codes.values())


def _place_of(error: BaseException) -> str:
    where = origin(error)
    return "" if where is None or not where.host else f"{place_name(where.host, where.point)}: "


def _hosts_at(hosts: HostMesh, at: str) -> HostMesh:
    """Return the hosts that `--at` names.

    Raises:
        ShapeError, KeyError, ValueError: There are none.
    """
    if not at:
        return hosts
    label, equals, index = at.partition("=")
    if not equals:
        return hosts[at]
    first, colon, end = index.partition(":")
    try:
        numbers = [int(one) if one else None for one in (first, end)]
    except ValueError:
        raise ValueError(f"it takes hosts=0, hosts=0:4 or the name of a part, got {at!r}") from None
    if colon:
        return hosts.slice(**{label: slice(*numbers)})
    if numbers[0] is None:
        raise ValueError(f"it takes hosts=0, hosts=0:4 or the name of a part, got {at!r}")
    return hosts.slice(**{label: numbers[0]})


def _show_line(line: OutputLine) -> None:
    stream = sys.stdout if line.stream == "stdout" else sys.stderr
    stream.write(f"{line}\n")
    stream.flush()


def extend(name: str, /, *, lease: Lease, json: Json = False) -> int:
    """Set the end of a kept job's lease, counted from now; it may be sooner than before.

    Exit codes: 0, 2 the lease is invalid, 3 no job of that name is kept.

    Args:
        name: Name of the kept job.
        lease: Time from now: 7200, 90m, 2h, 1d.
        json: Print one JSON document.
    """
    from trimesh import jobs  # noqa: PLC0415 - packages may be missing

    try:
        made = _done(partial(jobs.extend, name, lease=_seconds(lease)))
    except ValueError as error:
        return _said(error, WRONG)
    _show([made], json=json)
    return 0


def stop(name: str, /, *, json: Json = False) -> int:
    """Stop a kept job and the attached program, and free its name; a job that has ended needs this, too.

    Exit codes: 0, 3 no job of that name is kept, or its keeper is on another machine.

    Args:
        name: Name of the kept job.
        json: Print one JSON document.
    """
    from trimesh import jobs  # noqa: PLC0415 - packages may be missing

    try:
        text = _done(partial(jobs.stop, name))
    except ValueError as error:
        return _said(error, WRONG)
    if json:
        _print_json({"name": name, "text": text})
    else:
        sys.stdout.write(f"{name}: {one_line(text)}\n")
    return 0


def _done(work: Callable[[], Awaitable[Any]]) -> Any:
    """Run `work` in Trio and return its result; report a failure in one line and exit.

    Raises:
        ConnectError, ValueError: Raised by `work`.
    """
    try:
        return trio.run(work)
    except (ConnectError, ValueError):
        raise
    except (TrimeshError, DeviceMeshError) as error:
        first = next(iter(leaves(error)))
        if isinstance(first, ConnectError):
            raise first from None
        sys.exit(_said(first, FOUND))


def _said(error: object, code: int) -> int:
    sys.stderr.write(f"trimesh: {error}\n")
    return code


def _seconds(text: str) -> float:
    """Parse a lease, in seconds.

    Raises:
        ValueError: The text is not a lease.
    """
    unit = _UNITS.get(text[-1:])
    try:
        value = float(text if unit is None else text[:-1]) * (unit or 1.0)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"a lease must be a number of seconds, or a number with s, m, h or d (90m), got {text!r}")
    return value


def _print_json(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.flush()


def _show(found: list[KeptJob], *, json: bool) -> None:
    if json:
        _print_json([_document(one) for one in found])
        return
    sys.stdout.writelines(f"{line}\n" for line in kept_lines(found))
    sys.stdout.flush()


def _document(one: KeptJob) -> dict[str, Any]:
    state = one.state
    return {
        "name": state.name,
        "kind": state.kind,
        "status": "gone" if one.gone else state.status,
        "hosts": state.hosts,
        "parts": state.parts,
        "keeper": {"host": state.host, "pid": state.pid},
        "since": state.since,
        "until": state.until,
        "attached": one.attached,
        "gone": one.gone,
    }


def kept_lines(found: list[KeptJob]) -> Iterator[str]:
    """Yield kept jobs as text, a line each."""
    for one in found:
        state = one.state
        text = f"{clean(state.name)}  {clean(state.kind)}  {sum(state.parts.values())} hosts"
        if one.gone:
            frees = f"trimesh job stop {clean(state.name)} frees the name"
            yield f"{text}  has ended: {one_line(one.gone)}; {frees}"
        elif state.status == "starting":
            yield f"{text}  has waited for its hosts since {_at(state.since)}, process {state.pid}"
        else:
            left = max(0, round(state.until - time.time()))
            who = one.attached
            has = "free" if who is None else f"attached: process {who.pid} on {clean(who.host)} since {_at(who.since)}"
            yield f"{text} ({clean(', '.join(state.hosts))})  until {_at(state.until)} ({left} s)  {has}"


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


for _command, _name in (
    (start, "start"),
    (list_, "list"),
    (attach, "attach"),
    (exec_, "exec"),
    (extend, "extend"),
    (stop, "stop"),
):
    kept_jobs.command(_command, name=_name)
