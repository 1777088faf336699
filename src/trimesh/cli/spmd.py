"""`trimesh spmd`: a script of torchrun on processes of this machine, or of the hosts of a job."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import trio
from cyclopts import Parameter
from rich.console import Console

from trimesh._supervision.policy import Restart
from trimesh.cli.members import ArgumentRefused
from trimesh.errors import MeshError, MeshErrorGroup, TrimeshError, leaves

if TYPE_CHECKING:
    from trimesh.actor.host_mesh import HostMesh
    from trimesh.actor.proc_mesh import ProcMesh
    from trimesh.jobs import OutputLine

FAILED: Final = 1
WRONG: Final = 2
GRACE_SECONDS: Final = 30.0
"""Default of `--grace`, that of torchrun: time to write a checkpoint."""

_VALUED: Final = (
    *("--procs", "--nproc-per-node", "--nproc_per_node", "--hosts", "--nnodes", "--job", "--env"),
    *("--restarts", "--max-restarts", "--max_restarts", "--grace"),
)
_NEEDLESS: Final = re.compile(r"--(standalone|(rdzv|master|node|local)[-_].*)")
"""Options of torchrun by which its hosts find each other."""
_COLORS: Final = (36, 33, 32, 35, 34, 31)
_START: Final = re.compile(r"\s*(\+ Exception Group )?Traceback \(most recent call last\):")
_CHAIN: Final = ("The above exception was the direct cause", "During handling of the above exception")


def spmd(
    program: str,
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    procs: Annotated[int, Parameter(name=["--procs", "--nproc-per-node", "--nproc_per_node"])] = 1,
    hosts: Annotated[int | None, Parameter(name=["--hosts", "--nnodes"])] = None,
    job: Annotated[str | None, Parameter(name="--job")] = None,
    env: Annotated[tuple[str, ...], Parameter(name="--env", negative="")] = (),
    module: Annotated[bool, Parameter(name=["--module", "-m"], negative="")] = False,
    restarts: Annotated[int, Parameter(name=["--restarts", "--max-restarts", "--max_restarts"])] = 0,
    grace: Annotated[float, Parameter(name="--grace")] = GRACE_SECONDS,
) -> int:
    """Run a script of torchrun, one process for each rank; options stand before the script, as for torchrun.

    Each line of output has its rank in front. When a rank fails, the others are ended, and its traceback is the last
    text. Ctrl-C, SIGTERM and SIGHUP send SIGTERM to all ranks, SIGKILL after --grace; a second Ctrl-C kills them.

    Exit codes: 0; 1 a rank failed, or the hosts could not be started; 2 wrong usage; 128+N signal N ended the command.

    Args:
        program: File of the script, or with --module the name of a module.
        arguments: Arguments and options of the script.
        procs: Processes on each host.
        hosts: Number of hosts: the first ones of the job, or without a job agents on this machine.
        job: Job of trimesh.toml, or kept:NAME; by default that of TRIMESH_JOB or of the file, or this machine.
        env: NAME=VALUE, a variable of all ranks; can be repeated.
        module: Run a module, as `python -m`.
        restarts: How often all ranks are started again, together, after one has failed or a host was lost.
        grace: Seconds from SIGTERM to SIGKILL.
    """
    try:
        variables = _variables(env)
        _check(program, module=module, procs=procs, hosts=hosts, restarts=restarts, grace=grace)
        place = _place(job, hosts)
    except (TrimeshError, ValueError, TypeError) as error:
        sys.stderr.write(f"trimesh: {error}\n")
        return WRONG
    logging.basicConfig(format="trimesh: %(message)s")
    run = _Run([program, *arguments], variables, procs, restarts, grace, is_module=module)
    try:
        return trio.run(run.run, place, hosts)
    except KeyboardInterrupt:  # before it heard signals
        return 128 + signal.SIGINT


def before_script(arguments: Sequence[str]) -> list[str]:
    """Return arguments of `trimesh spmd` with `--` before the script: what follows it belongs to the script.

    Raises:
        ArgumentRefused: An option of torchrun has no meaning here.
    """
    place = 1
    while place < len(arguments):
        word = arguments[place]
        if word == "--" or not word.startswith("-"):
            break
        if _NEEDLESS.fullmatch(word):
            raise ArgumentRefused(
                f"trimesh spmd starts all hosts and ranks by itself, and they find each other: leave {word} out"
            )
        place += 1 + (word in _VALUED)
    rest = list(arguments[place:])
    return [*arguments[:place], *(["--"] if rest and rest[0] != "--" else []), *rest]


def _variables(given: Sequence[str]) -> dict[str, str]:
    found = dict[str, str]()
    for one in given:
        name, equals, value = one.partition("=")
        if not name or not equals or "\0" in one:
            raise ValueError(f"--env takes NAME=VALUE, got {one!r}: write --env NCCL_DEBUG=INFO")
        found[name] = value
    return found


def _check(program: str, *, module: bool, procs: int, hosts: int | None, restarts: int, grace: float) -> None:
    if procs < 1:
        raise ValueError(f"--procs must be at least 1, the processes on each host, got {procs}")
    if hosts is not None and hosts < 1:
        raise ValueError(f"--hosts must be at least 1, got {hosts}")
    if restarts < 0:
        raise ValueError(f"--restarts must be a number of restarts >= 0, got {restarts}")
    if not 0 <= grace < float("inf"):
        raise ValueError(f"--grace must be a finite number of seconds >= 0, got {grace}")
    if not module and not Path(program).exists():
        is_name = re.fullmatch(r"\w+(\.\w+)*", program) and not program.endswith(".py")
        what = f": write --module {program} for a module" if is_name else ""
        raise ValueError(f"spmd needs the file of a script, got {program!r}, which does not exist{what}")


def _place(job: str | None, hosts: int | None) -> AbstractAsyncContextManager[HostMesh] | None:
    """Return the job that has the hosts; None for this machine without agents."""
    from trimesh import config  # noqa: PLC0415 - only this command needs it

    if job is not None:
        os.environ["TRIMESH_JOB"] = job
    if not config.reread().job:
        if hosts is None:
            return None
        from trimesh.jobs import LocalJob  # noqa: PLC0415 - packages may be missing

        return LocalJob(hosts)
    from trimesh.jobs import default  # noqa: PLC0415 - packages may be missing

    return default()


class _Run:
    """One run of the command."""

    def __init__(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        procs: int,
        restarts: int,
        grace: float,
        *,
        is_module: bool,
    ) -> None:
        self._words = words
        self._variables = variables
        self._procs = procs
        self._restarts = restarts
        self._grace = grace
        self._is_module = is_module
        self._scope = trio.CancelScope()
        self._signal = 0
        self._mesh: ProcMesh | None = None
        self._prefixes = {name: _prefix(stream) for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr))}

    async def run(self, job: AbstractAsyncContextManager[HostMesh] | None, hosts: int | None) -> int:
        """Run the program until it, or a signal, ends it; return the exit code."""
        from trimesh.actor.host_mesh import this_host  # noqa: PLC0415 - it loads the native library

        code = 0
        # Ignored ones stay so: hang-ups by nohup, Ctrl-C by a shell that starts a command with `&`.
        heard = [one for one in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
        with trio.open_signal_receiver(signal.SIGTERM, *heard) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hear, signals)
                try:
                    with self._scope:
                        if job is None:
                            code = await self._on(this_host(), None)
                        else:
                            async with job as found:
                                code = await self._on(found, hosts)
                except MeshErrorGroup as group:  # of the block: hosts that were lost, or did not start
                    code = self._report(group)
                nursery.cancel_scope.cancel(reason="the program has ended")
        return 128 + self._signal if self._signal else code

    async def _hear(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if not self._signal:
                self._signal = number
                self._scope.cancel(reason=f"{signal.Signals(number).name} arrived")
            elif number == signal.SIGINT and self._mesh is not None:
                with suppress(MeshError):
                    await self._mesh.kill(list(self._mesh.points()))

    async def _on(self, hosts: HostMesh, count: int | None) -> int:
        """Run the ranks on the first `count` hosts; return the exit code."""
        from trimesh.spmd import run  # noqa: PLC0415 - see `run`

        if count is not None:
            if count > len(hosts):
                sys.stderr.write(f"trimesh: --hosts must be at most {len(hosts)}, the hosts of the job, got {count}\n")
                return WRONG
            hosts = hosts.slice(hosts=slice(0, count))
        policy = Restart("one_for_all", intensity=self._restarts) if self._restarts else None
        failure: MeshErrorGroup | None = None
        async with hosts.spawn_procs(
            {"procs": self._procs}, name="ranks", grace=self._grace + 5, supervision=policy
        ) as self._mesh:
            try:
                await run(
                    self._mesh,
                    *self._words,
                    env=self._variables,
                    module=self._is_module,
                    grace=self._grace,
                    restarts=self._restarts,
                    output=self._show,
                )
            except MeshErrorGroup as group:
                failure = group
        return 0 if failure is None else self._report(failure)

    def _show(self, line: OutputLine) -> None:
        """Write a line of a rank."""
        stream = sys.stdout if line.stream == "stdout" else sys.stderr
        prefix = self._prefixes[line.stream].format(rank=line.point.rank, color=_COLORS[line.point.rank % len(_COLORS)])
        _write(stream, f"{prefix}{line.text}\n")

    def _report(self, group: MeshErrorGroup) -> int:
        """Write why the run failed, the traceback of the rank that failed first last."""
        sys.stdout.flush()
        if self._signal:  # then it ended the ranks
            return FAILED
        for error in reversed(list(leaves(group))):
            _write(sys.stderr, "".join(f"{line}\n" for line in failure_lines(error)))
        return FAILED


def failure_lines(error: BaseException) -> Iterator[str]:
    """Yield the failure of a rank as text, its traceback last."""
    from trimesh.spmd.program import ScriptFailed, how_failed  # noqa: PLC0415 - see `_Run.run`

    yield f"trimesh: {how_failed(error)}"
    for note in getattr(error, "__notes__", ()):
        if note.startswith("ranks that failed because"):
            yield f"trimesh: {note}"
    if isinstance(error, ScriptFailed):
        yield from last_traceback(error.stderr_tail.splitlines())
    else:
        yield from str(error).splitlines()[1:]


def last_traceback(lines: Sequence[str]) -> Sequence[str]:
    """Return the last traceback of a text, with those of its causes; the whole text if there is none."""
    starts = [number for number, line in enumerate(lines) if _START.fullmatch(line)]
    if not starts:
        return lines
    start = starts.pop()
    while starts and any(line.lstrip(" |").startswith(_CHAIN) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return lines[start:]


def _prefix(stream: TextIO) -> str:
    console = Console(file=stream)
    is_colored = console.is_terminal and console.color_system is not None and not console.no_color
    return "\x1b[{color}mrank {rank}\x1b[0m | " if is_colored else "rank {rank} | "


def _write(stream: Any, text: str) -> None:
    with suppress(OSError, ValueError):  # the reader has gone, as in `| head`
        stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
        stream.flush()
