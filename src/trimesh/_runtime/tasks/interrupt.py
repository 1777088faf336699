"""Signals to the user's program: effect of Ctrl-C and SIGTERM on blocks, and `cancel_on` (rule O6).

The first Ctrl-C is Trio's own: `KeyboardInterrupt` in the main task, so the blocks there are left. While a block is
then being left, another Ctrl-C kills at once everything that it waits for, and the meshes of the blocks around it.
Leaving runs in a task of its own, because Trio raises `KeyboardInterrupt` in the main task even inside a shield.

Trio raises it in the middle of any running code that is not protected. So every task of ours is protected, and every
function that users await: the interrupt then arrives at the next checkpoint of the main task. One place of the user's
code is protected, too: between the call of `__aexit__` by `async with` and its await. An exception there would skip
leaving the block, and its processes would live as long as the program.

    SIGTERM --> what Ctrl-C does --> blocks are left --> the last one has ended --> the process ends by SIGTERM

GT-1 A handler of the user, and an ignored signal, stay as they are; without open blocks SIGTERM has its default action.
GT-2 A second SIGTERM ends the process at once; so does the end of `limits.SIGTERM_SECONDS` and the grace of all blocks.
GT-3 A forked child of the program that has inherited the handler ends at once.
"""

from __future__ import annotations

import dis
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from trimesh import limits
from trimesh.context_managers import contextmanager

if TYPE_CHECKING:
    from trimesh._runtime.meshes.block import Block

T = TypeVar("T")


_open: list[tuple[Block, trio.lowlevel.TrioToken]] = []
_elsewhere: list[tuple[Block, trio.lowlevel.TrioToken]] = []
"""Blocks of Trio runs in other threads that the main thread waits for: `trimesh.blocking`."""

_unheard: list[tuple[Block, trio.lowlevel.TrioToken]] = []
"""Blocks of Trio runs in other threads that receive no signals."""

_hears: trio.lowlevel.RunVar[bool] = trio.lowlevel.RunVar("trimesh_hears_interrupts", default=False)
_original: Any = None


async def run_to_end(function: Callable[[], Awaitable[T]]) -> tuple[T, KeyboardInterrupt | None]:
    """Run `function` shielded from cancellation and from Ctrl-C.

    Returns:
        Its result, and a `KeyboardInterrupt` that came meanwhile, which the caller raises when it is ready.
    """
    results: list[T] = []

    @trio.lowlevel.enable_ki_protection
    async def run() -> None:
        with trio.CancelScope(shield=True):
            results.append(await function())

    interrupt: KeyboardInterrupt | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
    except BaseExceptionGroup as group:
        interrupts, rest = group.split(KeyboardInterrupt)
        others = rest.split(trio.Cancelled)[1] if rest is not None else None
        if others is not None:
            raise
        if interrupts is not None:
            interrupt = KeyboardInterrupt()
    if not results:
        raise trio.TrioInternalError("a shielded task ended without a result")
    return results[0], interrupt


@contextmanager
def interruptible(block: Block) -> Generator[None, None, None]:
    """Let a Ctrl-C during the leaving of `block` kill everything that it waits for, if it is not the first one."""
    if threading.current_thread() is not threading.main_thread():
        with _interruptible_elsewhere(block, _elsewhere if _hears.get() else _unheard):
            yield  # signals are handled in the main thread, which may pass a Ctrl-C on to this block
        return
    entry = (block, trio.lowlevel.current_trio_token())
    _open.append(entry)
    _install()
    try:
        yield
    finally:
        if entry in _open:  # else its process has ended meanwhile
            _open.remove(entry)
        if not _open:
            _uninstall()


@contextmanager
def _interruptible_elsewhere(
    block: Block, blocks: list[tuple[Block, trio.lowlevel.TrioToken]]
) -> Generator[None, None, None]:
    entry = (block, trio.lowlevel.current_trio_token())
    blocks.append(entry)
    try:
        yield
    finally:
        blocks.remove(entry)


def hear_elsewhere() -> None:
    """Let the main thread pass each Ctrl-C on to blocks of this Trio run, which is in another thread."""
    _hears.set(True)


def interrupt_elsewhere(*, kills: bool = True) -> bool:
    """Pass a Ctrl-C on to the blocks of runs in other threads; in the main thread, also in a signal handler.

    Args:
        kills: Whether it may count as the second one.

    Returns:
        Whether it did, so that everything a block still waits for is killed.
    """
    return _tell(list(_elsewhere), kills=kills)


