"""A controller script in a process of its own, as a test runs and watches it."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.lifetime import processes
from tests.lifetime.processes import Process, look
from tests.patience import HANG_SECONDS
from tests.spawner_template import SpawnerTemplate

ROOT = Path(__file__).parents[2]
MARK_CHARS = 16
PROGRAMS = Path(__file__).parent / "programs"


template: SpawnerTemplate | None = None
"""What programs of the test that runs are copies of; they are executed without it, or if the interpreter gets flags."""


class CopiedProgram:
    """A script in a copy of the template: of `subprocess.Popen` what is used here."""

    def __init__(
        self, template: SpawnerTemplate, command: Sequence[str], out: int, err: int, env: Mapping[str, str]
    ) -> None:
        theirs, ours = os.pipe()
        try:
            self._copy = template.copy(
                command[0], (theirs, out, err), env, arguments=command[1:], shown=[processes.MARKER]
            )
        finally:
            os.close(theirs)
        self.pid = self._copy.pid
        self.stdin = open(ours, "wb")  # noqa: SIM115 - closed by the program's owner
        self.wait = self._copy.wait


class Program:
    """A running script of `tests/lifetime/programs`; leaving the context ends whatever is left of it.

    Args:
        folder: For its output and its stage.
        name: Of the script.
        plan: What it is told, see `stage.plan`.
        env: Variables set on top of this process's own.
        flags: For the interpreter.

    Attributes:
        mark: What its processes carry in their environment.
        process: The controller.
        heard: All events so far, in order.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        plan: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        programs: Path = PROGRAMS,
    ) -> None:
        self.mark = secrets.token_hex(MARK_CHARS // 2)
        self.heard: list[dict[str, Any]] = []
        self._unread: deque[dict[str, Any]] = deque()
        self._partial = b""
        self._files = folder / self.mark
        self._files.mkdir()
        stage = self._files / "stage"
        os.mkfifo(stage)
        stage.chmod(0o666)  # for programs that become another user
        self._stage = os.open(stage, os.O_RDWR | os.O_NONBLOCK)
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        path = os.pathsep.join([str(ROOT / "src"), str(PROGRAMS)])
        marks = {processes.MARKER: self.mark, "TRIMESH_TEST_STAGE": str(stage), "PYTHONPATH": path}
        variables = {**inherited, **marks, **(env or {})}
        command = [str(programs / f"{name}.py"), json.dumps(plan or {})]
        with (self._files / "stdout").open("wb") as out, (self._files / "stderr").open("wb") as err:
            self._popen: subprocess.Popen[bytes] | CopiedProgram
            if template is not None and not flags:
                self._popen = CopiedProgram(template, command, out.fileno(), err.fileno(), variables)
            else:
                self._popen = subprocess.Popen(
                    [sys.executable, *flags, *command],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=err,
                    env=variables,
                    start_new_session=True,
                )
        self.pidfd = os.pidfd_open(self._popen.pid)
        process = look(self._popen.pid)
        assert process is not None
        self.process: Process = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        processes.kill_family(self.mark)
        self.process.signal(signal.SIGKILL)  # a copy that has not yet been marked
        self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        for fd in (self._stage, self.pidfd):
            os.close(fd)

    @property
    def pid(self) -> int:
        """Of the controller."""
        return self._popen.pid

    @property
    def stdout(self) -> str:
        """What came out so far."""
        return (self._files / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What came out so far."""
        return (self._files / "stderr").read_text(errors="replace")

    # ---- speaking ----------------------------------------------------------------------------------------------------

    def event(self, *names: str, seconds: float = HANG_SECONDS) -> dict[str, Any]:
        """Return the next event with one of these names that was not returned before; others stay for later."""
        deadline = time.monotonic() + seconds
        while True:
            for found in self._unread:
                if found["event"] in names:
                    self._unread.remove(found)
                    return found
            # "left" is said after "raised": a look in between must not take the one for the absence of the other.
            if "left" not in names and any(found["event"] == "raised" for found in self._unread):
                raise AssertionError(f"no event {' or '.join(names)} before the end of the block; {self.account()}")
            self._listen(names, deadline)

    def events(self, name: str, count: int) -> list[dict[str, Any]]:
        """Return the next `count` events called `name`."""
        return [self.event(name) for _ in range(count)]

    def said(self, name: str) -> list[dict[str, Any]]:
        """Return all events called `name` that have come until now."""
        self._drain()
        return [found for found in self.heard if found["event"] == name]

    def say(self, word: str) -> None:
        """Tell the controller, which `hear`s it."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(word.encode() + b"\n")
        self._popen.stdin.flush()

    def _listen(self, names: Sequence[str], deadline: float) -> None:
        if self._drain():
            return
        poll = select.poll()
        poll.register(self._stage, select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        left = deadline - time.monotonic()
        ready = [fd for fd, _ in poll.poll(max(left, 0) * 1000)]
        if not self._drain() and (self.pidfd in ready or left <= 0):
            why = "the program ended" if self.pidfd in ready else "it did not come in time"
            raise AssertionError(f"no event {' or '.join(names)}: {why}; {self.account()}")

    def _drain(self) -> bool:
        try:
            data = os.read(self._stage, 65_536)
        except BlockingIOError:
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        new = [json.loads(line) for line in lines]
        self.heard += new
        self._unread += new
        return bool(new)

    # ---- watching ----------------------------------------------------------------------------------------------------

    def family(self) -> set[Process]:
        """Return its running processes, the controller included."""
        return processes.family(self.mark)

    def named(self, prefix: str) -> list[Process]:
        """Return its running processes whose kernel name begins so, oldest first."""
        found = [process for process in self.family() if process.name.startswith(prefix)]
        return sorted(found, key=lambda process: (process.started, process.pid))

    @property
    def spawner(self) -> Process:
        """Its only spawner; a worker that has just been forked has that name, too."""
        [found] = [process for process in self.named("trimesh-spawner") if process.parent == self.pid]
        return found

    def send(self, signum: int) -> None:
        """Signal the controller."""
        signal.pidfd_send_signal(self.pidfd, signum)

    def stop_for(self, work: Callable[[], object]) -> None:
        """Keep the controller stopped while `work` runs."""
        self.send(signal.SIGSTOP)
        try:
            work()
        finally:
            self.send(signal.SIGCONT)

    def wait(self, seconds: float = HANG_SECONDS) -> int:
        """Wait for the end of the controller; return its exit code, negative for a signal."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the program did not end in {seconds} s; {self.account()}") from None

    def check_gone(self, besides: Sequence[int] = ()) -> None:
        """Wait until nothing of the family runs.

        Args:
            besides: Pids that were once told; they must be gone, too.
        """
        left = processes.wait_family_ended(self.mark, HANG_SECONDS)
        assert not left, f"left behind after {HANG_SECONDS} s: {', '.join(map(str, left))}; {self.account()}"
        still = [found for pid in besides if (found := look(pid)) is not None and found.parent == self.pid]
        assert not still, f"left behind: {still}"

    def kill_and_check(self, signum: int = signal.SIGKILL, *, kept: Collection[Process] = ()) -> None:
        """Signal the controller, and wait until all but `kept` has ended."""
        before = self.family()
        self.send(signum)
        left = processes.wait_family_ended(self.mark, HANG_SECONDS, before, kept)
        assert not left, f"left behind after {HANG_SECONDS} s: {', '.join(map(str, left))}; {self.account()}"
        self.wait()

    def account(self) -> str:
        """Return all that is known, for the text of a failure."""
        running = "\n".join(f"  {process}" for process in self.family())
        events = "\n".join(f"  {event}" for event in self.heard[-20:])
        return f"events:\n{events}\nrunning:\n{running}\nstdout:\n{self.stdout}\nstderr:\n{self.stderr}"
