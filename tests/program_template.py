"""Programs in copies of the template of spawners, which has imported what they do, whenever a test needs one.

Torch takes each interpreter seconds of a processor to import, and a program that uses it is many: itself, its spawner,
and each worker, for what a DTensor imports late. The tests of what such programs print run dozens. Each is given a copy
of an interpreter that has imported all that and done nothing; so are its spawners and its agents. Nothing else is
shared. Tests of how programs start and end execute theirs, and all do when CI_FULL is set.

    pytest --exec--> template of spawners
       |--clone(CLONE_PARENT)--> template --fork--> program --fork--> template of its spawners and agents
       |                                               |--clone(CLONE_PARENT)--> spawner --fork--> worker
       |--clone(CLONE_PARENT)--> script, likewise
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Self

from tests.agent_copies import copied_agents
from tests.spawner_template import REQUEST_BYTES_MAX, ForkedTemplate, SpawnerTemplate
from tests.told_losses import tell_losses

from trimesh._runtime.spawner import spawner_process
from trimesh._runtime.system import linux

Run = Callable[..., subprocess.CompletedProcess[str]]
"""Runs a program with options, in the folder `cwd`, for `seconds` at most; see `ProgramTemplate.run`."""


@contextlib.contextmanager
def running(template: SpawnerTemplate | None) -> Generator[Run, None, None]:
    """Run programs in copies of one interpreter, of a template of spawners; execute them without one."""
    if template is None:
        yield executed
        return
    with contextlib.closing(ProgramTemplate(template)) as programs:
        yield programs.run


def executed(
    program: Path, *options: str, cwd: Path, seconds: float, losses: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program as a user does; its losses are not told."""
    del losses
    command = [sys.executable, program, *options]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False)


class ProgramTemplate:
    """The template as pytest's process sees it; `close` ends it."""

    def __init__(self, template: SpawnerTemplate) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**os.environ, **spawner_process.ONE_THREAD}
        with theirs:
            self._process = template.copy(f"{__name__}:serve", (None, 1, 2), env, passed=[theirs.fileno()])
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


class CopiedScript:
    """A script that runs in a copy of the template of spawners: of `subprocess.Popen` what tests look at.

    Args:
        template: The one.
        path: Of the script.
        options: For it.
        has_input: Whether it gets a pipe as its standard input, or nothing.

    Attributes:
        pid: Of its process.
        stdin, stdout: Its streams.
    """

    def __init__(self, template: SpawnerTemplate, path: Path, *options: str, has_input: bool = False) -> None:
        with contextlib.ExitStack() as theirs:
            pipes = [os.pipe(), *([os.pipe()] if has_input else [])]
            ends = [pipes[0][1], *(read for read, _ in pipes[1:])]
            for end in ends:
                theirs.callback(os.close, end)
            streams = (ends[1] if has_input else None, ends[0], None)
            self._copy = template.copy(f"{__name__}:script", streams, os.environ, arguments=[str(path), *options])
        self.pid = self._copy.pid
        self.stdout = open(pipes[0][0])  # noqa: SIM115 - closed by `__exit__`
        self.stdin = open(pipes[1][1], "w") if has_input else None  # noqa: SIM115 - likewise
        self.wait = self._copy.wait
        self.kill = self._copy.kill

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        if self.stdin is not None:
            self.stdin.close()
        self.wait()


Script = subprocess.Popen[str] | CopiedScript
"""A script that runs."""

template: SpawnerTemplate | None = None
"""What scripts of the test that runs are copies of; they are executed without it."""


def open_script(path: Path, *options: str, before: Sequence[str] = (), has_input: bool = False) -> Script:
    """Start a script that is not to end before the test has looked at it.

    Args:
        path: Of it.
        options: For it.
        before: What stands before its command, which is executed then.
        has_input: Whether it gets a pipe as its standard input, or nothing.
    """
    if template is not None and not before:
        return CopiedScript(template, path, *options, has_input=has_input)
    return subprocess.Popen(
        [*before, sys.executable, path, *options],
        stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _all_of(file: Any) -> str:
    file.seek(0)
    return str(file.read(), "utf-8")


# ---- in the template -------------------------------------------------------------------------------------------------


def serve() -> NoReturn:
    """Fork a program for each request and tell how it ended, until nobody is there to ask."""
    requests = socket.socket(fileno=int(sys.argv[-1]))
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


def become(command: Sequence[str], cwd: str, fds: Sequence[int], losses: str = "") -> NoReturn:
    """Run a program in this copy as an interpreter runs a script, and end with its exit status."""
    os.chdir(cwd)
    for number, fd in enumerate(fds, 1):
        os.dup2(fd, number)
        os.close(fd)
    if losses:
        tell_losses(losses)
    _be(command)


def script() -> NoReturn:
    """Be the script that `sys.argv` names, in a copy of the template of spawners."""
    gc.freeze()
    _be(list(sys.argv))


def _be(command: Sequence[str]) -> NoReturn:
    os.environ.pop(linux.MARKER)
    spawners = ForkedTemplate.of_this_process()
    agents = copied_agents(spawners)
    agents.__enter__()  # it is left by the end of the process
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
    except BaseException as error:  # noqa: BLE001 - printed as an interpreter does, without the frame of this function
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
