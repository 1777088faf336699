"""Leak detector: fails a test that leaves processes, threads, descriptors or names in shared memory.

The guard compares this process before and after a test and reports the difference. It reads only /proc and /dev/shm,
and does not depend on the code under test:

- Processes: descendants of this process, and processes that lost their parent but carry this run's marker in their
  environment, or are forks of this process. A descendant must be gone when the test ends; an orphan (its parent was
  killed) has `ORPHAN_SECONDS`: trimesh promises a second after the loss of a controller, a busy machine gets more.
- Descriptors of this process, by number and by what they refer to.
- Threads of this process, native ones included. Trio keeps idle worker threads; those are allowed, and so are the pools
  that torch and numpy start and never stop.
- Names in /dev/shm that this run created: only its processes have them open or mapped; or no process has, and this one
  opened or sized them, or they begin with "trimesh". Other programs use the folder, too. Names of the CUDA driver,
  which a killed process leaves, do not count.

A clean test costs two scans (0.2 ms together); only a leaking test pays for the details.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

MARKER = "TRIMESH_TEST_ID"
RUN_ID = f"{os.environ.get(MARKER, '')}/{os.getpid()}"
"""Marker of this run; a run inside a test of another run begins with that run's marker."""

ORPHAN_SECONDS = 5.0
LINGER_SECONDS = 5.0
"""Time for ended things that are still visible: a joined thread until the kernel runs it once more, a semaphore of
another process between its two names. Only a leaking test waits that long."""
POLL_SECONDS = 0.005
ALLOWED_THREADS = ("Trio thread",)
POOL_THREADS = ("pt_", "OpenBLAS", "omp")
DEV_SHM = Path("/dev/shm")  # noqa: S108 - read, never written
DRIVER_NAMES = ("cuda.shm.",)
"""Prefixes of the names that the CUDA driver gives to memory of events between processes."""
OWN_NAMES = ("trimesh", "sem.trimesh")

_made: set[str] = set()
"""Names in /dev/shm that this process has opened or sized."""


@attrs.frozen
class Scan:
    """Processes, threads, descriptors and names that exist at one moment."""

    pids: frozenset[str]
    descriptors: frozenset[tuple[str, str]]
    threads: frozenset[str]
    shared: frozenset[str]


def scan() -> Scan:
    """Return the state of this process and the machine; cheap."""
    return Scan(
        frozenset(filter(str.isdigit, os.listdir("/proc"))),
        descriptors(),
        frozenset(os.listdir("/proc/self/task")),
        shared_names(),
    )


def shared_names() -> frozenset[str]:
    """Return the names in /dev/shm that a test may have left."""
    names = os.listdir(DEV_SHM) if DEV_SHM.is_dir() else []
    return frozenset(name for name in names if not name.startswith(DRIVER_NAMES))


def descriptors() -> frozenset[tuple[str, str]]:
    """Return (number, what it refers to) of every open descriptor of this process."""
    found = set[tuple[str, str]]()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return frozenset(found)


# ---- processes -------------------------------------------------------------------------------------------------------


def read(path: str) -> bytes:
    """Return the content of a file of /proc, b"" when its process is gone or not ours to read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def parent_and_state(pid: str) -> tuple[str, str]:
    """Return the parent's pid and the state letter; ("0", "X") for a process that is gone."""
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return (fields[1].decode(), fields[0].decode()) if len(fields) > 1 else ("0", "X")


def is_descendant(pid: str) -> bool:
    """Return whether the chain of parents of `pid` leads to this process."""
    me = str(os.getpid())
    while pid not in ("0", "1"):
        pid = parent_and_state(pid)[0]
        if pid == me:
            return True
    return False


def is_orphan_of_this_run(pid: str) -> bool:
    """Return whether this run started `pid`, and its parent has ended since."""
    for entry in read(f"/proc/{pid}/environ").split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == MARKER.encode() and f"{value.decode(errors='replace')}/".startswith(f"{RUN_ID}/"):
            return True
    # The environment of a fork that executed nothing is the one that this process was started with.
    return parent_and_state(pid)[0] == "1" and read(f"/proc/{pid}/cmdline") == read("/proc/self/cmdline")


def describe(pid: str) -> str:
    """Return one line about a leaked process."""
    parent, state = parent_and_state(pid)
    command = read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    name = read(f"/proc/{pid}/comm").decode(errors="replace").strip()
    return f"process {pid} ({name}, state {state}, parent {parent}): {command or 'no command line'}"


