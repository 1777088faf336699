"""`HostMesh.run`: runs a command on each host, in a separate process, and returns its output by lines.

    command --> PipedCommand --port--> the program

HC-1 Output waits in the command's pipes, and in `limits.COMMAND_BATCHES` items of the port, until the program reads it:
     nothing is lost, and memory is bounded.
HC-2 The command leads a process group, which ends with it (`run_process`). Processes that left the group end with this
     process, by the mark in their environment.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from trimesh import limits
from trimesh._runtime.actors import current_rank
from trimesh._runtime.channels import Port, Receiver
from trimesh._runtime.system import parent_of
from trimesh.actor.actor import Actor
from trimesh.actor.channel import open_channel
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import HostMesh
from trimesh.actor.piped_command import Lines, PipedCommand, bound_when_cancelled, stream_name, text_of_line
from trimesh.config import reread
from trimesh.shape.value_mesh import OutputLine, ValueMesh

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
        raise TypeError(f"output must be a function of a line, such as print, or None, got {output!r}")
    # The process gets more time than its command, which it has to kill.
    async with (
        hosts.spawn_procs({}, name="commands", grace=seconds + limits.KILL_SECONDS) as procs,
        procs.spawn("commands", CommandRunner) as runners,
    ):
        verb = runners.run.options(abandon_after=seconds + limits.KILL_SECONDS).call
        call = partial(verb, arguments, variables, place, seconds, check=check)
        outcome = await (_outcome(call(None)) if output is None else _shown(hosts, output, call))
    if isinstance(outcome, Exception):  # raised only here: the blocks of meshes would wrap it
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
    """Pass all lines to `output` while `call` runs, also those of the grace of a cancelled command.

    Returns:
        The value of `call`, or the error of either.
    """
    outcomes, reading = list[ValueMesh[int] | Exception](), trio.CancelScope(shield=True)
    item: Any = Lines
    channel = open_channel(item, capacity=limits.COMMAND_BATCHES)
    async with channel as (port, receiver), trio.open_nursery() as nursery:

        async def run_all() -> None:
            try:
                outcomes.append(await _outcome(call(port)))
            except trio.Cancelled:
                reading.deadline = trio.current_time() + limits.COMMAND_FLUSH_SECONDS
                raise
            finally:
                port.close()
            await bound_when_cancelled(reading)

        with reading:
            nursery.start_soon(run_all)
            try:
                await _show(hosts, receiver, output)
            except Exception as error:  # noqa: BLE001 - raised by the caller
                outcomes.append(error)
        nursery.cancel_scope.cancel(reason="the command has ended, or the function of output= has failed")
    return outcomes[0]


async def _show(hosts: HostMesh, receiver: Receiver[Lines], output: Show) -> None:
    points, names = list(hosts.points()), hosts.names
    async for rank, stream, lines in receiver:
        for line in lines:
            output(OutputLine(points[rank], names[rank], stream_name(stream), text_of_line(line)))


def checked_command(command: Any) -> list[str]:
    """Return program and arguments as strings.

    Raises:
        TypeError, ValueError: The command is not a list of a program and its arguments.
    """
    given = command
    if isinstance(command, str | bytes) or not isinstance(command, Sequence):
        raise TypeError(
            f'a command must be a list of arguments, got {command!r}: write ["nvidia-smi", "-L"], or '
            '["sh", "-c", "..."] for shell syntax'
        )
    arguments: list[Any] = [os.fspath(one) for one in given]
    if not arguments or not arguments[0]:
        raise ValueError(f"a command must have a program as its first argument, got {arguments!r}")
    for one in arguments:
        if not isinstance(one, str) or "\0" in one:
            raise ValueError(f"each argument of a command must be a string without NUL, got {one!r}")
    return arguments


def checked_variables(env: Any) -> dict[str, str]:
    """Return environment variables as a dict.

    Raises:
        TypeError, ValueError: It is no mapping of strings to strings, or the system refuses a name or value.
    """
    if env is not None and not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping of names to strings, got {env!r}")
    found: dict[Any, Any] = {} if env is None else {**env}
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env must be a mapping of names to strings, got {name!r}: {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"an environment variable must have a name without '=', and no NUL, got {name!r}: {value!r}"
            )
    return found


def checked_grace(grace: Any) -> float:
    """Return the seconds from SIGTERM to SIGKILL, by default those of the setting `grace`.

    Raises:
        ValueError: It is no number of seconds, or infinite.
    """
    seconds = reread().grace if grace is None else grace
    if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ValueError(f"the grace of a command must be a finite number of seconds >= 0, got {seconds!r}")
    return float(seconds)


# ---- the host's side of `HostMesh.run`: the actor that runs one command ----------------------------------------------

_THREADS: Final = "OMP_NUM_THREADS"


class CommandRunner(Actor):
    """Runs a command on its host."""

    @endpoint
    async def run(
        self,
        command: list[str],
        env: dict[str, str],
        cwd: str | None,
        grace: float,
        lines: Port[Lines] | None,
        *,
        check: bool,
    ) -> int:
        """Run a command to its end, and return its exit code; -N if signal N ended it.

        Args:
            command: Program and arguments.
            env: Variables set over those of the host.
            cwd: Working directory; None for that of this process.
            grace: See `run_process`.
            lines: Receives its output; None discards it.
            check: Whether an exit code other than 0 is an error.

        Raises:
            subprocess.CalledProcessError: With `check`: it failed; `stderr` holds the end of its standard error.
            OSError: It could not be started.
        """
        running = PipedCommand(lines, current_rank())
        try:
            code = await running.run(command, env={**host_environment(), **env}, cwd=cwd, grace=grace)
        finally:
            if lines is not None:
                lines.close()
        if check and code != 0:
            raise subprocess.CalledProcessError(code, command, stderr=running.last_words.read())
        return code


def host_environment() -> dict[str, str]:
    """Return the environment of a command: that of this process, without an OMP_NUM_THREADS=1 that trimesh set.

    Workers that share a host compute with one thread each, unless their host was started with this variable.
    """
    found = dict(os.environ)
    starter = parent_of(os.getppid()) or os.getpid()  # the spawner's parent: the agent, or the program
    if found.get(_THREADS) == "1" and not _was_started_with(starter, _THREADS):
        del found[_THREADS]
    return found


def _was_started_with(pid: int, name: str) -> bool:
    try:
        theirs = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return True
    return any(entry.startswith(f"{name}=".encode()) for entry in theirs.split(b"\0"))
