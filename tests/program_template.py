"""A process that has imported torch, and runs a program in a copy of itself whenever a test needs it.

Torch takes each interpreter seconds of a processor to import, and a program that uses it is many: itself, its spawner,
and each worker, for what a DTensor imports late. The tests of what such programs print run dozens. Each is given a copy
of an interpreter that has imported all that and done nothing; so is its spawner. Nothing else is shared. Tests of how
programs start and end execute theirs, and all do when CI_FULL is set.

    pytest --exec--> template --fork--> program --fork--> template of its spawners
                                           |--clone(CLONE_PARENT)--> spawner --fork--> worker
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.spawner_template import FIRST_BLOCK, IS_POSSIBLE, REQUEST_BYTES_MAX, SpawnerTemplate
from tests.spawner_template import serve as serve_spawners
from tests.told_losses import tell_losses

from trimesh._runtime.spawner import process as spawner_process
from trimesh._runtime.system import prctl

LATE = (
    *FIRST_BLOCK,
    "torch.distributed.tensor",
    "torch._dynamo",
    "trimesh._runtime.life.local_host",
    "trimesh._transport.native.transport",
    "trimesh.tensor.session.service",
)
"""What programs with torch import before or while they compute, each in itself and in its workers. The two of torch are
imported late, by a DTensor and by a fake tensor, and take seconds."""

BOOT = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[2:]; "
    "from tests.program_template import serve; serve(int(sys.argv[1]))"
)

Run = Callable[..., subprocess.CompletedProcess[str]]
"""Runs a program with options, in the folder `cwd`, for `seconds` at most; see `ProgramTemplate.run`."""


@contextlib.contextmanager
def running() -> Generator[Run, None, None]:
    """Run programs in copies of one interpreter, where that is possible."""
    if not IS_POSSIBLE:
        yield executed
        return
    with contextlib.closing(ProgramTemplate()) as template:
        yield template.run


def executed(
    program: Path, *options: str, cwd: Path, seconds: float, losses: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program as a user does; its losses are not told."""
    del losses
    command = [sys.executable, program, *options]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False)


class ProgramTemplate:
    """The template as pytest's process sees it; `close` ends it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **spawner_process.ONE_THREAD, prctl.MARKER: prctl.marker_of(0, 0)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._socket.recv(REQUEST_BYTES_MAX), "the template of programs has not started"

    def run(
        self, program: Path, *options: str, cwd: Path, seconds: float, losses: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program and return what came of it.

        Args:
            program: It.
            options: For it.
            cwd: Its folder.
            seconds: How long it may take.
            losses: A file for each `HostLost` that it makes, see `tests.told_losses`.

        Raises:
            TimeoutError: It took longer than that; it has been killed.
        """
        command = [str(program), *options]
        with contextlib.ExitStack() as stack:
            said = [stack.enter_context(open(os.memfd_create(name), "w+b")) for name in ("out", "err")]
            request = {"command": command, "cwd": str(cwd), "losses": "" if losses is None else str(losses)}
            socket.send_fds(self._socket, [pickle.dumps(request)], [file.fileno() for file in said])
            self._socket.settimeout(seconds)
            try:
                answer = self._socket.recv(REQUEST_BYTES_MAX)
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
                raise
            assert answer, "the template of programs has ended"
            texts = [_all_of(file) for file in said]
        return subprocess.CompletedProcess(command, int(answer), *texts)

    def close(self) -> None:
        """End the template and reap it."""
        self._socket.close()
        self._process.wait()


def _all_of(file: Any) -> str:
    file.seek(0)
    return str(file.read(), "utf-8")


# ---- in the template -------------------------------------------------------------------------------------------------


def serve(number: int) -> NoReturn:
    """Fork a program for each request and tell how it ended, until nobody is there to ask."""

    for name in LATE:
        importlib.import_module(name)

    requests = socket.socket(fileno=number)
    requests.send(b"here")
    gc.freeze()  # the collector of a program does not touch, and so does not copy, what all share
    while True:
        data, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 2)
        if not data:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            requests.close()
            request = pickle.loads(data)
            become(request["command"], request["cwd"], fds, request["losses"])
        for fd in fds:
            os.close(fd)
        requests.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


class ForkedTemplate(SpawnerTemplate):
    """A template of the spawners of this process, which is a fork of it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
        self._owner = os.getpid()
        self._execute = spawner_process._execute
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            serve_spawners(theirs.detach(), ())
        theirs.close()
        assert self._socket.recv(REQUEST_BYTES_MAX), "the template of spawners has not started"

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self._pid, 0)


def become(command: Sequence[str], cwd: str, fds: Sequence[int], losses: str = "") -> NoReturn:
    """Run a program in this copy as an interpreter runs a script, and end with its exit status."""
    os.chdir(cwd)
    for number, fd in enumerate(fds, 1):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.pop(prctl.MARKER)
    spawners = ForkedTemplate()
    spawner_process._execute = spawners.execute  # type: ignore[assignment]
    if losses:
        tell_losses(losses)
    gc.enable()
    sys.argv[:] = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    status = _run(command[0])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpid() == spawners._owner:
        spawners.close()
    os._exit(status)


def _run(path: str) -> int:
    """Run a script as `__main__` and return its exit status."""
    main = ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        return int(error.code or 0)
    except BaseException:  # noqa: BLE001 - told as an interpreter does
        traceback.print_exc()
        return 1
    return 0
