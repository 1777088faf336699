r"""Control socket of a controller: answers observers while a block is open.

    client --Request--> a thread of the socket --task--> the Trio loop: queries all processes --Answer--> client
                                              \-- when that does not run: the thread itself, by signals

CS-1 It costs calls nothing: a thread waits in `accept`, without the GIL, until a client connects.
CS-2 Only processes of this user, identified by the kernel, are answered; received bytes are never unpickled.
CS-3 Requests are answered even while the loop is stalled, as long as Python code can run in this process at all.
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
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.sampling import sampling_of
from trimesh._runtime.snapshot import NOT_OWNED, AskedBySignal, Inquiries, look, proc_name
from trimesh._runtime.system.forks import ForgottenInChildren
from trimesh._runtime.system.user_files import credentials_of, entered, user_folder
from trimesh._runtime.tasks import interrupt
from trimesh._runtime.watch.report import stack_lines
from trimesh._wire import observed
from trimesh.errors import ConnectError, ProtocolError

if TYPE_CHECKING:
    from trimesh._runtime.holds import Holds
    from trimesh._runtime.life.proc import Proc


_log = logging.getLogger("trimesh")
_POLL_SECONDS: Final = 0.005
_JOIN_SECONDS: Final = 0.5
_TRIES: Final = 5
_NO_LOOP: Final = "the controller's Trio loop is blocked; the request is carried out only when it runs again"
_CALL: Final = re.compile(r"([0-9a-f]{1,16})\.([0-9]{1,18})@([0-9a-f]{1,16})")


class ControlSocket:
    """The socket of one controller, and the threads that serve its clients.

    Args:
        proc: The controller.

    Attributes:
        on_stop: Interrupts the run, called in its Trio loop; returns why it cannot, or an empty text.
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
        """Listen. If that fails, the run goes on without a socket; a warning is logged once."""
        try:
            self._listener = listen(self._proc.pid, proc_name(self._proc.proc_id))
        except OSError as error:
            _log.warning("the command trimesh cannot inspect this run, which has no control socket: %s", error)
            return
        _open.add(self)
        self._start(self._accept)

    def close(self) -> None:
        """Close the socket and all connections, and join the threads.

        Blocking: no checkpoint; some 0.1 ms without clients, at most `_JOIN_SECONDS`.
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
        """Close the copies of a forked child, which would otherwise listen."""
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
                time.sleep(limits.OBSERVE_LOOP_SECONDS)  # out of descriptors for the moment
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
            return  # the client is gone, hangs, or sends an invalid request
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
        except Exception as error:  # noqa: BLE001 - the client must get an answer
            return observed.ControlAnswer(error=f"{type(error).__name__}: {error}"), False
        return attached, not attached.error

    def _attach(self, target: str, terminal: SocketTerminal) -> observed.ControlAnswer:
        async def attach() -> observed.ControlAnswer:
            return observed.ControlAnswer(error=terminal.attach(target))

        answer = self._in_loop(attach, limits.CONTROL_SECONDS / 2)
        if answer is None:
            terminal.refuse()
            return observed.ControlAnswer(error="the controller's Trio loop is blocked: attach when it runs again")
        return answer

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
            case "samples":
                read, seconds = partial(self._samples, request.after), limits.CONTROL_SECONDS / 2
                return self._in_loop(read, seconds) or observed.ControlAnswer(error=_NO_LOOP)
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
                    error=f"this run does not know the request {request.kind!r}; its trimesh may be older"
                )

    async def _samples(self, after: int) -> observed.ControlAnswer:
        number, samples = sampling_of(self._proc).read(after)
        return observed.ControlAnswer(number=number, samples=tuple(samples[-limits.METRIC_SAMPLES_ANSWERED :]))

    def _stop(self) -> observed.ControlAnswer:
        """Interrupt the run (CS-5): by SIGINT where that works, because it also reaches code without a checkpoint."""
        if self._is_interrupted_by_signals and interrupt.is_run_interrupted_by_sigint():
            os.kill(self._proc.pid, signal.SIGINT)
            return observed.ControlAnswer()

        async def stop() -> observed.ControlAnswer:
            return observed.ControlAnswer(error=self.on_stop())

        return self._in_loop(stop, limits.CONTROL_SECONDS / 2) or observed.ControlAnswer(
            error="the run ignores SIGINT, and its Trio loop is blocked; it is stopped when that runs again"
        )

    async def _kill(self, target: str) -> observed.ControlAnswer:
        members = [one for one in self._proc.members.values() if proc_name(one.peer.proc_id) == target]
        if not members:
            return observed.ControlAnswer(error=NOT_OWNED)
        await members[0].end_by_kill()
        return observed.ControlAnswer()

    async def _cancel(self, target: str) -> observed.ControlAnswer:
        match = _CALL.fullmatch(target)
        if match is None:
            return observed.ControlAnswer(
                error=f"only a call whose caller waits can be cancelled; its id looks like 5f.12@7a, got {target!r}"
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
        """Return the answer of a function that runs in Trio; None if the loop does not run, or answers too late."""
        begun = threading.Event()
        replies = queue.SimpleQueue[observed.ControlAnswer | None]()

        @trio.lowlevel.enable_ki_protection
        async def run() -> None:
            try:
                replies.put(await function())
            except Exception as error:  # noqa: BLE001 - an observer must not end the run
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
            return observed.ControlAnswer(error=f"the run's tables changed during each of {_TRIES} reads; try again")
        members = [one for one in list(self._proc.members.values()) if not one.gone.is_set() and one.stack_fd >= 0]
        asked = AskedBySignal(members)
        ends_at = time.monotonic() + seconds / 2
        while not asked.is_answered and time.monotonic() < ends_at:
            time.sleep(_POLL_SECONDS)
        frame = sys._current_frames().get(self._trio_thread)  # noqa: SLF001 - the only way to another thread's stack
        stack = "\n".join(["Stack (most recent call first):", *stack_lines(frame)])
        proc = msgspec.structs.replace(view.proc, state="stuck", stack=stack)
        return observed.ControlAnswer(by="thread", views=(msgspec.structs.replace(view, proc=proc), *asked.views()))

    def _look(self) -> observed.ProcView | None:
        for _ in range(_TRIES):
            try:
                return look(self._proc)
            except RuntimeError:  # the loop runs after all, and changed a table meanwhile
                time.sleep(_POLL_SECONDS)
        return None


_open: ForgottenInChildren[ControlSocket] = ForgottenInChildren()


# ---- a terminal at a control socket: one connection attached to one hold, until either of them ends ------------------


class SocketTerminal:
    """Terminal side of a debugging session, in a thread of the control socket.

    Args:
        holds: Holds of the controller.
        in_trio: Schedules a function in the Trio thread.
    """

    def __init__(self, client: socket.socket, holds: Holds, in_trio: Callable[[Callable[[], None]], None]) -> None:
        self._client = client
        self._holds = holds
        self._in_trio = in_trio
        self._said = queue.SimpleQueue[tuple[str, str] | None]()
        self._chars = 0
        self._is_refused = False

    def attach(self, target: str) -> str:
        """Attach to the hold `target`, in the Trio thread; return why that failed, or an empty text."""
        return "its client was refused" if self._is_refused else self._holds.attach(target, self)

    def refuse(self) -> None:
        """Undo an `attach` that the Trio thread has not answered, or prevent it: its client is gone."""
        self._is_refused = True
        self._in_trio(lambda: self._holds.say(self, "detach", ""))

    def say(self, kind: str, text: str) -> None:
        """Queue a text for the client, in the Trio thread. A client that does not read is disconnected."""
        self._chars += len(text)
        if self._chars > limits.DEBUG_TERMINAL_CHARS_MAX:
            with suppress(OSError):
                self._client.shutdown(socket.SHUT_RDWR)
            return
        self._said.put((kind, text))

    def serve(self) -> None:
        """Forward the client's lines until it is gone or sends something other than a terminal line."""
        writer = threading.Thread(target=self._write, name="trimesh terminal", daemon=True)
        try:
            self._client.settimeout(None)
            writer.start()
            while (data := receive_frame(self._client, limits.CONTROL_REQUEST_BYTES_MAX)) is not None:
                request = observed.decode_request(data)
                if request.kind not in ("line", "detach", "leave"):
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