def left_processes(before: Scan) -> Iterator[str]:
    """Kill processes that the test left running, and yield a line for each."""
    new = sorted(frozenset(filter(str.isdigit, os.listdir("/proc"))) - before.pids, key=int)
    left = [pid for pid in new if is_descendant(pid)]
    orphans = [pid for pid in new if pid not in left and is_orphan_of_this_run(pid)]
    deadline = time.monotonic() + ORPHAN_SECONDS
    while orphans and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        orphans = [pid for pid in orphans if parent_and_state(pid)[1] not in "XZ"]
    lines = [*map(describe, left), *(f"orphaned {describe(pid)}" for pid in orphans)]
    for pid in [*left, *orphans]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    for pid in left:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(int(pid), 0)
    yield from lines


# ---- threads, descriptors, names -------------------------------------------------------------------------------------


def thread_names() -> dict[str, str]:
    """Return a name for every running thread of this process: Python's if there is one, else the kernel's."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    for tid in os.listdir("/proc/self/task"):
        names.setdefault(tid, _kernel_name(tid))
    return names


def _kernel_name(tid: str | int) -> str:
    return read(f"/proc/self/task/{tid}/comm").decode(errors="replace").strip()


def is_allowed_thread(name: str) -> bool:
    """Return whether a thread of this name may outlive a test."""
    if name.startswith(ALLOWED_THREADS):
        return True
    pools = "torch" in sys.modules or "numpy" in sys.modules
    return pools and (name.startswith(POOL_THREADS) or name == _kernel_name(os.getpid()))


def left_threads(before: Scan) -> Iterator[str]:
    """Yield a line for each thread that the test started and did not end."""
    deadline = time.monotonic() + LINGER_SECONDS
    while True:
        names = {tid: name for tid, name in thread_names().items() if name and tid not in before.threads}
        alive = {tid: name for tid, name in names.items() if not is_allowed_thread(name)}
        alive = {tid: name for tid, name in alive.items() if os.path.exists(f"/proc/self/task/{tid}")}
        if not alive or time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    for tid, name in alive.items():
        yield f"thread {tid} ({name})"


def left_descriptors(before: Scan) -> Iterator[str]:
    """Yield a line for each descriptor that the test left open."""
    gc.collect()  # closes descriptors that only a reference cycle keeps open
    for number, target in sorted(descriptors() - before.descriptors, key=lambda entry: int(entry[0])):
        yield f"descriptor {number} -> {target}"


def left_shared(before: Scan) -> Iterator[str]:
    """Yield a line for each new name in /dev/shm that this run made."""
    deadline = time.monotonic() + LINGER_SECONDS
    while True:
        left = [name for name in sorted(shared_names() - before.shared) if is_of_this_run(name)]
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    for name in left:
        yield f"shared memory {DEV_SHM / name}"


def is_of_this_run(name: str) -> bool:
    """Return whether a name of shared memory exists and, by its users and its form, was made by this run."""
    try:
        file = os.stat(DEV_SHM / name)
    except FileNotFoundError:
        return False
    if os.geteuid() not in (0, file.st_uid):  # another user's, whose processes are not ours to read
        return False
    users = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if uses(pid, file)]
    if users:
        return all(pid == str(os.getpid()) or is_descendant(pid) for pid in users)
    return name in _made or name.startswith(OWN_NAMES)


@functools.cache
def note_shared() -> None:
    """Record the names in /dev/shm that this process makes from now on: by `open`, or `shm_open` and `ftruncate`."""
    folder = f"{DEV_SHM}/"

    def note(event: str, args: tuple[object, ...]) -> None:
        if event not in ("open", "os.truncate", "os.mkdir"):
            return
        path = args[0]
        if event == "os.truncate" and isinstance(path, int):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{path}")
        if isinstance(path, str) and path.startswith(folder):
            _made.add(path.removeprefix(folder).partition("/")[0])

    sys.addaudithook(note)


def uses(pid: str, file: os.stat_result) -> bool:
    """Return whether a process has a file mapped or open.

    Files are compared by device and inode: a named semaphore is mapped by another name, which glibc has removed since.
    """
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}".encode()
    where = [device, str(file.st_ino).encode()]
    if any(line.split(maxsplit=5)[3:5] == where for line in read(f"/proc/{pid}/maps").splitlines()):
        return True
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), file):
                    return True
    return False


def guard() -> Iterator[None]:
    """Guard one test; a generator, as for a fixture.

    Raises:
        pytest.fail.Exception: The test left something behind; leaked processes have been killed.
    """
    os.environ[MARKER] = RUN_ID
    note_shared()
    before = scan()

    yield

    after = scan()
    left = list(left_processes(before)) if after.pids - before.pids else []
    if after.descriptors - before.descriptors:
        left.extend(left_descriptors(before))
    if after.threads - before.threads:
        left.extend(left_threads(before))
    if after.shared - before.shared:
        left.extend(left_shared(before))
    if left:
        pytest.fail("the test left behind:\n" + "\n".join(f"  {line}" for line in left), pytrace=False)
