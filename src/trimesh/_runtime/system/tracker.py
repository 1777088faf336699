"""The resource tracker of `multiprocessing`, which outlives the processes that it cleans up after.

It is a process that the first user of shared memory or of a semaphore starts. It reads their names from a pipe, and
unlinks what is left when the last process that can write there is gone. Whatever a worker has started is killed with
it, by its group, its session or its mark; of that the tracker has none, so that it ends by itself, moments later. Its
own mark says so to the spawner, which waits for it, not for long, when the family ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

from trimesh._runtime.system import prctl
from trimesh._runtime.system.import_watch import when_imported

TRACKER_MARK: Final = "TRIMESH_TRACKER"
"""Environment variable of a resource tracker, in place of `spawner_prctl.MARKER`."""

_MODULE: Final = "multiprocessing.resource_tracker"


def keep_trackers() -> None:
    """Let trackers that this process, and what is forked from it, will start be ones that outlive their users."""
    when_imported(_MODULE, _keep)


def release_tracker() -> None:
    """Let go of the tracker that this process uses, if any: it ends when all other users have ended, too."""
    module: Any = sys.modules.get(_MODULE)
    tracker: Any = getattr(module, "_resource_tracker", None)
    fd = getattr(tracker, "_fd", None)
    if isinstance(fd, int):
        os.close(fd)
        tracker._fd = None  # noqa: SLF001 - it has no method that does not wait


def _keep(module: ModuleType) -> None:
    tracker: Any = module
    tracker.util = _Starting(tracker.util)


class _Starting:
    """`multiprocessing.util` as the module of the tracker sees it, which starts the process by it."""

    def __init__(self, util: Any) -> None:
        self._util = util

    def __getattr__(self, name: str) -> Any:
        return getattr(self._util, name)

    def spawnv_passfds(self, path: str | bytes, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
        """Start a tracker, in a session of its own; return its pid."""
        env = {name: value for name, value in os.environ.items() if name != prctl.MARKER}
        env[TRACKER_MARK] = "1"
        process = subprocess.Popen(  # noqa: S603 - what multiprocessing starts
            args, executable=path, pass_fds=passfds, env=env, restore_signals=False, start_new_session=True
        )
        process.returncode = 0  # multiprocessing waits for it by its pid, or nothing does
        return process.pid
