"""The template itself: its loop, and what it makes of a copy."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
import traceback
from contextlib import suppress
from typing import NoReturn

from trimesh._runtime.hosts import import_for_spawners
from trimesh._runtime.system import close_others, set_parent_death_signal, set_process_name
from trimesh.jobs import agent
from trimesh.jobs.forked.messages import LEFT_SECONDS, NUMBER, REQUEST_FDS, TEXT_BYTES_MAX


def serve() -> NoReturn:
    """Fork an agent for each request, tell how each has ended, and end."""
    requests = socket.socket(fileno=os.dup(0))
    program = os.pidfd_open(os.getppid())
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    set_process_name("trimesh-agents")
    import_for_spawners()
    _Template(requests, program).run()
    os._exit(0)


class _Template:
    """The loop of the template, and the copies that it is the parent of."""

    def __init__(self, requests: socket.socket, program: int) -> None:
        self._requests = requests
        self._program = program
        self._copies: dict[int, tuple[int, socket.socket]] = {}
        self._poll = select.poll()
        self._end = math.inf

    def run(self) -> None:
        """Serve until the program has left, and no copy is left; at most for so long."""
        for fd in (self._requests.fileno(), self._program):
            self._poll.register(fd, select.POLLIN)
        while self._copies or self._end == math.inf:
            left = self._end - time.monotonic()
            if left <= 0:
                return
            for fd, _ in self._poll.poll(None if left == math.inf else 1000 * left):
                if fd in self._copies:
                    self._reap(fd)
                elif fd == self._program or not self._take():
                    self._leave()

    def _leave(self) -> None:
        if self._end == math.inf:
            self._end = time.monotonic() + LEFT_SECONDS
            self._poll.unregister(self._requests)
            self._poll.unregister(self._program)

    def _take(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._requests, 1, REQUEST_FDS, socket.MSG_CMSG_CLOEXEC)
        if len(fds) != REQUEST_FDS:  # it has closed its end, or this process has no room for more
            for fd in fds:
                os.close(fd)
            return bool(data)
        told = socket.socket(fileno=fds[2])
        try:
            self._fork(fds[0], fds[1], told)
        except OSError as error:
            with suppress(OSError):
                told.send(str(error).encode()[:TEXT_BYTES_MAX])
            told.close()
        finally:
            os.close(fds[0])
            os.close(fds[1])
        return True

    def _fork(self, stdin: int, stderr: int, told: socket.socket) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                _be_copy(stdin, stderr, told, parent)
            except BaseException:  # noqa: BLE001 - it must not run on as the template
                traceback.print_exc()
            finally:
                os._exit(1)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._copies[pidfd] = pid, told
        self._poll.register(pidfd, select.POLLIN)

    def _reap(self, pidfd: int) -> None:
        pid, told = self._copies.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            told.send(NUMBER.pack(code))
        told.close()


def _be_copy(stdin: int, stderr: int, told: socket.socket, parent: int) -> NoReturn:
    os.setsid()
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(stdin, 0)
    os.dup2(stderr, 2)
    with suppress(OSError):  # the one that has asked was cancelled: the standard input is closed, too
        socket.send_fds(told, [NUMBER.pack(os.getpid())], [os.pidfd_open(os.getpid())])
    close_others({0, 1, 2})
    set_process_name("trimesh-agent")
    agent.main()