def interrupt_blocks() -> bool:
    """Count an interrupt that is not a signal for the open blocks of this Trio run.

    Returns:
        Whether it was the second one: everything that a block being left still waits for is killed.
    """
    token = trio.lowlevel.current_trio_token()
    return _tell([entry for entry in (*_open, *_elsewhere, *_unheard) if entry[1] is token])


def is_run_interrupted_by_sigint() -> bool:
    """Return whether SIGINT to this process interrupts its main thread; any thread may ask.

    It does not where it is blocked or ignored, nor where the user has a handler, which may do anything.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        # A partial of `asyncio.runners` has no module of its own.
        module = getattr(getattr(handler, "func", handler), "__module__", None)
        if module not in _INTERRUPTING:
            return False
    return not _is_blocked_in_main_thread(signal.SIGINT)


def _is_blocked_in_main_thread(number: signal.Signals) -> bool:
    status = Path(f"/proc/self/task/{os.getpid()}/status").read_text("utf-8", "replace")
    blocked = next(line for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(blocked.split()[1], 16) >> (number - 1) & 1)


_INTERRUPTING: Final = (
    "trio._core._ki",
    "asyncio.runners",
    "trimesh._runtime.tasks.interrupt",
    "trimesh.aio.trio_run",
    "trimesh.blocking.trio_thread",
)
"""Modules whose handlers of SIGINT interrupt a run."""


def are_interrupts_heard() -> bool:
    """Return whether blocks of this Trio run, which is not in the main thread, receive each Ctrl-C."""
    return _hears.get()


def forget_blocks(proc: object) -> None:
    """Forget the blocks of a process that ended without leaving them: a simulated one, in the midst of others."""
    _open[:] = [(block, token) for block, token in _open if block.proc is not proc]
    if not _open:
        _uninstall()


def _install() -> None:
    global _original  # noqa: PLW0603 - a signal handler is global to the process
    if _original is not None:
        return
    current = signal.getsignal(signal.SIGINT)
    # Only around Trio's own handler, or that of `trimesh.aio`: a handler of the user's takes precedence.
    if getattr(current, "__module__", "").startswith(("trio.", "trimesh.aio.")):
        _original = current
        signal.signal(signal.SIGINT, _on_interrupt)


def _uninstall() -> None:
    global _original  # noqa: PLW0603
    if _original is not None:
        if signal.getsignal(signal.SIGINT) is _on_interrupt:
            signal.signal(signal.SIGINT, _original)
        _original = None


def _on_interrupt(signum: int, frame: FrameType | None) -> None:
    if not _tell(_open) and _original is not None:
        if frame is not None and is_leaving(frame):
            _interrupt_later(signum)
        else:
            _original(signum, frame)


@trio.lowlevel.enable_ki_protection
def _interrupt_later(signum: int) -> None:
    """Interrupt as Trio does in protected code, which this is."""
    _original(signum, sys._getframe())  # noqa: SLF001 - there is no other way to one's own frame


def is_leaving(frame: FrameType) -> bool:
    """Return whether the frame has called the `__aexit__` of an `async with`, and does not await it yet.

    Signals are handled after calls. A distinctive instruction follows the call of an `__aexit__`.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    if code[at] != _GET_AWAITABLE:
        at += 2
        while at < len(code) and code[at] == _CACHE:
            at += 2
    return at + 1 < len(code) and code[at] == _GET_AWAITABLE and code[at + 1] == _OF_AEXIT


_GET_AWAITABLE: Final = dis.opmap["GET_AWAITABLE"]
_CACHE: Final = dis.opmap.get("CACHE", 0)
_OF_AEXIT: Final = 2
"""Argument of that instruction after an `__aexit__`; 1 stands for an `__aenter__`."""


def _tell(blocks: Sequence[tuple[Block, trio.lowlevel.TrioToken]], *, kills: bool = True) -> bool:
    if kills and any(block.is_stopping and block.is_interrupted for block, _ in blocks):
        for block, token in blocks:
            block.is_killed = True
            if block.is_stopping:
                token.run_sync_soon(block.kill_now, idempotent=True)
        return True
    for block, _ in blocks:
        block.is_interrupted = True
    return False


