"""Begin and end of a worker process: from the fork (or exec) to its entry, and from there to `os._exit`.

    spawner forks --> run_forked --+--------------------------------> enter --> entry(...) --> end_process
                                   +--> exec `python`, main (here) --^

Everything here runs in the new process, before any other code of it. A failure before `enter` is done is reported to
the spawner (`SetupRefused`) and nothing of the process is left; a later one is the entry's own traceback on stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import msgspec

from trimesh import limits
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.inheritance import Privileges, assume
from trimesh._runtime.spawner.socket import BrokerSocket, memfd_of, read_exactly
from trimesh._runtime.system import linux, records
from trimesh._runtime.system.forks import carry_script, keep_trackers
from trimesh._runtime.system.seeds import ProcSeeds
from trimesh.errors import ProtocolError, leaves

EXIT_REFUSED: Final = 71
"""Exit code of a process whose set-up failed (EX_OSERR); the spawner reports the text instead."""

_REFUSAL_CHARS_MAX: Final = 16_384

_BOOT: Final = (
    "import sys; sys.path[:] = [path for path in sys.path if path] + sys.argv[1:2]; "
    "from trimesh._runtime.spawner.boot import main; main(sys.argv[2:])"
)
"""Program of an executed worker: the interpreter's own trimesh comes first, the caller's is the fallback."""


class WorkerStart(msgspec.Struct, frozen=True):
    """Parameters of a forked child that becomes a worker. Descriptors are its own.

    Attributes:
        link: Stream socket to the owner.
        broker: Broker socket to the spawner.
        lifelines: pidfds of controller, spawner, and the owner when that is a worker.
        stdout, stderr: Pipes to the spawner, where the output mode has them.
        kept: Descriptors of modules that the spawner has imported; everything else is closed.
        preload_env: Variables set by imported modules; the caller's own override them.
        handled_signals: Reset to their defaults.
        spawner_pid: Used to notice a spawner that has ended meanwhile.
        privileges: Those of the requesting process; the new one gets no others.
    """

    launch: wire.Launch
    link: int
    broker: int
    lifelines: tuple[int, ...]
    stdout: int | None
    stderr: int | None
    kept: frozenset[int]
    preload_env: Mapping[bytes, bytes]
    handled_signals: tuple[int, ...]
    spawner_pid: int
    privileges: Privileges
    marker: linux.ProcessMarker


def run_forked(start: WorkerStart) -> NoReturn:
    """Run the worker; called in the child right after the fork, at the bottom of the stack."""
    broker = BrokerSocket(socket.socket(fileno=start.broker))
    try:
        leave_spawner(start)
        take_privileges(start)
        take_over(start.launch, start.preload_env, start.marker.family)
        _place_streams(start.launch)
        if start.launch.python:
            _execute(start)
        _become_program(start.launch)
        _print_whole_lines()
        set_thread_counts(os.environ)
        entry = enter(start.launch)
    except BaseException as error:  # noqa: BLE001 - any failure must be reported to the spawner and end the child
        _refuse(broker, error)
    run_entry(entry, start.launch.config, start.link, broker, list(start.lifelines))


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the worker; called by the program of an executed one.

    Args:
        arguments: Descriptors of the launch record, the link, the broker socket; lifelines, separated by commas.
    """
    launch_fd, link, broker_fd = (int(argument) for argument in arguments[:3])
    lifelines = [int(fd) for fd in arguments[3].split(",") if fd]
    for fd in (link, broker_fd, *lifelines):
        os.set_inheritable(fd, False)  # noqa: FBT003
    broker = BrokerSocket(socket.socket(fileno=broker_fd))
    try:
        launch = wire.decode(read_exactly(launch_fd, os.fstat(launch_fd).st_size))
        os.close(launch_fd)
        if not isinstance(launch, wire.Launch):
            raise ProtocolError(f"an executed worker must start from a Launch record, got {type(launch).__name__}")
        _name_process(launch.config)
        merge_sys_path(launch.context)
        _print_whole_lines()
        keep_trackers()
        carry_script()
        entry = enter(launch)
    except BaseException as error:  # noqa: BLE001 - see run_forked
        _refuse(broker, error)
    run_entry(entry, launch.config, link, broker, lifelines)