# ---- messages over a blocking stream socket: the length in four bytes, then the message ------------------------------

_LENGTH: Final = struct.Struct("!I")


def send_frame(sock: socket.socket, data: bytes) -> None:
    """Send one message.

    Blocking: until the kernel has accepted it, or the time-out of the socket.

    Raises:
        OSError: The other end is gone, or does not read.
    """
    sock.sendall(_LENGTH.pack(len(data)))
    sock.sendall(data)


def receive_frame(sock: socket.socket, bytes_max: int) -> bytes | None:
    """Return the next message; None when the other end has closed.

    Blocking: until it has arrived, or the time-out of the socket.

    Raises:
        OSError: It did not arrive whole, or is larger than `bytes_max`.
    """
    head = _receive(sock, _LENGTH.size)
    if not head:
        return None
    [size] = _LENGTH.unpack(head)
    if size > bytes_max:
        raise OSError(f"a message must have at most {bytes_max} bytes, got {size}")
    data = _receive(sock, size)
    if len(data) < size:
        raise ConnectionResetError("the other end closed in the middle of a message")
    return data


def _receive(sock: socket.socket, size: int) -> bytes:
    """Return `size` bytes; none at the end of the stream."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            if data:
                raise ConnectionResetError("the other end closed in the middle of a message")
            break
        data += part
    return bytes(data)


# ---- where control sockets are: `.runs/PID-ID` in the private folder of this user ------------------------------------

# A socket gets its name when it already listens. One without a listener was left by a killed run; `dial` removes it.

_NAME: Final = re.compile(r"([0-9]+)-([0-9a-f]+)")


class Listener(msgspec.Struct, frozen=True, eq=False):
    """A control socket of this process.

    Attributes:
        sock: The listening socket.
        name: File name in the folder.
    """

    sock: socket.socket
    name: str

    def close(self) -> None:
        """Remove the file, and wake the thread that waits for a connection."""
        with suppress(OSError), _entered() as (_, fd):
            os.unlink(self.name, dir_fd=fd)
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def _entered() -> Generator[tuple[Path, int], None, None]:
    folder = user_folder()
    with entered(folder):
        pass
    with entered(folder / ".runs") as fd:
        yield folder / ".runs", fd


def listen(pid: int, proc_id: str) -> Listener:
    """Listen for observers of this process.

    Raises:
        OSError: The folder cannot be trusted or made, or the process is out of descriptors.
    """
    with _entered() as (_, fd):
        name = f"{pid}-{proc_id}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"/proc/self/fd/{fd}/{name}.new")  # paths of sockets have at most 107 bytes
            sock.listen(limits.CONTROL_CLIENTS_MAX)
            os.rename(f"{name}.new", name, src_dir_fd=fd, dst_dir_fd=fd)
        except BaseException:
            sock.close()
            raise
        return Listener(sock, name)


def runs() -> list[tuple[int, str]]:
    """Return pid of the controller and name of each run of this user on this machine that has a socket.

    Raises:
        OSError: The folder cannot be trusted.
    """
    with _entered() as (_, fd):
        found = [match for name in os.listdir(fd) if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]), match[0]) for match in found)


def dial(name: str) -> socket.socket | None:
    """Return a connection to a run; None if it has ended.

    Raises:
        PermissionError: Another user listens there.
        OSError: The connection failed.
    """
    with _entered() as (_, fd):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(limits.CONTROL_SECONDS)
        try:
            sock.connect(f"/proc/self/fd/{fd}/{name}")
            if credentials_of(sock)[1] != os.geteuid():
                raise PermissionError(f"the run {name} belongs to another user")
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
            return None
        except BaseException:
            sock.close()
            raise
        return sock


# ---- the client's end of a control socket ----------------------------------------------------------------------------


class RunClient:
    """A connection to the controller of a run.

    Attributes:
        pid: Pid of the controller.
        name: Name of the run's socket, as in `known_runs`.

    Raises:
        ConnectError: The run has ended, or cannot be connected to.
    """

    def __init__(self, pid: int, name: str) -> None:
        self.pid = pid
        self.name = name
        try:
            found = dial(name)
        except OSError as error:
            raise ConnectError(f"cannot connect to the run of process {pid}: {error}") from error
        if found is None:
            raise ConnectError(f"the run of process {pid} has ended")
        self._sock = found

    def ask(self, request: observed.ControlRequest) -> observed.ControlAnswer:
        """Send a request and return its answer.

        Blocking: until the answer arrives, at most `limits.CONTROL_SECONDS` without any data.

        Raises:
            ConnectError: The run has ended, does not answer, or refuses.
        """
        try:
            send_frame(self._sock, msgspec.msgpack.encode(request))
            data = receive_frame(self._sock, limits.OBSERVED_BYTES_MAX)
            if data is None:
                raise ConnectError(f"the run of process {self.pid} has ended")
            answer = observed.decode_answer(data)
        except TimeoutError:
            raise ConnectError(
                f"process {self.pid} did not answer within {limits.CONTROL_SECONDS:g} s: it is stopped, or C code "
                f"in it holds the GIL (py-spy dump --native --pid {self.pid} shows where)"
            ) from None
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ConnectError(f"the run of process {self.pid} has ended") from error
        except (OSError, ProtocolError) as error:
            raise ConnectError(f"cannot query the run of process {self.pid}: {error}") from error
        if answer.error:
            raise ConnectError(answer.error)
        return answer

    def say(self, request: observed.ControlRequest) -> None:
        """Send input to the debugger, once this connection is its terminal.

        Raises:
            ConnectError: The run has ended.
        """
        try:
            send_frame(self._sock, msgspec.msgpack.encode(request))
        except OSError as error:
            raise ConnectError(f"the run of process {self.pid} has ended: {error}") from error

    def hear(self) -> observed.ControlAnswer | None:
        """Return the next output of the debugger; None when the connection has ended.

        Blocking: until there is some.
        """
        self._sock.settimeout(None)
        try:
            data = receive_frame(self._sock, limits.OBSERVED_BYTES_MAX)
            return None if data is None else observed.decode_answer(data)
        except (OSError, ProtocolError):
            return None

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread in `hear`
        self._sock.close()


def known_runs() -> list[tuple[int, str]]:
    """Return the pid of the controller and the name of each run of this user that has a socket.

    Raises:
        ConnectError: The folder of sockets cannot be trusted.
    """
    try:
        return runs()
    except OSError as error:
        raise ConnectError(f"cannot list the runs of this user: {error}") from error
