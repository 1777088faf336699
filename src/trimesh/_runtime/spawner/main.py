"""The spawner: a small single-threaded process that forks workers, reaps them, and ends with its controller.

    controller --exec--> import what workers need --> Ready --> poll loop (`spawner_loop`) until Stop or death

The client passes three arguments: the broker socket, the controller's pidfd, the controller's pid. Its program has
disabled the collector: imports make no garbage worth looking for.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import trio

from trimesh._runtime.spawner import boot, wire
from trimesh._runtime.spawner.loop import ForkedChild, Spawner
from trimesh._runtime.spawner.socket import BrokerSocket
from trimesh._runtime.system import prctl
from trimesh._runtime.system.script_pickle import carry_script
from trimesh._runtime.system.tracker import keep_trackers
from trimesh.errors import ProtocolError

EXIT_FATAL: Final = 70
"""Exit code after an error of the spawner itself, or of a module it was told to import."""

_TEXT_CHARS_MAX: Final = 12_000
_THREAD_PROBES: Final = 20
_THREAD_PROBE_SECONDS: Final = 0.005


def main(arguments: Sequence[str]) -> NoReturn:
    """Be the spawner, and in each child it forks the worker."""
    socket_fd, controller_pidfd, controller_pid = (int(argument) for argument in arguments)
    marker = prctl.ProcessMarker()
    prctl.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != controller_pid:
        os._exit(EXIT_FATAL)
    for fd in (socket_fd, controller_pidfd):
        os.set_inheritable(fd, False)  # noqa: FBT003
    root = BrokerSocket(socket.socket(fileno=socket_fd))
    spawner: Spawner | None = None
    try:
        spawner = _start(root, controller_pidfd, marker)
        spawner.run()
    except ForkedChild as child:
        assert spawner is not None
        spawner.forget()
        start = child.start
    except BaseException as error:  # noqa: BLE001 - the last frame of the process; the controller is told
        _fail(root, spawner, error)
    else:
        os._exit(0)
    del spawner, root
    boot.run_forked(start)


def _fail(root: BrokerSocket, spawner: Spawner | None, error: BaseException) -> NoReturn:
    text = str(error) if isinstance(error, boot.RefusalError) else "".join(traceback.format_exception(error))
    with contextlib.suppress(BaseException):
        root.send(wire.Fatal(text[-_TEXT_CHARS_MAX:]))
    with contextlib.suppress(BaseException):
        if spawner is not None:
            spawner.end_family()
    os._exit(EXIT_FATAL)


def _start(root: BrokerSocket, controller_pidfd: int, marker: prctl.ProcessMarker) -> Spawner:
    prctl.become_subreaper()
    prctl.set_process_name("trimesh-spawner")
    _raise_descriptor_limit()
    hello = _wait_hello(root, controller_pidfd)
    marker.family = hello.agent or hello.root_id
    marker.write(marker.family)
    keep_trackers()
    carry_script()
    own_fds, env = _open_fds(), dict(os.environb)
    for name in hello.modules:
        boot.import_preload(name)
        check_forkable(name)
    load_native()
    kept_fds = frozenset(_open_fds() - own_fds)
    preload_env = {name: value for name, value in os.environb.items() if env.get(name) != value}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # From here on workers may exist, and only this process can end all of them: it must see the controller's death
    # itself. The signal merely continues a spawner that was stopped.
    prctl.set_parent_death_signal(signal.SIGCONT)
    gc.freeze()  # the collector of a worker does not touch, and so does not copy, what all share
    gc.enable()
    return Spawner(root, hello.root_id, controller_pidfd, marker, preload_env, kept_fds)


def load_native() -> None:
    """Load the native library for all workers, where they are going to use it; it starts no thread by that."""
    if "trimesh._native.lib" in sys.modules:
        from trimesh._native import lib  # noqa: PLC0415 - not otherwise

        with contextlib.suppress(lib.NativeLibraryError):  # a worker that needs it will say so
            lib.load()


def _raise_descriptor_limit() -> None:
    """Take as many descriptors as we may: about eight a worker. Workers get their caller's limit back."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _wait_hello(root: BrokerSocket, controller_pidfd: int) -> wire.Hello:
    waiter = select.poll()
    waiter.register(root.fileno(), select.POLLIN)
    waiter.register(controller_pidfd, select.POLLIN)
    while True:
        if controller_pidfd in dict(waiter.poll()):
            os._exit(EXIT_FATAL)
        received = root.receive()
        if received is not None:
            if isinstance(received.record, wire.Hello):
                return received.record
            raise ProtocolError(f"the controller says Hello first, got {type(received.record).__name__}")


def _open_fds() -> set[int]:
    found = set[int]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.fstat(int(name))
            found.add(int(name))
    return found


def check_forkable(name: str) -> None:
    """Check that this process can still be forked after the import of `name` (rule O2).

    Raises:
        RefusalError: The module started a thread, CUDA, or Trio.
    """
    problem = None
    torch: Any = sys.modules.get("torch")
    threads = _thread_count()
    if trio.lowlevel.in_trio_run():
        problem = "it runs Trio"
    elif torch is not None and torch.cuda.is_initialized():
        problem = "it has initialised CUDA"
    elif threads != 1:
        problem = f"it has started {threads - 1} thread(s)"
    if problem is not None:
        raise boot.RefusalError(
            f"a preloaded module must leave the process fit to be forked, but after importing {name!r} {problem}; "
            "leave it out of preload=, or write python=sys.executable to start processes by exec"
        )


def _thread_count() -> int:
    """Count threads; one that has just ended may be seen for a moment."""
    count = 1
    for _ in range(_THREAD_PROBES):
        count = len(os.listdir("/proc/self/task"))
        if count == 1:
            break
        time.sleep(_THREAD_PROBE_SECONDS)
    return count