@contextmanager
def cancel_on(*signals: signal.Signals) -> Generator[trio.CancelScope, None, None]:
    """Cancel the body when one of `signals` arrives, so that blocks inside clean up, and the program goes on after it.

    Without it SIGTERM lets all open blocks clean up, and then ends the program (rule O6).

    Args:
        *signals: At least one, such as `signal.SIGTERM`.

    Yields:
        The scope; afterwards `scope.cancelled_caught` is True if a signal ended the body.

    Raises:
        TypeError: There are no signals.
        RuntimeError: The caller is not in the main thread.
    """
    if not signals:
        raise TypeError("cancel_on needs at least one signal, got none: write cancel_on(signal.SIGTERM)")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "cancel_on must be entered in the main thread, where Python handles signals, got thread "
            f"{threading.current_thread().name!r}"
        )
    token = trio.lowlevel.current_trio_token()
    with trio.CancelScope() as scope:

        def on_signal(signum: int, _: FrameType | None) -> None:
            reason = f"{signal.Signals(signum).name} arrived"
            token.run_sync_soon(lambda: scope.cancel(reason=reason))

        before = {number: signal.signal(number, on_signal) for number in signals}
        try:
            yield scope
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def open_heard_signals(*signals: signal.Signals) -> AbstractContextManager[AsyncIterator[int]]:
    """Receive signals as `trio.open_signal_receiver`; unblock them, as a process inherits the mask of its starter."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    return trio.open_signal_receiver(*signals)


# ---- SIGTERM: its default action, once blocks have cleaned up --------------------------------------------------------


class _Heeded:
    """State of the handler in this process.

    Attributes:
        users: Number of Trio runs with open blocks, and of threads for `trimesh.blocking`.
        pid: The process that has installed the handler.
        interrupts: For each Trio run, a function that interrupts its blocks, and whether it hears Ctrl-C.
        has_come: True after the first SIGTERM.
    """

    def __init__(self) -> None:
        self.users = 0
        self.pid = 0
        self.interrupts = dict[Callable[[], object], bool]()
        self.has_come = False


_heeded: Final = _Heeded()


def heed_sigterm(interrupt: Callable[[], object] | None = None) -> None:
    """Clean up on SIGTERM until `ignore_sigterm`, if the caller is in the main thread and SIGTERM has its default.

    Args:
        interrupt: Interrupts the blocks of a Trio run where Ctrl-C does not; any thread may call it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    _heeded.users += 1
    if interrupt is not None:
        _heeded.interrupts[interrupt] = is_main or are_interrupts_heard()
    if is_main and not _heeded.has_come and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _heeded.pid = os.getpid()
        signal.signal(signal.SIGTERM, _on_sigterm)


def ignore_sigterm(interrupt: Callable[[], object] | None = None) -> None:
    """Undo one `heed_sigterm`; after a SIGTERM the last one ends the process."""
    _heeded.users -= 1
    if interrupt is not None:
        del _heeded.interrupts[interrupt]
    if _heeded.users:
        return
    if _heeded.has_come:
        _end()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(_: int, frame: FrameType | None) -> None:
    if _heeded.has_come or _heeded.pid != os.getpid() or not _heeded.users:
        _end()
    _heeded.has_come = True
    seconds = limits.SIGTERM_SECONDS + sum(block.grace for block, _ in (*_open, *_elsewhere, *_unheard))
    threading.Thread(target=_end_after, args=(seconds,), name="trimesh SIGTERM", daemon=True).start()
    has_interrupts = is_run_interrupted_by_sigint()
    for interrupt, is_heard in list(_heeded.interrupts.items()):
        if not (is_heard and has_interrupts):
            interrupt()
    if has_interrupts:
        handler: Any = signal.getsignal(signal.SIGINT)
        handler(signal.SIGINT, frame)


def _end_after(seconds: float) -> None:
    time.sleep(min(seconds, threading.TIMEOUT_MAX))
    _end()


def _end() -> None:
    """End this process by SIGTERM; any thread may call it."""
    for stream in (sys.stdout, sys.stderr) if _heeded.pid == os.getpid() else ():  # not what a forked child inherits
        with suppress(Exception):  # gone, or in use by the interrupted code
            stream.flush()
    import ctypes  # noqa: PLC0415 - only here

    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # `signal.signal` is for the main thread, which may be stuck
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)
