"""The directory of a checkpoint: there when all of it is on disk, and not before."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex

import trio

METADATA = ".metadata"
"""What torch has in the directory of a checkpoint beside the files of parts."""


@asynccontextmanager
async def new_directory(path: Path) -> AsyncGenerator[Path]:
    """Make the directory of a checkpoint under another name; it gets its own with the end of the block.

    Yields:
        It, empty. Files in it must be synced to disk by who writes them.

    Raises:
        FileExistsError: There is something at `path`.
    """
    unfinished = _begin(path)
    try:
        yield unfinished
        with trio.CancelScope(shield=True):  # milliseconds; a cancel in between would leave it half named
            await trio.to_thread.run_sync(_finish, unfinished, path)
    except BaseException:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(lambda: shutil.rmtree(unfinished, ignore_errors=True))
        raise


def _begin(path: Path) -> Path:
    if path.exists():
        raise FileExistsError(f"a checkpoint is written to a path where nothing is, got {str(path)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{token_hex(4)}.unfinished"
    unfinished.mkdir()
    return unfinished


def _finish(unfinished: Path, path: Path) -> None:
    _sync(unfinished)
    unfinished.rename(path)  # fails if a checkpoint has come there meanwhile
    _sync(path.parent)


def _sync(directory: Path) -> None:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_synced(path: Path, parts: Mapping[str, bytes] | bytes) -> dict[str, tuple[int, int]]:
    """Write bytes, or those of several names one after another; return where each begins and how many they are."""
    places: dict[str, tuple[int, int]] = {}
    with path.open("wb") as file:
        for name, data in ({"": parts} if isinstance(parts, bytes) else parts).items():
            places[name] = file.tell(), len(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return places


def check_is_there(path: Path) -> None:
    """Raise unless there is a checkpoint at a path.

    Raises:
        FileNotFoundError: There is none.
    """
    if not (path / METADATA).is_file():
        raise FileNotFoundError(f"there is no checkpoint at {str(path)!r}: it has no file {METADATA!r}")