# ---- the process -----------------------------------------------------------------------------------------


def leave_spawner(start: WorkerStart) -> None:
    """Leave the spawner's session, descriptors and signal handling behind."""
    os.setsid()
    linux.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != start.spawner_pid:
        os._exit(EXIT_REFUSED)  # the spawner is gone, and with it every reader of a report
    _reset_signals(start.handled_signals)
    config = start.launch.config
    start.marker.write(config.proc_id)
    _name_process(config)
    for fd, target in ((start.stdout, 1), (start.stderr, 2)):
        if fd is not None:
            os.dup2(fd, target)
    linux.close_others({0, 1, 2, start.link, start.broker, *start.lifelines, *start.kept})


def take_privileges(start: WorkerStart) -> None:
    """Adopt the privileges of the requesting process, before anything else of the request is read.

    Raises:
        RefusalError: This process would keep privileges that the requesting process lacks.
    """
    found = assume(start.privileges)
    if found:
        raise RefusalError(
            "a new process must not have more privileges than the process that spawns it, but could not adopt "
            f"{found}: spawn before those are given up, or let the controller spawn"
        )
    linux.set_parent_death_signal(signal.SIGKILL)  # the kernel forgets it when users or capabilities change
    if os.getppid() != start.spawner_pid:
        os._exit(EXIT_REFUSED)


def handled_signals() -> tuple[int, ...]:
    """Return the signals that this process handles in Python."""
    return tuple(number for number in signal.valid_signals() if callable(signal.getsignal(number)))


def _reset_signals(handled: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in handled:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a fresh interpreter; Trio checks for it
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _name_process(config: records.WorkerConfig) -> None:
    linux.set_process_name(f"{config.mesh[:9]}.{config.rank}")


def take_over(launch: wire.Launch, preload_env: Mapping[bytes, bytes], family: int) -> None:
    """Adopt environment, working directory, limits and umask of the caller (rule O2)."""
    context, config = launch.context, launch.config
    marker = linux.marker_of(family, config.proc_id).encode()
    env = {**preload_env, **context.env, linux.MARKER.encode(): marker}
    before = dict(os.environb)
    for name in before.keys() - env.keys():
        del os.environb[name]
    for name, value in env.items():
        if before.get(name) != value:
            os.environb[name] = value
    if before.get(b"TZ") != env.get(b"TZ"):
        time.tzset()
    os.umask(context.umask)
    _set_limits(context.rlimits)
    if launch.cpus:
        try:
            os.sched_setaffinity(0, launch.cpus)
        except OSError as error:
            raise RefusalError(f"cannot run on the CPUs {', '.join(map(str, launch.cpus))} alone: {error}") from None
    if context.cwd:
        try:
            os.chdir(context.cwd)
        except OSError as error:
            raise RefusalError(f"cannot enter the working directory {os.fsdecode(context.cwd)!r}: {error}") from None


def _set_limits(wanted: Sequence[tuple[int, int, int]]) -> None:
    for number, soft, hard in wanted:
        try:
            now = resource.getrlimit(number)
            if now != (soft, hard):
                resource.setrlimit(number, (soft, hard))
        except (ValueError, OSError):  # raising a hard limit needs rights; the soft one still counts
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))


def _place_streams(launch: wire.Launch) -> None:
    """Open streams other than pipes: a file for both streams, or nothing for standard output."""
    if launch.output == "discard":
        fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(fd, 1)
        os.close(fd)
    elif launch.output == "file":
        path = os.fsdecode(launch.output_path)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise RefusalError(f"cannot open {path!r} for the output of the process: {error}") from None
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)


def _execute(start: WorkerStart) -> NoReturn:
    python = os.fsdecode(start.launch.python)
    record = memfd_of(wire.encode(start.launch))
    for fd in (record, start.link, start.broker, *start.lifelines):
        os.set_inheritable(fd, True)  # noqa: FBT003
    is_same = Path(python).resolve() == Path(sys.executable).resolve()
    flags = subprocess._args_from_interpreter_flags() if is_same else []  # type: ignore[attr-defined]  # noqa: SLF001
    root = str(Path(__file__).parents[3])
    fds = [str(record), str(start.link), str(start.broker), ",".join(map(str, start.lifelines))]
    try:
        os.execvp(python, [python, *flags, "-c", _BOOT, root, *fds])  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise RefusalError(f"cannot execute the interpreter {python!r}: {error}") from None


