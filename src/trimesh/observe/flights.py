"""The flight records of a run, read from its folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trimesh import limits
from trimesh._runtime.recording import RunFolder, files_of, is_alive, is_running, read_file, run_folders
from trimesh._wire import flight
from trimesh.errors import ConnectError, ProtocolError


class RunRecords(msgspec.Struct, frozen=True):
    """What the processes of one run have left.

    Attributes:
        folder: Where.
        flights: What each has left, by its incarnation.
        unreadable: Files that are no flight records, and why.
        is_running: Whether the run goes on.
    """

    folder: Path
    flights: dict[str, flight.Flight]
    unreadable: dict[str, str]
    is_running: bool

    @property
    def root(self) -> flight.Flight | None:
        """Of the controller, if it can be read; it may be on another host."""
        return next((one for one in self.flights.values() if one.head.job is not None), None)


def recorded_runs() -> list[RunFolder]:
    """Return the folders of flight records of this user on this machine, the newest first.

    Raises:
        ConnectError: Their folder belongs to another user, or others may enter it.
    """
    try:
        return run_folders()
    except OSError as error:
        raise ConnectError(f"flight records of this user cannot be looked for: {error}") from error


def read_records(folder: Path) -> RunRecords:
    """Return what the processes of a run have left.

    Raises:
        ConnectError: The folder cannot be read, or has no flight record.
    """
    flights = dict[str, flight.Flight]()
    unreadable = dict[str, str]()
    try:
        files = files_of(folder)
    except OSError as error:
        raise ConnectError(f"flight records cannot be read: {error}") from error
    lives = False
    for path in files[: limits.RECORD_FILES_MAX]:
        try:
            flights[path.name] = found = flight.read_flight(read_file(path))
        except (OSError, ProtocolError) as error:
            unreadable[path.name] = str(error)
        else:
            lives = lives or (not found.ended_at and is_running(found.head))
    if not flights:
        raise ConnectError(f"there is no flight record in {folder}")
    return RunRecords(folder, flights, unreadable, lives)


def read_record(path: str | Path) -> flight.Flight:
    """Return what one process has left, or has written so far: the file is `ProcRow.record`.

    Raises:
        ValueError: It is on another host, is none, or cannot be read.
    """
    if not path:
        raise ValueError("this process keeps no flight record")
    try:
        return flight.read_flight(read_file(Path(path)))
    except FileNotFoundError:
        raise ValueError("its flight record is not on this machine") from None
    except (OSError, ProtocolError) as error:
        raise ValueError(f"its flight record cannot be read: {error}") from error


def _is_alive(folder: RunFolder) -> bool:
    try:
        return is_alive(folder)
    except OSError:  # removed meanwhile
        return True


def find_records(where: str = "", pid: int | None = None) -> RunRecords:
    """Return what the newest run has left that does not go on, or a given one.

    Args:
        where: The folder of a run; empty for one of this user on this machine.
        pid: Of its controller; it may go on.

    Raises:
        ConnectError: There is none.
    """
    if where:
        return read_records(Path(where))
    for folder in recorded_runs():
        if pid not in (None, folder.pid) or (pid is None and _is_alive(folder)):
            continue
        return read_records(folder.path)
    whose = "no run that has ended otherwise than well" if pid is None else f"no run of process {pid}"
    raise ConnectError(f"{whose} has left flight records on this machine; a run that ends well removes its own")
