"""The program's side of `HostMesh.run`: a process on each host, a command in it, its output by lines."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio

from trimesh import limits
from trimesh._runtime.channels import Port, Receiver
from trimesh.actor.channel import open_channel
from trimesh.actor.host_mesh import HostMesh
from trimesh.config import reread
from trimesh.jobs.on_hosts.command_runner import STDERR, CommandRunner, Lines
from trimesh.shape.output_line import OutputLine
from trimesh.shape.value_mesh import ValueMesh

Show = Callable[[OutputLine], object]


async def run(
    hosts: HostMesh,
    command: Sequence[str | os.PathLike[str]],
    *,
    output: Show | None,
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    check: bool,
    grace: float | None,
) -> ValueMesh[int]:
    """Run a command on each host; see `HostMesh.run`."""
    arguments = checked_command(command)
    variables = checked_variables(env)
    place = None if cwd is None else os.fspath(cwd)
    seconds = checked_grace(grace)
    if output is not None and not callable(output):
        raise TypeError(f"output must be a function of a line, print for one, or None, got {output!r}")
    # The process is given up later than the command in it, which it kills.
    async with (
        hosts.spawn_procs({}, name="commands", grace=seconds + limits.KILL_SECONDS) as procs,
        procs.spawn("commands", CommandRunner) as runners,
    ):
        verb = runners.run.options(abandon_after=seconds + limits.KILL_SECONDS).call
        call = partial(verb, arguments, variables, place, seconds, check=check)
        outcome = await (_outcome(call(None)) if output is None else _shown(hosts, output, call))
    if isinstance(outcome, Exception):  # raised here, as the blocks of meshes would wrap it
        try:
            raise outcome
        finally:
            del outcome
    return outcome


async def _outcome(call: Awaitable[ValueMesh[int]]) -> ValueMesh[int] | Exception:
    try:
        return await call
    except Exception as error:  # noqa: BLE001 - raised by the caller
        return error


async def _shown(
    hosts: HostMesh, output: Show, call: Callable[[Port[Lines]], Awaitable[ValueMesh[int]]]
) -> ValueMesh[int] | Exception:
    """Return what `call` does, and meanwhile hand all lines to `output`; or why one of them has failed."""
    outcomes = list[ValueMesh[int] | Exception]()
    item: Any = Lines
    channel = open_channel(item, capacity=limits.COMMAND_BATCHES)
    async with channel as (port, receiver), trio.open_nursery() as nursery:

        async def run_all() -> None:
            try:
                outcomes.append(await _outcome(call(port)))
            finally:
                port.close()

        nursery.start_soon(run_all)
        try:
            await _show(hosts, receiver, output)
        except Exception as error:  # noqa: BLE001 - raised by the caller
            outcomes.append(error)
            nursery.cancel_scope.cancel(reason="the function that takes output has failed")
    return outcomes[0]


async def _show(hosts: HostMesh, receiver: Receiver[Lines], output: Show) -> None:
    points, names = list(hosts.points()), hosts.names
    async for rank, stream, lines in receiver:
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            output(OutputLine(points[rank], names[rank], "stderr" if stream == STDERR else "stdout", text))


def checked_command(command: Any) -> list[str]:
    """Return program and arguments.

    Raises:
        TypeError, ValueError: It is no list of them.
    """
    given = command
    if isinstance(command, str | bytes) or not isinstance(command, Sequence):
        raise TypeError(
            f'a command is a list of arguments, got {command!r}: write ["nvidia-smi", "-L"], or ["sh", "-c", "..."] '
            "for what a shell is to read"
        )
    arguments: list[Any] = [os.fspath(one) for one in given]
    if not arguments or not arguments[0]:
        raise ValueError("a command needs a program as its first argument, got none")
    for one in arguments:
        if not isinstance(one, str) or "\0" in one:
            raise ValueError(f"each argument of a command must be a string without NUL, got {one!r}")
    return arguments


def checked_variables(env: Any) -> dict[str, str]:
    """Return variables as the system takes them.

    Raises:
        TypeError, ValueError: It is no mapping of strings to strings, or a name is none.
    """
    if env is not None and not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping of names to strings, got {env!r}")
    found: dict[Any, Any] = {} if env is None else {**env}
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env must be a mapping of names to strings, got {name!r}: {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"an environment variable has a name without '=', and no NUL, got {name!r}: {value!r}")
    return found


def checked_grace(grace: Any) -> float:
    """Return the seconds from SIGTERM to SIGKILL, by default those of the setting `grace`.

    Raises:
        ValueError: It is no number of seconds, or endless.
    """
    seconds = reread().grace if grace is None else grace
    if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ValueError(f"the grace of a command must be a finite number of seconds >= 0, got {seconds!r}")
    return float(seconds)
