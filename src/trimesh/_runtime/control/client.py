"""The other end of a control socket: what asks a run."""

from __future__ import annotations

import socket
from contextlib import suppress

import msgspec

from trimesh import limits
from trimesh._runtime.control.folder import dial, runs
from trimesh._runtime.control.framed import receive_frame, send_frame
from trimesh._wire import observed
from trimesh.errors import ConnectError, ProtocolError


class RunClient:
    """A connection to the controller of a run.

    Attributes:
        pid: Of the controller.
        name: Of the run, in the folder of this user.
    """

    def __init__(self, pid: int, name: str) -> None:
        self.pid = pid
        self.name = name
        try:
            found = dial(name)
        except OSError as error:
            raise ConnectError(f"the run of process {pid} cannot be asked: {error}") from error
        if found is None:
            raise ConnectError(f"the run of process {pid} has ended")
        self._sock = found

    def ask(self, request: observed.ControlRequest) -> observed.ControlAnswer:
        """Ask, and return the answer.

        Blocking: until it comes, at most `limits.CONTROL_SECONDS`.

        Raises:
            ConnectError: The run has ended, does not answer, or will not.
        """
        try:
            send_frame(self._sock, msgspec.msgpack.encode(request))
            data = receive_frame(self._sock, limits.OBSERVED_BYTES_MAX)
            if data is None:
                raise ConnectError(f"the run of process {self.pid} has ended")
            answer = observed.decode_answer(data)
        except TimeoutError:
            raise ConnectError(
                f"process {self.pid} has not answered within {limits.CONTROL_SECONDS:g} s: it is stopped, or C code "
                f"in it holds the GIL (py-spy dump --native --pid {self.pid} shows where)"
            ) from None
        except (OSError, ProtocolError) as error:
            raise ConnectError(f"the run of process {self.pid} cannot be asked: {error}") from error
        if answer.error:
            raise ConnectError(answer.error)
        return answer

    def say(self, request: observed.ControlRequest) -> None:
        """Say something to a debugger, once this is its terminal.

        Raises:
            ConnectError: The run has ended.
        """
        try:
            send_frame(self._sock, msgspec.msgpack.encode(request))
        except OSError as error:
            raise ConnectError(f"the run of process {self.pid} has ended: {error}") from error

    def hear(self) -> observed.ControlAnswer | None:
        """Return what a debugger says next; None when the connection has ended.

        Blocking: until it says something.
        """
        self._sock.settimeout(None)
        try:
            data = receive_frame(self._sock, limits.OBSERVED_BYTES_MAX)
            return None if data is None else observed.decode_answer(data)
        except (OSError, ProtocolError):
            return None

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # whoever waits in another thread is woken
        self._sock.close()


def known_runs() -> list[tuple[int, str]]:
    """Return the pid of the controller and the name of each run of this user that has a socket.

    Raises:
        ConnectError: Their folder cannot be trusted.
    """
    try:
        return runs()
    except OSError as error:
        raise ConnectError(f"runs of this user cannot be looked for: {error}") from error
