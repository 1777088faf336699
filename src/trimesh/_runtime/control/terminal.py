"""A terminal at a control socket: one connection that has one hold, until either of them ends."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from trimesh import limits
from trimesh._runtime.control.framed import receive_frame, send_frame
from trimesh._wire import observed
from trimesh.errors import ProtocolError

if TYPE_CHECKING:
    from trimesh._runtime.debugging.holds import Holds


class SocketTerminal:
    """What a thread of the control socket is while its client debugs.

    Args:
        holds: Those of the controller.
        in_trio: Has a function called in the Trio thread, soon.
    """

    def __init__(self, client: socket.socket, holds: Holds, in_trio: Callable[[Callable[[], None]], None]) -> None:
        self._client = client
        self._holds = holds
        self._in_trio = in_trio
        self._said = queue.SimpleQueue[tuple[str, str] | None]()
        self._chars = 0

    def attach(self, target: str) -> str:
        """Take a hold, in the Trio thread; return why not, or an empty text."""
        return self._holds.attach(target, self)

    def say(self, kind: str, text: str) -> None:
        """Let the client be told; in the Trio thread. A client that takes nothing is detached."""
        self._chars += len(text)
        if self._chars > limits.DEBUG_TERMINAL_CHARS_MAX:
            with suppress(OSError):
                self._client.shutdown(socket.SHUT_RDWR)
            return
        self._said.put((kind, text))

    def serve(self) -> None:
        """Hand on what the client says until it has gone, or says what is no line of a terminal."""
        writer = threading.Thread(target=self._write, name="trimesh terminal", daemon=True)
        try:
            self._client.settimeout(None)
            writer.start()
            while (data := receive_frame(self._client, limits.CONTROL_REQUEST_BYTES_MAX)) is not None:
                request = observed.decode_request(data)
                if request.kind not in ("line", "detach"):
                    return
                self._in_trio(lambda kind=request.kind, text=request.text: self._holds.say(self, kind, text))  # type: ignore[misc]
        except ProtocolError:
            return
        finally:
            self._in_trio(lambda: self._holds.say(self, "detach", ""))
            self._said.put(None)
            with suppress(OSError):
                self._client.shutdown(socket.SHUT_RDWR)
            writer.join()

    def _write(self) -> None:
        with suppress(OSError):
            while (said := self._said.get()) is not None:
                kind, text = said
                send_frame(self._client, msgspec.msgpack.encode(observed.ControlAnswer(said=kind, text=text)))
                self._chars -= len(text)
