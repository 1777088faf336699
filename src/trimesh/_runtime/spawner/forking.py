"""A spawner that is forked by a process which has imported what spawners import: a tenth of what an executed one costs.

    agent: imports --fork--> spawner --fork--> workers
           reads its order, and what is secret, afterwards

It becomes what an executed one is: session, streams, descriptors, environment, mark.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Final, NoReturn

from trimesh._runtime.spawner import main
from trimesh._runtime.spawner.far_root import MODULES
from trimesh._runtime.spawner.process import ONE_THREAD, SpawnerProcess
from trimesh._runtime.system import prctl

_NO_MARK: Final = prctl.marker_of(0, 0)


def marked(env: dict[str, str]) -> dict[str, str]:
    """Return an environment with which a process is executed that is to fork its spawner: with room for its mark."""
    return {prctl.MARKER: _NO_MARK, **env}


def import_for_spawners() -> None:
    """Import what spawners do, so that they can be forked from here. Starts no thread and opens nothing."""
    for name in MODULES:
        importlib.import_module(name)
    main.load_native()


def can_fork_spawners() -> bool:
    """Tell whether this process may fork one: it has one thread, and was executed with a mark to overwrite."""
    mark = os.environ.get(prctl.MARKER, "")
    return len(mark) == len(_NO_MARK) and len(os.listdir("/proc/self/task")) == 1


def fork_spawner(root_id: int) -> SpawnerProcess:
    """Fork a spawner; see `SpawnerProcess.start`. Called where `can_fork_spawners`, before anything secret is here.

    What is on the stack and in memory now, all workers have too.

    Raises:
        SpawnError: It cannot be forked.
    """
    gc.freeze()  # of what both have, the collector of neither makes copies
    return SpawnerProcess.begin(root_id, _fork)


class _ForkedSpawner:
    """See `SpawnerChild`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _fork(passed: list[int], streams: list[int | None], root_id: int) -> _ForkedSpawner:
    del root_id  # the spawner is told, and writes its mark then
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    pid = os.fork()
    if pid != 0:
        return _ForkedSpawner(pid)
    try:
        _be_spawner(passed, streams, parent)
    except BaseException:  # noqa: BLE001 - it must not run on as what it was forked from
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(main.EXIT_FATAL)


def _be_spawner(passed: list[int], streams: list[int | None], parent: int) -> NoReturn:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    for number, stream in enumerate(streams, 1):
        if stream is not None:
            os.dup2(nothing, number)
    prctl.close_others({0, 1, 2, *passed})
    os.environ.update(ONE_THREAD)
    gc.disable()
    main.main([*map(str, passed), str(parent)])
