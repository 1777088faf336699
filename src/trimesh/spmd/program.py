"""`trimesh.spmd.run` runs a program once for each process of a mesh; `SPMDActor` runs the program of one rank.

RK-1 A rank that fails for a reason of its own (a root cause) ends the others at once.
RK-2 A rank that fails because a peer is gone has a follow-on error: the peer's own failure has
     `limits.SPMD_VERDICT_SECONDS` to arrive before the others are ended.
RK-3 Follow-on errors become a note on a root cause, and are raised only where there is none.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import signal as signals
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast, overload

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.channels import Port
from trimesh._runtime.meshes import Rendezvous, says_peer_is_gone, text_says_peer_is_gone
from trimesh._runtime.system import Tail, host_name, run_process
from trimesh.actor.actor import Actor
from trimesh.actor.channel import open_channel
from trimesh.actor.context import context
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import hosts_module
from trimesh.actor.piped_command import Lines, PipedCommand, stream_name, text_of_line
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.actor.spawning import Spawning
from trimesh.errors import MeshError, MeshErrorGroup, add_note, leaves, origin
from trimesh.plain_numbers import whole_number
from trimesh.shape.value_mesh import OutputLine, ValueMesh
from trimesh.spmd import child
from trimesh.spmd.child import pack

R = TypeVar("R")

_log: Final = logging.getLogger("trimesh.spmd")


@overload
async def run(
    procs: ProcMesh,
    program: str | os.PathLike[str],
    /,
    *args: str,
    env: Mapping[str, str] | None = None,
    module: bool = False,
    grace: float = limits.GRACE_SECONDS,
    restarts: int = 0,
    output: Callable[[OutputLine], object] | None = None,
) -> ValueMesh[int]: ...
@overload
async def run(
    procs: ProcMesh,
    program: Callable[..., R],
    /,
    *args: Any,
    env: Mapping[str, str] | None = None,
    grace: float = limits.GRACE_SECONDS,
    restarts: int = 0,
    output: Callable[[OutputLine], object] | None = None,
) -> ValueMesh[R]: ...
@trio.lowlevel.enable_ki_protection
async def run(
    procs: ProcMesh,
    program: str | os.PathLike[str] | Callable[..., Any],
    /,
    *args: Any,
    env: Mapping[str, str] | None = None,
    module: bool = False,
    grace: float = limits.GRACE_SECONDS,
    restarts: int = 0,
    output: Callable[[OutputLine], object] | None = None,
) -> ValueMesh[Any]:
    """Run an unmodified script, or a function, once for each process of a mesh, as torchrun would.

    Each rank has a separate interpreter, a child of its mesh process, with torchrun's environment; it finds the
    others by `torch.distributed.init_process_group()`. Its output goes where that process's output goes.

    Args:
        procs: Processes that this program owns; their ranks are those of the program, in row-major order.
        program: Path of a script, or a function, which is pickled by cloudpickle; with `module=True` the name of a
            module, as for `python -m`.
        *args: Command line of the script, or arguments of the function.
        env: Variables for all ranks, added to those of the processes. Torchrun's variables take precedence.
        module: See `program`.
        grace: Seconds from SIGTERM to SIGKILL for ranks that are ended.
        restarts: How often all ranks are started again, together and with a new rendezvous, after one has failed.
        output: Function called in the task of the caller with each line of standard output and standard error, an
            `OutputLine`; `line.point.rank` is the rank. While it is slow, the ranks wait in their writes; nothing is
            lost. None leaves the output to the mesh.

    Returns:
        The exit codes, all 0, or the results of the function.

    Raises:
        MeshErrorGroup: A rank failed: `ScriptFailed` with its traceback, or the exception of the function. The others
            were ended, and no restart was left. Ranks that failed because a peer was gone are listed in a note on that
            peer's failure.
        TypeError: The function or its arguments cannot be pickled; an argument of a script is not a string.
        ValueError: `restarts` is not a whole number >= 0.
        RuntimeError: `procs` is a reference; only the block that owns processes can spawn on them.
        Exception: Error of `output`; the ranks have ended.

    Blocking: a checkpoint, cancellable. When it raises, all ranks and their child processes have ended.
    """
    if (most := whole_number(restarts)) is None or most < 0:
        raise ValueError(f"restarts must be a whole number >= 0, got {restarts!r}")
    if output is not None and not callable(output):
        raise TypeError(f"output must be a function of a line, such as print, or None, got {output!r}")
    rank = _function(program, args, grace) if callable(program) else _script(program, args, grace, is_module=module)
    run_id = secrets.token_hex(8)
    for count in range(most + 1):
        more = {**(env or {}), "TORCHELASTIC_RESTART_COUNT": str(count), "TORCHELASTIC_MAX_RESTARTS": str(most)}
        try:
            async with launchers_on(procs, more, run_id) as (launchers, variables):
                ranks = partial(_run_ranks, launchers, variables, rank)
                results = await (ranks(None) if output is None else _shown(launchers, output, grace, ranks))
            if isinstance(results, Exception):  # raised only here: the block of the launchers would wrap it
                raise results
            return ValueMesh(variables.region, results)
        except MeshErrorGroup as group:
            if count == most:
                raise
            _log.warning("restart %d of %d of all ranks: %s", count + 1, most, how_failed(next(iter(leaves(group)))))
    raise AssertionError("the last attempt returns or raises")


class _Rank(msgspec.Struct, frozen=True):
    """Program of a rank.

    Attributes:
        name: Name of the program, for errors.
        run: Runs it by the launcher of the rank, with the rank's variables, and returns its result.
    """

    name: str
    run: Callable[[SPMDActor, dict[str, str], Port[Lines] | None], Awaitable[Any]]


def _function(function: Callable[..., Any], args: tuple[Any, ...], grace: float) -> _Rank:
    work, name = pack(function, args), f"{getattr(function, '__qualname__', function)}()"

    async def run(launcher: SPMDActor, variables: dict[str, str], lines: Port[Lines] | None) -> Any:
        return pickle.loads(await _patient(launcher.call, grace)(work, name, variables, grace, lines))

    return _Rank(name, run)


def _script(path: str | os.PathLike[str], args: Sequence[Any], grace: float, *, is_module: bool) -> _Rank:
    words, kind = [os.fspath(path), *_arguments(args)], "module" if is_module else "script"

    async def run(launcher: SPMDActor, variables: dict[str, str], lines: Port[Lines] | None) -> Any:
        return await _patient(launcher.script, grace)(kind, words, variables, grace, lines)

    return _Rank(words[0], run)


def _patient(verbs: Any, grace: float) -> Callable[..., Awaitable[Any]]:
    """Return the call of one rank; a cancel waits until its program has ended."""
    call: Callable[..., Awaitable[Any]] = verbs.options(abandon_after=grace + limits.KILL_SECONDS).call_one
    return call


async def _run_ranks(
    launchers: SPMDActor, variables: ValueMesh[dict[str, str]], rank: _Rank, lines: Port[Lines] | None
) -> list[Any]:
    ranks = [partial(rank.run, launchers.slice(**point), own, lines) for point, own in variables.items()]
    return await run_together(ranks, rank.name)


async def _shown(
    launchers: SPMDActor,
    output: Callable[[OutputLine], object],
    grace: float,
    ranks: Callable[[Port[Lines] | None], Awaitable[list[Any]]],
) -> list[Any] | Exception:
    """Run the ranks, and pass their lines to `output`, also those that they write while they are ended.

    Returns:
        Their results, or the error of `output`.
    """
    hosts: list[Any] = [place.host for place in (await launchers.place.call()).values()]
    points: list[Any] = list(launchers.points())
    results, errors, failures = list[Any](), list[Exception](), list[MeshErrorGroup]()
    item: Any = Lines
    async with open_channel(item, capacity=limits.COMMAND_BATCHES) as (port, receiver), trio.open_nursery() as nursery:
        rest = trio.CancelScope(shield=True)

        @trio.lowlevel.enable_ki_protection  # else a Ctrl-C may end it, in place of the ranks
        async def show() -> None:
            with rest:
                try:
                    async for rank, stream, lines in receiver:
                        for text in map(text_of_line, lines):
                            output(OutputLine(points[rank], hosts[rank], stream_name(stream), text))
                except Exception as error:  # noqa: BLE001 - raised below, as this block would wrap it
                    errors.append(error)
                    nursery.cancel_scope.cancel(reason="the function of output= has failed")

        nursery.start_soon(show)
        try:
            results = await ranks(port)
        except MeshErrorGroup as error:  # raised below, as this block would wrap it
            failures.append(error)
        finally:
            port.close()
            rest.deadline = trio.current_time() + grace + limits.KILL_SECONDS
    if errors:
        return errors[0]
    if failures:
        raise failures[0]
    return results


async def env(procs: ProcMesh) -> ValueMesh[dict[str, str]]:
    """Return torchrun's environment variables for each process of a mesh, for programs that you start.

    Its port is free now but not reserved: `spawn_procs(rendezvous=True)` reserves one while the mesh lives, and `run`
    while the program runs.

    Args:
        procs: Processes that this program owns.

    Blocking: a checkpoint, cancellable; costs an actor in each process while it runs.
    """
    async with launchers_on(procs, {}, secrets.token_hex(8)) as (_, variables):
        return variables


def from_torchrun(*, interface: str | None = None, port: int = 0, **options: Any) -> Spawning[ProcMesh]:
    """Make a mesh of the processes of a torchrun job: `async with spmd.from_torchrun() as procs:`.

    Every process of the job has to enter it. That of rank 0 goes on as the program. The others become agents in place
    of their programs: their code after this line, `finally` included, does not run. They exit with 0 when rank 0 leaves
    the block. The mesh has one process for each rank, on a host of its own: `procs.slice(hosts=3)` is that of rank 3,
    with the environment of the rank, so that `torch.distributed.init_process_group()` works in its actors.

    Args:
        interface: Address of rank 0 at which the others join, its name, or that of an interface; None takes the
            loopback address if all are on one machine, else that of the default route.
        port: 0 lets the system choose.
        **options: Options of `spawn_procs`: `name`, `setup`, `supervision`, ...

    Raises:
        RuntimeError: torchrun has not started this process.
        SpawnError: On entering: rank 0 cannot listen there, or a rank has not joined within
            `limits.JOIN_TOKEN_SECONDS`.
        MeshErrorGroup: On entering: a process could not join or be started. Later: as for any mesh.

    Security: tokens travel through the store of torch, which neither encrypts nor authenticates: use a trusted network.

    Cost: an agent and a process for each rank; imports torch in each.
    """
    made: Spawning[ProcMesh] = hosts_module.from_torchrun(interface=interface, port=port, **options)
    return made


@asynccontextmanager
async def launchers_on(
    procs: ProcMesh, more: Mapping[str, str], run_id: str
) -> AsyncGenerator[tuple[SPMDActor, ValueMesh[dict[str, str]]], None]:
    """Spawn a launcher on each process, and compute the environment of each rank."""
    async with procs.spawn("spmd", SPMDActor) as launchers:
        places = await launchers.place.call()
        first = launchers.slice(**dict.fromkeys(launchers.extent, 0))
        _, port = await first.get_host_port.call_one()
        found = environments(places.values(), port, run_id)
        yield launchers, ValueMesh(places.region, [{**_NO_RESTARTS, **more, **one} for one in found])


def _arguments(args: Sequence[Any]) -> list[str]:
    for one in args:
        if not isinstance(one, str | os.PathLike):
            raise TypeError(f"arguments of a script must be strings or paths, got {one!r}: write {str(one)!r}")
    return [os.fspath(one) for one in args]


# ---- run the ranks of one program together: the first failure ends the others ----------------------------------------


@trio.lowlevel.enable_ki_protection
async def run_together(ranks: Sequence[Callable[[], Awaitable[R]]], name: str) -> list[R]:
    """Run the ranks concurrently; return their results.

    Args:
        ranks: One function for each rank.
        name: Name of the mesh, for the error.

    Raises:
        MeshErrorGroup: Some ranks failed; the others were cancelled.
    """
    results: dict[int, R] = {}
    failures: list[tuple[int, Exception]] = []
    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope

        @trio.lowlevel.enable_ki_protection
        async def run(rank: int, work: Callable[[], Awaitable[R]]) -> None:
            try:
                results[rank] = await work()
            except Exception as error:  # noqa: BLE001 - raised below, with the others
                failures.append((rank, error))
                if _is_follow_on(error):
                    scope.deadline = min(scope.deadline, trio.current_time() + limits.SPMD_VERDICT_SECONDS)
                else:
                    scope.cancel(reason="another rank failed")

        for rank, work in enumerate(ranks):
            nursery.start_soon(run, rank, work)
    if failures:
        raise MeshErrorGroup(f"{name} failed", _root_causes(failures), mesh=name)
    return [results[rank] for rank in range(len(ranks))]


def _is_follow_on(error: Exception) -> bool:
    return all(
        text_says_peer_is_gone(leaf.stderr_tail) if isinstance(leaf, ScriptFailed) else says_peer_is_gone(leaf)
        for leaf in leaves(error)
    )


def _root_causes(failures: Sequence[tuple[int, Exception]]) -> list[Exception]:
    """Return the root causes, with a note that lists the follow-on errors; without a root cause, all failures."""
    causes = [error for _, error in failures if not _is_follow_on(error)]
    others = [rank for rank, error in failures if error not in causes]
    if not causes:
        return [error for _, error in failures]
    if others:
        ranks = ", ".join(map(str, sorted(others)))
        add_note(causes[0], f"ranks that failed because a peer was gone: {ranks}")
    return causes


# ---- `SPMDActor`: starts the program of one rank, watches it and ends it ---------------------------------------------


class HostPlace(msgspec.Struct, frozen=True):
    """Host of a rank.

    Attributes:
        host: Identifies the host: equal for all ranks on it, and only for them.
        address: Address at which other hosts reach it.
        is_alone: Whether the rank sees only GPUs of its own, from `cuda:0` on.
    """

    host: str
    address: str
    is_alone: bool = False


_NO_RESTARTS: Final = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}


def environments(places: Sequence[HostPlace], port: int, run_id: str) -> list[dict[str, str]]:
    """Return the environment variables of each rank, without those that only differ between launchers.

    Args:
        places: Host of each rank.
        port: Port of the store, on the host of rank 0.
        run_id: Unique to the run, and equal for all ranks.
    """
    hosts = list(dict.fromkeys(place.host for place in places))
    sizes = Counter(place.host for place in places)
    before: Counter[str] = Counter()
    found: list[dict[str, str]] = []
    for rank, place in enumerate(places):
        variables: Mapping[str, object] = {
            "RANK": rank,
            "WORLD_SIZE": len(places),
            "LOCAL_RANK": 0 if place.is_alone else before[place.host],
            "LOCAL_WORLD_SIZE": 1 if place.is_alone else sizes[place.host],
            "GROUP_RANK": hosts.index(place.host),
            "GROUP_WORLD_SIZE": len(hosts),
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": len(places),
            "MASTER_ADDR": places[0].address if len(hosts) > 1 else "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 has the store, on the port reserved for it
        }
        before[place.host] += 1
        found.append({name: str(value) for name, value in variables.items()})
    return found


class SPMDActor(Actor):
    """Runs the program of one rank in a separate interpreter, a child of the actor's process.

    `trimesh.spmd.run` uses it; spawn it yourself to build the environment yourself.
    """

    def __init__(self) -> None:
        self._rendezvous: Rendezvous | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Hold the reserved port, if there is one."""
        try:
            yield
        finally:
            if self._rendezvous is not None:
                self._rendezvous.close()

    @endpoint
    def place(self) -> HostPlace:
        """Return the host of this rank."""
        host, share = host_name(), context(self).share
        return HostPlace(host, host, is_alone=share is not None and bool(share.gpus))

    @endpoint
    def get_host_port(self) -> tuple[str, int]:
        """Return this host's address and a port that stays reserved while the actor lives."""
        self._rendezvous = self._rendezvous or Rendezvous()
        return host_name(), self._rendezvous.port

    @endpoint
    async def main(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        grace: float = limits.GRACE_SECONDS,
        lines: Port[Lines] | None = None,
    ) -> int:
        """Run a command to its end; return its exit code, 0.

        Args:
            command: Program and arguments.
            env: Variables added to the environment of this process.
            grace: Seconds from SIGTERM to SIGKILL when the call is cancelled.
            lines: Receives its output; None leaves it to this process.

        Raises:
            ScriptFailed: The exit code is not 0, or a signal ended the command.
            OSError: The command could not be started.
        """
        await self._run(command, env, grace, " ".join(command[1:]) or command[0], lines)
        return 0

    @endpoint
    async def script(
        self,
        kind: str,
        words: Sequence[str],
        env: Mapping[str, str],
        grace: float = limits.GRACE_SECONDS,
        lines: Port[Lines] | None = None,
    ) -> int:
        """Run a script or module by the interpreter of this host; see `main`.

        Args:
            kind: "script" or "module".
            words: Path or name, and arguments.
            env: See `main`.
            grace: See `main`.
            lines: See `main`.
        """
        name = " ".join(["-m", *words] if kind == "module" else words)
        await self._run([sys.executable, child.__file__, kind, *words], env, grace, name, lines)
        return 0

    @endpoint
    async def call(
        self,
        work: bytes,
        name: str,
        env: Mapping[str, str],
        grace: float = limits.GRACE_SECONDS,
        lines: Port[Lines] | None = None,
    ) -> bytes:
        """Run a function in a separate interpreter; `trimesh.spmd.child` has the formats of `work` and the result.

        Raises:
            ScriptFailed: The child ended without a result.
            BaseException: Raised by the function.
        """
        reader, writer = os.pipe()
        answer = bytearray()
        failed: ScriptFailed | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read, reader, answer)
            try:
                command = [sys.executable, child.__file__, "function", str(writer)]
                await self._run(command, env, grace, name, lines, stdin=work, pass_fds=(writer,))
            except* ScriptFailed as group:
                [failed] = cast("tuple[ScriptFailed]", group.exceptions)
            finally:
                os.close(writer)
        if failed is None:
            return bytes(answer)
        error = pickle.loads(answer) if answer else None
        if not isinstance(error, BaseException):  # it was ended before its result, or after it
            raise failed
        add_note(error, failed.stderr_tail.rstrip())
        raise error

    async def _run(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        grace: float,
        name: str,
        lines: Port[Lines] | None,
        **options: Any,
    ) -> None:
        """Run a command; keep the tail of its standard error for an error."""
        with tempfile.TemporaryDirectory(prefix="trimesh-spmd-") as folder:
            error_file = Path(folder) / "error.json"
            options["grace"] = grace
            options["env"] = {**_defaults(env), **env, "TORCHELASTIC_ERROR_FILE": str(error_file)}
            if lines is None:
                code, tail = await _run_teed(command, options)
            else:
                with closing(lines):
                    piped = PipedCommand(lines, int(env["RANK"]), tail_bytes=limits.SPMD_STDERR_TAIL_BYTES)
                    code, tail = await piped.run(list(command), **options), piped.last_words
            if code:
                text = _recorded(error_file) or tail.read().decode(errors="replace")
                raise ScriptFailed(name, code, text)