# ---- the interpreter -------------------------------------------------------------------------------------


def _become_program(launch: wire.Launch) -> None:
    """Make the forked interpreter look like a fresh one that runs the caller's program."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:] = [os.fsdecode(path) for path in launch.context.sys_path]
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None:  # it was no folder when the spawner checked; it may be one now
            del sys.path_importer_cache[path]


def _print_whole_lines() -> None:
    """Write each line at once and in one piece: `PYTHONUNBUFFERED` alone lets others write before its end."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def merge_sys_path(context: wire.CallerContext) -> None:
    """Give an executed interpreter the caller's `sys.path`; another Python gets it without the caller's libraries."""
    theirs = [os.fsdecode(path) for path in context.sys_path]
    prefixes = [os.fsdecode(prefix) for prefix in context.prefixes]
    if context.version == sys.version_info[:2] and prefixes == own_prefixes():
        sys.path[:] = theirs
        return
    inside = tuple(prefix.rstrip("/") + "/" for prefix in prefixes)
    added = [path for path in theirs if not (path + "/").startswith(inside) and path not in sys.path]
    sys.path[:0] = added


def own_prefixes() -> list[str]:
    """Return the folders of this Python installation."""
    return list(dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)))


def enter(launch: wire.Launch) -> Callable[..., int]:
    """Prepare the interpreter and return the entry."""
    faulthandler.enable(2)  # a crash in C leaves its Python stack in the last words
    sys.argv[:] = [os.fsdecode(argument) for argument in launch.context.argv]
    set_warning_filters(launch.context.filters)
    for name in launch.preload:
        import_preload(name)
    config = launch.config
    ProcSeeds.of(config.seed, config.mesh, config.rank, config.incarnation).plant()
    module, _, function = launch.entry.partition(":")
    return cast("Callable[..., int]", getattr(importlib.import_module(module), function))


def import_preload(name: str) -> None:
    """Import a module named by the user.

    Raises:
        RefusalError: The import failed; the text carries the traceback.
    """
    try:
        importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - a module may raise anything, SystemExit included
        raise RefusalError(f"cannot preload {name!r}:\n{traceback.format_exc()}") from None


def set_warning_filters(filters: Sequence[wire.WarningFilter]) -> None:
    """Set `warnings.filters`. One whose category is not loaded here is left out: it would import its module."""
    warnings.resetwarnings()
    for entry in filters:
        category: Any = sys.modules.get(entry.category_module)
        for part in entry.category_name.split("."):
            category = getattr(category, part, None)
        if isinstance(category, type) and issubclass(category, Warning):
            action = cast("Any", entry.action)
            warnings.filterwarnings(action, entry.message, category, entry.module, entry.line, append=True)


_THREAD_CALLS: Final = (
    # (part of the library's file name, variables that set its count, functions that set it)
    (
        "openblas",
        ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"),
        (
            "scipy_openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "openblas_set_num_threads64_",
            "openblas_set_num_threads",
        ),
    ),
    ("libmkl_rt", ("MKL_NUM_THREADS", "OMP_NUM_THREADS"), ("MKL_Set_Num_Threads",)),
    ("libgomp", ("OMP_NUM_THREADS",), ("omp_set_num_threads",)),
    ("libiomp", ("OMP_NUM_THREADS",), ("omp_set_num_threads",)),
    ("libomp", ("OMP_NUM_THREADS",), ("omp_set_num_threads",)),
)


