r"""The control socket of a controller: who looks on asks here, while a block is open.

    client --Request--> a thread of ours --task--> the Trio loop: asks all processes --Answer--> client
                                         \-- when that does not run: the thread itself, by signals

CS-1 Nothing of it is on the way of a call: a thread waits in `accept`, without the GIL, until a client connects.
CS-2 Only processes of this user are answered, as the kernel names them; nothing that comes is ever unpickled.
CS-3 An answer comes also while the loop does not run, as long as Python code can run at all in this process.
CS-4 When the block is left, socket and threads are gone.
CS-5 A stop works whatever the program does with SIGINT: where that would not interrupt the run, its loop does.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.control.folder import Listener, listen
from trimesh._runtime.control.framed import receive_frame, send_frame
from trimesh._runtime.control.terminal import SocketTerminal
from trimesh._runtime.observing.asking import AskedBySignal, Inquiries
from trimesh._runtime.observing.view import look, proc_name
from trimesh._runtime.system.forks import ForgottenInChildren
from trimesh._runtime.system.private_folder import credentials_of
from trimesh._runtime.tasks import interrupt
from trimesh._runtime.watch.task_tree import stack_lines
from trimesh._wire import observed
from trimesh.errors import ProtocolError

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc

_log = logging.getLogger("trimesh")
_POLL_SECONDS: Final = 0.005
_JOIN_SECONDS: Final = 0.5
_TRIES: Final = 5
_NO_LOOP: Final = "the Trio loop of the controller does not run, and only it may do that"
_CALL: Final = re.compile(r"([0-9a-f]{1,16})\.([0-9]{1,18})@([0-9a-f]{1,16})")


class ControlSocket:
    """The socket of one controller, and the threads that answer there.

    Args:
        proc: The controller.

    Attributes:
        on_stop: Interrupts the run, in its Trio loop, and returns why it cannot, if so.
    """

    def __init__(self, proc: Proc, inquiries: Inquiries) -> None:
        self._proc = proc
        self._inquiries = inquiries
        self._token = trio.lowlevel.current_trio_token()
        self._trio_thread = threading.get_ident()
        self._listener: Listener | None = None
        self._threads = list[threading.Thread]()
        self._clients = set[socket.socket]()
        self._waiting = set[queue.SimpleQueue[observed.ControlAnswer | None]]()
        self._is_over = False
        self._is_interrupted_by_signals = (
            threading.current_thread() is threading.main_thread() or interrupt.are_interrupts_heard()
        )
        self.on_stop: Callable[[], str] = lambda: "this run has no blocks"

    def open(self) -> None:
        """Listen; a run without a socket is no failure, and said once."""
        try:
            self._listener = listen(self._proc.pid, proc_name(self._proc.proc_id))
        except OSError as error:
            _log.warning("this run cannot be looked at by the command trimesh: %s", error)
            return
        _open.add(self)
        self._start(self._accept)

    def close(self) -> None:
        """End all of it.

        Blocking: no checkpoint; some 0.1 ms when no client is there, at most `_JOIN_SECONDS`.
        """
        self._is_over = True
        _open.discard(self)
        if self._listener is not None:
            self._listener.close()
        for client in list(self._clients):
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for replies in list(self._waiting):
            replies.put(None)
        ends_at = time.monotonic() + _JOIN_SECONDS
        for thread in list(self._threads):
            thread.join(max(0.0, ends_at - time.monotonic()))
        if self._listener is not None:
            self._listener.sock.close()

    def forget(self) -> None:
        """In a forked child: close our copies, which the child would listen at."""
        if self._listener is not None:
            self._listener.sock.close()
        for client in self._clients:
            client.close()

    def _start(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, name="trimesh control socket", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- in threads ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._is_over:
            try:
                client, _ = self._listener.sock.accept()
            except OSError as error:
                if self._is_over or isinstance(error, ConnectionAbortedError):
                    continue
                time.sleep(limits.OBSERVE_LOOP_SECONDS)  # no descriptors just now
                continue
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if self._is_over or len(self._clients) >= limits.CONTROL_CLIENTS_MAX:
                client.close()
                continue
            self._clients.add(client)
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                if credentials_of(client)[1] != os.geteuid():
                    return
                client.settimeout(limits.CONTROL_SECONDS)
                while (data := receive_frame(client, limits.CONTROL_REQUEST_BYTES_MAX)) is not None:
                    terminal = SocketTerminal(client, self._proc.holds, self._soon)
                    answer, is_terminal = self._answer_safely(data, terminal)
                    send_frame(client, msgspec.msgpack.encode(answer))
                    if is_terminal:
                        terminal.serve()
                        return
        except OSError:
            return  # the client has gone, hangs, or sends what is no request
        finally:
            self._clients.discard(client)

    def _soon(self, function: Callable[[], None]) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function)

    def _answer_safely(self, data: bytes, terminal: SocketTerminal) -> tuple[observed.ControlAnswer, bool]:
        """Return the answer, and whether the client is a terminal from now on."""
        try:
            request = observed.decode_request(data)
            if request.kind != "attach":
                return self._answer(request), False
            attached = self._attach(request.target, terminal)
        except ProtocolError as error:
            return observed.ControlAnswer(error=str(error)), False
        except Exception as error:  # noqa: BLE001 - a thread that dies would say nothing
            return observed.ControlAnswer(error=f"{type(error).__name__}: {error}"), False
        return attached, not attached.error

    def _attach(self, target: str, terminal: SocketTerminal) -> observed.ControlAnswer:
        async def attach() -> observed.ControlAnswer:
            return observed.ControlAnswer(error=terminal.attach(target))

        return self._in_loop(attach, limits.CONTROL_SECONDS / 2) or observed.ControlAnswer(error=_NO_LOOP)

    async def _holds(self) -> observed.ControlAnswer:
        return observed.ControlAnswer(holds=self._proc.holds.rows())

    def _answer(self, request: observed.ControlRequest) -> observed.ControlAnswer:
        match request.kind:
            case "events":
                return observed.ControlAnswer(events=tuple(self._proc.journal.after(request.after)))
            case "output":
                siblings = None if self._proc.family is None else self._proc.family.siblings
                rows = [] if siblings is None else siblings.printer.log.after(request.after)
                return observed.ControlAnswer(output=tuple(rows))
            case "views":
                seconds = request.seconds or limits.OBSERVE_SECONDS
                return self._views(min(seconds, limits.CONTROL_SECONDS / 2))
            case "stop":
                return self._stop()
            case "kill" | "cancel":
                act = partial(self._kill if request.kind == "kill" else self._cancel, request.target)
                return self._in_loop(act, limits.KILL_SECONDS) or observed.ControlAnswer(error=_NO_LOOP)
            case "holds":
                seconds = limits.CONTROL_SECONDS / 2
                return self._in_loop(self._holds, seconds) or observed.ControlAnswer(error=_NO_LOOP)
            case _:
                return observed.ControlAnswer(
                    error=f"this run knows no request {request.kind!r}; its trimesh may be older"
                )

    def _stop(self) -> observed.ControlAnswer:
        """Interrupt the run: by SIGINT where that does it, as it reaches code without a checkpoint, too (CS-5)."""
        if self._is_interrupted_by_signals and interrupt.is_run_interrupted_by_sigint():
            os.kill(self._proc.pid, signal.SIGINT)
            return observed.ControlAnswer()

        async def stop() -> observed.ControlAnswer:
            return observed.ControlAnswer(error=self.on_stop())

        return self._in_loop(stop, limits.CONTROL_SECONDS / 2) or observed.ControlAnswer(
            error=f"the run ignores SIGINT, and is stopped when its Trio loop runs again: {_NO_LOOP}"
        )

    async def _kill(self, target: str) -> observed.ControlAnswer:
        members = [one for one in self._proc.members.values() if proc_name(one.peer.proc_id) == target]
        if not members:
            return observed.ControlAnswer(error="its process has ended, or belongs to another one of the run")
        await members[0].end_by_kill()
        return observed.ControlAnswer()

    async def _cancel(self, target: str) -> observed.ControlAnswer:
        match = _CALL.fullmatch(target)
        if match is None:
            return observed.ControlAnswer(
                error=f"a call that has a caller who waits is called like 5f.12@7a, got {target!r}"
            )
        caller, number, callee = int(match[1], 16), int(match[2]), int(match[3], 16)
        return observed.ControlAnswer(error=self._inquiries.interrupt(callee, caller, number, "trimesh cancel"))

    def _views(self, seconds: float) -> observed.ControlAnswer:
        async def ask() -> observed.ControlAnswer:
            return observed.ControlAnswer(views=tuple(await self._inquiries.ask(seconds)))

        return self._in_loop(ask, seconds) or self._views_without_loop(seconds)

    def _in_loop(
        self, function: Callable[[], Awaitable[observed.ControlAnswer]], seconds: float
    ) -> observed.ControlAnswer | None:
        """Return what a function of Trio answers; None if the loop does not run."""
        begun = threading.Event()
        replies = queue.SimpleQueue[observed.ControlAnswer | None]()

        @trio.lowlevel.enable_ki_protection
        async def run() -> None:
            try:
                replies.put(await function())
            except Exception as error:  # noqa: BLE001 - who looks on must not end what is looked at
                replies.put(observed.ControlAnswer(error=f"{type(error).__name__}: {error}"))
            finally:
                replies.put(None)

        def begin() -> None:
            begun.set()
            if not self._proc.serve(run):
                replies.put(None)

        self._waiting.add(replies)
        try:
            self._token.run_sync_soon(begin)
            if self._is_over or not begun.wait(limits.OBSERVE_LOOP_SECONDS):
                return None
            return replies.get(timeout=seconds + limits.OBSERVE_LOOP_SECONDS)
        except (trio.RunFinishedError, queue.Empty):
            return None
        finally:
            self._waiting.discard(replies)

    def _views_without_loop(self, seconds: float) -> observed.ControlAnswer:
        view = self._look()
        if view is None:
            return observed.ControlAnswer(error="the tables of this run change too fast to be read; ask again")
        members = [one for one in list(self._proc.members.values()) if not one.gone.is_set() and one.stack_fd >= 0]
        asked = AskedBySignal(members)
        ends_at = time.monotonic() + seconds / 2
        while not asked.is_answered and time.monotonic() < ends_at:
            time.sleep(_POLL_SECONDS)
        frame = sys._current_frames().get(self._trio_thread)  # noqa: SLF001 - what faulthandler shows, to Python
        stack = "\n".join(["Stack (most recent call first):", *stack_lines(frame)])
        proc = msgspec.structs.replace(view.proc, state="stuck", stack=stack)
        return observed.ControlAnswer(by="thread", views=(msgspec.structs.replace(view, proc=proc), *asked.views()))

    def _look(self) -> observed.ProcView | None:
        for _ in range(_TRIES):
            try:
                return look(self._proc)
            except RuntimeError:  # the loop does run, and has changed a table meanwhile
                time.sleep(_POLL_SECONDS)
        return None


_open: ForgottenInChildren[ControlSocket] = ForgottenInChildren()
