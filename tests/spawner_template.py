"""A process that has imported what a spawner and an agent import, and forks one whenever a test needs it.

To start a mesh takes a quarter of a second of a processor, four fifths of it because the spawner is a new interpreter.
The tests of what meshes do start a thousand; they are given a copy of an interpreter that has imported everything and
done nothing. That starts nothing as users do, so tests of whole programs execute their spawners (`tests/conftest.py`
says which do not), some of starts and ends (marker `executed`), and all when CI_FULL is set. So it is with agents, see
`tests.agent_copies`, and with programs of tests about ends, see `tests.lifetime.program`: their spawners are executed.

    pytest --exec--> template --clone(CLONE_PARENT)--> spawner --fork--> worker
                        |-----clone(CLONE_PARENT)--> agent --fork--> spawner --fork--> worker
                        |-----clone(CLONE_PARENT)--> program --exec--> spawner --fork--> worker

A copy is a child of pytest's process, not of the template: whoever reaps it, its pidfd and its parent-death signal are
those of a spawner that was executed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import pickle
import platform
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from trimesh._runtime.spawner import spawner_process
from trimesh._runtime.system import linux
from trimesh.config import layers as settings

ROOT = str(Path(__file__).parents[1])

CLONE_PARENT = 0x8000
CLONE_NEWNET = 0x40000000
CLONE_CALLS = {"x86_64": 56, "aarch64": 220}
"""The number of `clone` on the machines where the template works; its arguments differ elsewhere."""

IS_POSSIBLE = platform.machine() in CLONE_CALLS and not os.environ.get("CI_FULL")

REQUEST_BYTES_MAX = 1 << 18
"""An environment and `sys.path`: some ten thousand bytes, and whatever a test adds."""

FDS_MAX = 16
"""Three streams, a folder, and what a spawner is passed."""

FIRST_BLOCK = (
    "trimesh._runtime.holds",
    "trimesh._runtime.life.proc",
    "trimesh._runtime.life.tracing",
    "trimesh._runtime.snapshot",
    "trimesh._runtime.services.bulk",
    "trimesh._runtime.services.linked_moves",
    "trimesh._runtime.watch.events",
)
"""What each process imports with its first block, after it was forked."""

HOSTS = ("trimesh.cli.main", "trimesh.cli.jobs", "trimesh.jobs.agent", "trimesh.jobs.local")
"""What agents are, and import."""

WARM = (
    *FIRST_BLOCK,
    "pytest",
    *(HOSTS if importlib.util.find_spec("cryptography") else ()),
    *(("numpy",) if importlib.util.find_spec("numpy") else ()),
    "tests.conformance.meshes",
    "tests.conformance.probe",
    "tests.conformance.supervised",
)
"""What the modules of the tests import, and with them each worker that is to find an actor in one."""

WARM_WITH_TORCH = (*WARM, "torch.distributed.tensor", "torch._dynamo", "trimesh.tensor.session.service")
"""The same for tests that need torch, which takes each process a second to import; `torch._dynamo` takes another one of
each process that makes a DTensor, or a fake tensor."""

PROGRAMS = (
    *FIRST_BLOCK,
    "tests.lifetime.program_modules",
    "trimesh._runtime.life.local_host",
    "trimesh._transport.native.transport",
)
"""What the programs of `tests.lifetime.program` import."""

BOOT = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[3:]; "
    "from tests.spawner_template import serve; serve(int(sys.argv[1]), sys.argv[2].split(','))"
)


class Copy:
    """A spawner that was forked, as far as `SpawnerProcess` looks at a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
            finally:
                os.close(pidfd)
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class SpawnerTemplate:
    """The template as pytest's process sees it; it ends when this process does, or by `close`.

    It is made on the main thread: that is the parent whose death its copies notice.
    """

    def __init__(self, env: Mapping[str, str], modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
        self._owner = os.getpid()
        self._execute = spawner_process._execute
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", BOOT, str(theirs.fileno()), ",".join(modules), *sys.path],
                stdin=subprocess.DEVNULL,
                env={**env, **spawner_process.ONE_THREAD, linux.MARKER: linux.marker_of(0, 0)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # One that is only being executed was missed once by a listing of /proc, and then counted as a test's.
        assert self._socket.recv(REQUEST_BYTES_MAX), "the template of spawners has not started"

    def execute(self, passed: list[int], streams: list[int | None], root_id: int) -> Any:
        """Do what `spawner_process._execute` does, which a test replaces by this."""
        if os.getpid() != self._owner:  # a fork of the test: a copy would not be its child
            return self._execute(passed, streams, root_id)
        env = {**os.environ, **spawner_process.ONE_THREAD}
        standard = [None, *(number if wanted is None else None for number, wanted in enumerate(streams, 1))]
        return self.copy("", standard, env, root=root_id, passed=passed)

    def copy(
        self,
        entry: str,
        streams: Sequence[int | None],
        env: Mapping[str, str],
        *,
        arguments: Sequence[str] = (),
        network: str = "",
        root: int = 0,
        passed: Sequence[int] = (),
        shown: Sequence[str] = (),
    ) -> Copy:
        """Make a copy that leads a session.

        Args:
            entry: The function that it is, as "module:name", or the path of the script; "" for the spawner.
            streams: Its standard streams; None for nothing.
            env: Its environment.
            arguments: Its `sys.argv`.
            network: File of its network namespace; "" for that of the template.
            root: Of its family.
            passed: Descriptors of a spawner; those of a function follow its arguments.
            shown: Variables that /proc shows, too; the template was executed with values of the same length.
        """
        request = {
            "entry": entry,
            "env": dict(env),
            "arguments": list(arguments),
            "network": network,
            "root": root,
            "path": sys.path,
            "controller": os.getpid(),
            "shown": list(shown),
        }
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        here = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            standard = [nothing if stream is None else stream for stream in streams]
            socket.send_fds(self._socket, [pickle.dumps(request)], [*standard, here, *passed])
        finally:
            os.close(nothing)
            os.close(here)
        answer = self._socket.recv(REQUEST_BYTES_MAX)
        assert answer, "the template of spawners has ended"
        return Copy(int(answer))

    def close(self) -> None:
        """End the template and reap it."""
        self._hang_up()
        self._process.wait()

    def _hang_up(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # forks of this process have it, too: other templates
        self._socket.close()


class ForkedTemplate(SpawnerTemplate):
    """A template of the spawners of this process, which is a fork of it: a copy that is a program, or an agent."""

    @classmethod
    def of_this_process(cls) -> Self:
        """Make one, and have this process take its spawners from it."""
        made = cls()
        spawner_process._execute = made.execute  # type: ignore[assignment]
        return made

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
        self._owner = os.getpid()
        self._execute = spawner_process._execute
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            serve(theirs.detach(), ())
        theirs.close()
        assert self._socket.recv(REQUEST_BYTES_MAX), "the template of spawners has not started"

    def close(self) -> None:
        self._hang_up()
        os.waitpid(self._pid, 0)


# ---- in the template -------------------------------------------------------------------------------------------------


def serve(number: int, modules: Sequence[str]) -> None:
    """Fork a spawner for each request, until nobody is there to ask; return in a copy that is a script, and has run."""
    requests = socket.socket(fileno=number)
    requests.send(b"here")

    from trimesh._native import lib
    from trimesh._runtime.life import local_host
    from trimesh._runtime.spawner.loop import main

    lib.load()
    for name in modules:
        importlib.import_module(name)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, FDS_MAX)
        if not data:
            os._exit(0)
        pid = clone()
        if pid == 0:
            break
        for fd in fds:
            os.close(fd)
        requests.send(str(pid).encode())
    requests.close()
    del requests, local_host
    request = pickle.loads(data)
    become(request, fds[:4])
    if not request["entry"]:
        main([*map(str, fds[4:]), str(request["controller"])])
    if not request["entry"].endswith(".py"):
        be(request["entry"], [*request["arguments"], *map(str, fds[4:])])
    run(request["entry"], request["arguments"])


def run(path: str, arguments: Sequence[str]) -> None:
    """Run a script on the module `__main__` of this interpreter, which then ends as one does that was executed."""
    del os.environ[linux.MARKER]
    main = sys.modules["__main__"]
    for name in ("gc", "serve", "sys"):  # of `BOOT`
        delattr(main, name)
    main.__file__ = path
    sys.argv[:] = [path, *arguments]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(Path(path).parent), *given, *(folder for folder in sys.path if folder not in ("", ROOT))]
    gc.freeze()  # the collector does not touch, and so does not copy, what all share
    gc.enable()
    exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def be(entry: str, arguments: Sequence[str]) -> NoReturn:
    """Be what a function makes of this copy, which is to end the process, or to raise."""
    module, _, name = entry.partition(":")
    code = 0
    try:
        sys.argv[:] = arguments
        getattr(importlib.import_module(module), name)()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - it must not run on as the template
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def clone() -> int:
    """Fork this process, but make the copy a child of this one's parent; return 0 in the copy."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None)  # neither lets go of the interpreter's lock
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(CLONE_CALLS[platform.machine()], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    assert pid > 0, "this kernel makes no copies for the template of spawners; set CI_FULL to do without"
    return pid


def enter_network(path: str) -> None:
    """Move this process, of one thread, to a network namespace."""
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    os.close(namespace)


def show(name: str, value: str) -> None:
    """Write a variable where it was at the exec, which is what /proc shows."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(name.encode())
    assert len(ctypes.string_at(address)) == len(value)
    ctypes.memmove(address, value.encode(), len(value))


def become(request: dict[str, Any], fds: list[int]) -> None:
    """Make of a copy what the boot of an executed spawner makes of an interpreter."""
    os.setsid()
    os.fchdir(fds[3])
    if request["network"]:
        enter_network(request["network"])
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    marker = linux.ProcessMarker()
    marker.family = request["root"]
    marker.write(marker.family)  # in place, for what /proc shows is where it was at the exec
    env: dict[str, str] = request["env"]
    for name in request["shown"]:
        show(name, env[name])
    for name in os.environ.keys() - env.keys() - {linux.MARKER}:
        del os.environ[name]
    for name, value in env.items():
        if name != linux.MARKER and os.environ.get(name) != value:
            os.environ[name] = value
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    settings._base.settings = None  # a module of the tests has asked for them, and the environment is another one
    sys.modules.pop("tests.spawner_template", None)  # a copy of a copy has none
