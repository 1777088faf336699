"""Agents of tests as copies of the template of spawners, rather than interpreters of their own.

An agent that is executed takes half a second of a processor, and each of its workers then imports what the module of
the test does, pytest first of all: a quarter of one. A copy of the template has imported all that. It is a child of
pytest's process, with pipes, a session, an environment and, if need be, a network of its own, as an executed one is.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import trio
from tests.spawner_template import Copy, ForkedTemplate, SpawnerTemplate

NETWORK = "--net="
"""Of `nsenter`: the file of a namespace follows."""

TRIMESH = "trimesh.cli.main:main"
"""The command, as a function."""

current: SpawnerTemplate | None = None
"""That of the test that runs, if it has one."""


class CopiedProcess:
    """Of `trio.Process` what tests and launchers look at."""

    def __init__(self, copy: Copy, stdin: int | None = None, stderr: int | None = None) -> None:
        self.pid = copy.pid
        self.stdin = None if stdin is None else trio.lowlevel.FdStream(stdin)
        self.stderr = None if stderr is None else trio.lowlevel.FdStream(stderr)
        self._copy = copy
        self._pidfd = os.pidfd_open(copy.pid)
        self._lock = trio.Lock()

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal, once it has ended; reaps it."""
        if self._copy.returncode is None and os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self._copy.wait()
            trio.lowlevel.notify_closing(self._pidfd)
            os.close(self._pidfd)
        return self._copy.returncode

    async def wait(self) -> int:
        """Wait until it has ended."""
        async with self._lock:
            while (code := self.returncode) is None:
                with suppress(trio.ClosedResourceError):  # another task has reaped it
                    await trio.lowlevel.wait_readable(self._pidfd)
        return code

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it still runs."""
        if self.returncode is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Tell it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def copied(
    template: SpawnerTemplate, entry: str, arguments: Sequence[str], env: Mapping[str, str], network: str = ""
) -> CopiedProcess:
    """Start a copy with pipes for standard input and error; see `SpawnerTemplate.copy`."""
    with ExitStack() as theirs:
        stdin_there, stdin = os.pipe()
        theirs.callback(os.close, stdin_there)
        stderr, stderr_there = os.pipe()
        theirs.callback(os.close, stderr_there)
        copy = template.copy(entry, (stdin_there, 1, stderr_there), env, arguments=arguments, network=network)
    return CopiedProcess(copy, stdin, stderr)


async def open_trimesh(arguments: Sequence[str], env: Mapping[str, str]) -> CopiedProcess | trio.Process:
    """Run the command `trimesh` with pipes for standard input and error: a copy where the test has a template."""
    if current is not None:
        await trio.lowlevel.checkpoint()
        return copied(current, TRIMESH, ["-c", *arguments], env)
    command = [sys.executable, "-c", "from trimesh.cli.main import main; main()", *arguments]
    return await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=env)


def agent() -> None:
    """Be an agent whose spawners, if one that it has forked does not do, are copies, too."""
    from trimesh.jobs.agent import main

    ForkedTemplate.of_this_process()
    main()


def agents() -> None:
    """Be a template of such agents."""
    from trimesh.jobs import local

    class Agent:
        main = staticmethod(agent)

    local.agent = Agent  # type: ignore[assignment]
    local.serve()


@contextmanager
def copied_agents(template: SpawnerTemplate) -> Generator[None, None, None]:
    """Let the agents that this process starts here, or in a network of a test, be copies while the body runs.

    So are the templates of agents: theirs are forked from a copy.
    """
    if importlib.util.find_spec("cryptography") is None:  # then there are no hosts
        yield
        return
    from trimesh.jobs import launcher, local
    from trimesh.jobs import local as forked
    from trimesh.testing.real import network_job

    interpreter = sys.executable  # a test may name another one, or one that is not there

    async def start(
        command: Sequence[str], host: str, env: Mapping[str, str] | None = None, *, is_apart: bool = True
    ) -> Any:
        agent = local.agent_command()
        prefix = list(command)[: -len(agent)]
        if list(command[len(prefix) :]) != agent or not is_apart or sys.executable != interpreter:
            return await launcher.start_child(command, host, env, is_apart=is_apart)
        await trio.lowlevel.checkpoint()
        network = next((word.removeprefix(NETWORK) for word in prefix if word.startswith(NETWORK)), "")
        return copied(template, f"{__name__}:agent", ["-c"], os.environ if env is None else env, network)

    class Subprocess:
        """Of `subprocess` what a template of agents uses."""

        _args_from_interpreter_flags = subprocess._args_from_interpreter_flags  # type: ignore[attr-defined]

        @staticmethod
        def Popen(  # noqa: N802 - its name there
            command: Sequence[str], *, stdin: int, env: Mapping[str, str], start_new_session: bool
        ) -> Copy | subprocess.Popen[bytes]:
            if sys.executable != interpreter:
                return subprocess.Popen(command, stdin=stdin, env=env, start_new_session=start_new_session)
            return template.copy(f"{__name__}:agents", (stdin, 1, 2), env, arguments=["-c"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "current", template)
        patch.setattr(local, "start_child", start)
        patch.setattr(network_job, "start_child", start)
        patch.setattr(forked, "subprocess", Subprocess)
        yield