def set_thread_counts(env: Mapping[str, str]) -> None:
    """Set thread counts of libraries that were loaded before the fork with one thread (rule O2).

    Libraries loaded later read the environment themselves.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        count = _thread_count(env, ("OMP_NUM_THREADS",))
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
    for path in _loaded_libraries():
        name = path.rpartition("/")[2]
        for part, variables, functions in _THREAD_CALLS:
            if part in name:
                count = _thread_count(env, variables)
                if count > 1:
                    _call_first(path, functions, count)


def _thread_count(env: Mapping[str, str], variables: Sequence[str]) -> int:
    for variable in variables:
        first = env.get(variable, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return len(os.sched_getaffinity(0))


def _loaded_libraries() -> list[str]:
    if "numpy" not in sys.modules and "torch" not in sys.modules and "scipy" not in sys.modules:
        return []  # no numeric library is loaded: skip reading
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    columns = (line.split(maxsplit=5) for line in maps.splitlines())
    return sorted({parts[5] for parts in columns if len(parts) == 6 and ".so" in parts[5]})


def _call_first(path: str, functions: Sequence[str], count: int) -> None:
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return
    for name in functions:
        function = getattr(library, name, None)
        if function is not None:
            function(ctypes.c_int(count))
            return


# ---- entry and end ---------------------------------------------------------------------------------------


class RefusalError(Exception):
    """Set-up failed for a reason that the text states in full; it is reported without a traceback."""


def _refuse(broker: BrokerSocket, error: BaseException) -> NoReturn:
    text = str(error) if isinstance(error, RefusalError) else "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):  # the spawner is gone: there is no reader
        broker.send(wire.SetupRefused(text[-_REFUSAL_CHARS_MAX:]))
    os._exit(EXIT_REFUSED)


def run_entry(
    entry: Callable[..., int],
    config: records.WorkerConfig,
    link: int,
    broker: BrokerSocket,
    lifelines: list[int],
) -> NoReturn:
    """Report to the spawner that the worker has entered, run its entry, end the process."""
    code, signum = 1, None
    owner = socket.socket(fileno=link)  # kept until the end, which closes everything
    try:
        broker.send(wire.Entered())
        code = entry(config, owner, broker.socket, lifelines)
    except SystemExit as error:
        code = _code_of(error)
    except BaseException as error:  # noqa: BLE001 - the last frame of the process
        if _is_interrupt(error):
            signum = signal.SIGINT
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    end_process(code, signum)


def _is_interrupt(error: BaseException) -> bool:
    """Return whether only a Ctrl-C has ended the main task; Trio wraps it once for each nursery."""
    return all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error))


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{error.code}\n")
    return 1


# ---- end of a worker (rule O3): threads, `atexit` functions, finalizers, flushed streams, `os._exit` -----------------


def end_process(code: int, signum: int | None = None) -> NoReturn:
    """End the process (rule O3): threads (bounded), atexit functions, flush, `os._exit`, without finalising Python.

    Args:
        code: Exit code, cut to 8 bits.
        signum: Signal whose default action ends the process instead, so that its exit status shows the cause.
    """

    def expire(_signum: int, _frame: types.FrameType | None) -> None:
        current = threading.current_thread()
        names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not current]
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(
                f"trimesh: the process ends although these threads still run {limits.THREAD_SHUTDOWN_SECONDS} s after "
                f"its main thread: {', '.join(names)}\n"
            )
        # From within the wait: how an exception would come out of it differs between Python versions.
        _leave(code, signum)

    try:
        signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, limits.THREAD_SHUTDOWN_SECONDS)
        # As finalisation does: ask pools to end, then wait for threads that are not daemons.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:  # noqa: BLE001 - a broken hook of a module must not keep the process
        sys.excepthook(type(error), error, error.__traceback__)
    _leave(code, signum)


def _leave(code: int, signum: int | None) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        atexit._run_exitfuncs()  # noqa: SLF001 - what the interpreter itself calls
        if signum is None:
            _finalize_cycles(code)
    finally:
        _flush()
        if signum is not None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        os._exit(code & 0xFF)


def _finalize_cycles(code: int) -> None:
    """Run `__del__` and finalizers of objects that only reference cycles keep, such as actors.

    One that does not return is cut off after `limits.FINALIZE_SECONDS`.
    """

    def expire(*_: object) -> NoReturn:
        _flush()
        os._exit(code & 0xFF)

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limits.FINALIZE_SECONDS)
    gc.collect()
    signal.setitimer(signal.ITIMER_REAL, 0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a reader that is gone, a stream that was closed
            stream.flush()