async def _run_teed(command: Sequence[str], options: Mapping[str, Any]) -> tuple[int, Tail]:
    """Run a command, and forward its standard error to that of this process; return its exit code and the tail."""
    tail = Tail(limits.SPMD_STDERR_TAIL_BYTES)
    reader, writer = os.pipe()
    done: list[subprocess.CompletedProcess[bytes]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_tee, reader, tail)
        try:
            given: dict[str, Any] = {"stdin": subprocess.DEVNULL, **options}
            done.append(await run_process(command, check=False, stderr=writer, **given))
        finally:
            os.close(writer)
    return done[0].returncode, tail


def _defaults(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program before `env` is added: defaults, and that of this process over them."""
    defaults = {"PYTHONUNBUFFERED": "1"}  # lines appear when they are printed
    if env.get("LOCAL_WORLD_SIZE", "1") != "1":
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun: each rank would take all cores
    return {**defaults, **os.environ}


def _recorded(path: Path) -> str:
    """Return the error that torch's `record` wrote for a program, or ""."""
    try:
        message = json.loads(path.read_bytes())["message"]
        return str(message if isinstance(message, str) else message["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


async def _tee(reader: int, tail: Tail) -> None:
    """Forward the standard error of a program until no process has it open."""
    write = partial(os.write, sys.stderr.fileno())
    async with trio.lowlevel.FdStream(reader) as stream:
        async for some in stream:
            tail.feed(bytes(some))
            await trio.to_thread.run_sync(write, some)  # it may be a slow pipe


async def _read(reader: int, into: bytearray) -> None:
    async with trio.lowlevel.FdStream(reader) as stream:
        async for some in stream:
            into += some


# ---- errors ----------------------------------------------------------------------------------------------------------


class ScriptFailed(MeshError):
    """The program of a rank failed.

    Attributes:
        program: The script, module or function.
        exit_code: Its exit code, or None when a signal ended it.
        signal: Number of the signal that ended it, or None.
        stderr_tail: Last lines of its standard error, at most `limits.SPMD_STDERR_TAIL_BYTES`: the traceback, or the
            error that `torch.distributed.elastic.multiprocessing.errors.record` wrote.
    """

    def __init__(self, program: str, returncode: int, stderr_tail: str = "") -> None:
        super().__init__(program, returncode, stderr_tail)
        self.program = program
        self.exit_code = returncode if returncode >= 0 else None
        self.signal = -returncode if returncode < 0 else None
        self.stderr_tail = stderr_tail

    @property
    def summary(self) -> str:
        """The text without the standard error: `train.py exited with 1`."""
        how = f"exited with {self.exit_code}" if self.signal is None else f"was ended by {_name(self.signal)}"
        return f"{self.program} {how}"

    def __str__(self) -> str:
        tail = self.stderr_tail.rstrip()
        return self.summary + (f"; the end of its standard error:\n{tail}" if tail else "")


def how_failed(error: BaseException) -> str:
    """Return the failure of a rank in one line: `rank 1 on n1: train.py exited with 1`."""
    at = origin(error)
    where = "" if at is None or at.point is None else f"rank {at.point.rank} on {at.host}: "
    text = error.summary if isinstance(error, ScriptFailed) else f"{type(error).__name__}: {error}".partition("\n")[0]
    return where + text


def _name(signum: int) -> str:
    try:
        return signals.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
