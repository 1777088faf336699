"""Where flight records are: `.records/MILLISECONDS-PID-ID/PROC` in the private folder of this user.

The folder of a run is made by its controller and removed when the outermost block is left without an error. Those of
other runs that have ended are removed, the oldest first, when there are many or they are old.

RF-1 Only folders of this user, with names of that form, are entered or removed, and links are never followed.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from trimesh import limits
from trimesh._runtime.system.exits import start_of
from trimesh._runtime.system.private_folder import entered, user_folder
from trimesh._transport.native.carriers import boot_id
from trimesh._wire import flight
from trimesh.errors import ProtocolError

_RUN: Final = re.compile(r"([0-9]{13})-([0-9]{1,9})-([0-9a-f]{1,16})")
_FILE: Final = re.compile(r"[0-9a-f]{1,16}")


class RunFolder(msgspec.Struct, frozen=True):
    """The folder of the flight records of one run.

    Attributes:
        begun_at: Unix time.
        pid: Of the controller.
        root: Its incarnation, as rows call it.
    """

    path: Path
    begun_at: float
    pid: int
    root: str


def records_folder() -> Path:
    """Return where the folders of runs are."""
    return user_folder() / ".records"


def make_run_folder(pid: int, root: str) -> Path:
    """Make the folder of a run, and remove those that are too many or too old.

    Raises:
        OSError: The folder cannot be trusted, or made.
    """
    clean_up(limits.RECORD_RUNS_MAX - 1)
    path = records_folder() / f"{round(time.time() * 1000):013d}-{pid}-{root}"
    path.mkdir(mode=0o700)
    return path


def folder_here(path: Path) -> Path:
    """Return, on another host than that of the controller, the folder of its run, and make it if it is missing.

    Raises:
        OSError: The folder cannot be trusted, or made; or `path` is none.
    """
    if not _RUN.fullmatch(path.name):
        raise OSError(f"the folder of a run is called MILLISECONDS-PID-ID, got {path.name!r}")
    with entered(user_folder()), entered(records_folder()), entered(records_folder() / path.name):
        return records_folder() / path.name


def run_folders() -> list[RunFolder]:
    """Return the folders of runs, the newest first.

    Raises:
        OSError: Their folder cannot be trusted.
    """
    with entered(user_folder()), entered(records_folder()) as fd:
        names = os.listdir(fd)
    found = [match for name in names if (match := _RUN.fullmatch(name))]
    found.sort(key=lambda match: match[0], reverse=True)
    return [RunFolder(records_folder() / match[0], int(match[1]) / 1000, int(match[2]), match[3]) for match in found]


def files_of(folder: Path) -> list[Path]:
    """Return the flight records in the folder of a run.

    Raises:
        OSError: It cannot be read.
    """
    return sorted(folder / name for name in os.listdir(folder) if _FILE.fullmatch(name))


def read_file(path: Path, nbytes: int = limits.RECORD_FILE_BYTES_MAX + 1) -> bytes:
    """Return the first bytes of a flight record.

    Raises:
        OSError: It cannot be read, or is a link.
    """
    with open(path, "rb", opener=_open_itself) as file:
        return file.read(nbytes) or b""


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def is_open(path: Path) -> bool:
    """Return whether the process whose record a file is lives, and writes into it; False for any other file."""
    try:
        head, ended_at = flight.read_head(read_file(path, flight.PAGE_BYTES))
    except (OSError, ProtocolError):
        return False
    return not ended_at and is_running(head)


def is_running(head: flight.FlightHead) -> bool:
    """Return whether the process of a record lives."""
    return head.boot == boot_id() and head.ticks == start_of(head.proc.pid)


def is_alive(folder: RunFolder) -> bool:
    """Return whether a run goes on: its controller, or on another host than that of the controller any process of it.

    Raises:
        OSError: The folder cannot be read.
    """
    root = folder.path / folder.root
    return is_open(root) if root.exists() else any(is_open(path) for path in files_of(folder.path))


def clean_up(keep: int) -> None:
    """Remove folders of runs that have ended, but for the newest `keep` of them that are not too old.

    Raises:
        OSError: Their folder cannot be trusted.
    """
    oldest = time.time() - limits.RECORD_AGE_SECONDS
    for place, folder in enumerate(run_folders()):
        if place >= keep or folder.begun_at < oldest:
            with suppress(OSError):
                if not is_alive(folder):
                    remove(folder.path)


def remove(folder: Path) -> None:
    """Remove the folder of a run, with its records. What cannot be removed stays."""
    with suppress(OSError):
        for path in files_of(folder):
            with suppress(FileNotFoundError):
                path.unlink()
        folder.rmdir()


def thin_out(folder: Path) -> None:
    """Remove records of processes that have ended from the folder of a running run, when there are many."""
    with suppress(OSError):
        files = files_of(folder)
        if len(files) <= limits.RECORD_ENDED_MAX:
            return
        ended = [(path.stat().st_mtime, path) for path in files if not is_open(path)]
        for _, path in sorted(ended)[: max(0, len(ended) - limits.RECORD_ENDED_MAX)]:
            with suppress(FileNotFoundError):
                path.unlink()
