"""Code cache of a host: contents and trees of all jobs of a user. Its methods block on file I/O; call them in a thread.

    ~/.cache/trimesh/code/contents/3f/9a...         each content once, by digest, read-only
                          trees/<digest>/src/...    a whole tree, its files hard links of contents

CF-1 A tree or content under its final name is whole: it is made under a temporary name, and renamed.
CF-2 A content that was modified on its host, through a tree, is not reused: its modification time shows it.
CF-3 Only contents in no tree, and trees unused for `limits.CODE_KEPT_SECONDS`, are removed; never while another process
     adds to the folder.

CC-1 A folder that others may write to is not used, because its contents are executed.
CC-2 A lock counts only on a file that still exists: a process removes a file while it holds it alone, and processes
     that had opened it before open the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from trimesh._transport.native.carriers import boot_id
from trimesh.jobs.code.scanning import CodeFile, Manifest, digest_of, is_inside, new_hash


def cache_folder(name: str) -> Path:
    """Return the path of a cache folder of this user: `$XDG_CACHE_HOME/trimesh/NAME`, or in `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "trimesh" / name


def make_own_folder(place: Path) -> os.stat_result:
    """Make a private folder if it is missing; return its `stat` (CC-1).

    Raises:
        PermissionError: It belongs to another user, or others may write to it.
        OSError: It cannot be made.
    """
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = place.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{place} holds code, so it must belong to this user, {os.geteuid()}, and no other may write to it; got "
            f"user {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}: remove it, or set XDG_CACHE_HOME"
        )
    return status


class LockedByFile:
    """A resource with a file lock, shared or exclusive between processes of a host. Locking never waits.

    Args:
        place: The file of the lock; made with the first lock, or before by `_open`.
    """

    def __init__(self, place: Path) -> None:
        self._lock_place = place
        self._lock = -1

    def lock_shared(self) -> bool:
        """Take the shared lock; return False while another process holds the exclusive one."""
        return self._locked(fcntl.LOCK_SH)

    def lock_alone(self) -> bool:
        """Take the exclusive lock; return False while other processes hold a lock."""
        return self._locked(fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Release the lock, so that others can remove unused parts."""
        if self._lock >= 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> None:
        if self._lock < 0:
            self._lock = os.open(self._lock_place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _locked(self, kind: int) -> bool:
        self._open()
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if self._is_current():
            return True
        self.close()  # CC-2
        return self._locked(kind)

    def _is_current(self) -> bool:
        try:
            now = self._lock_place.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(now, os.fstat(self._lock))


# ---- folder ----------------------------------------------------------------------------------------------------------

_SEALED_NS: Final = 1_000_000_000_000_000_000
"""Modification time of each content, of 2001: another one shows that it was written to."""

_DRAFT: Final = "draft-"


def default_folder() -> Path:
    """Return the folder of this user; see `cache_folder`."""
    return cache_folder("code")


class Draft:
    """A content being written under a temporary name; `CodeFolder.add` renames it.

    Attributes:
        place: Path of its file.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._file = place.open("xb")
        self._hash = new_hash()

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self._hash.update(data)

    @property
    def digest(self) -> bytes:
        """Digest of the bytes written."""
        return self._hash.digest()

    def seal(self) -> None:
        """Finish writing: from now on a change is detected."""
        self._file.close()
        self.place.chmod(0o400)
        _seal(self.place)

    def close(self) -> None:
        """Remove the draft, if it has not become a content."""
        self._file.close()
        self.place.unlink(missing_ok=True)


def _seal(place: str | Path) -> None:
    os.utime(place, ns=(_SEALED_NS, _SEALED_NS))


def _is_sealed(place: str, size: int) -> bool:
    """Return whether a file exists and is unchanged since it was sealed."""
    try:
        status = os.stat(place)
    except FileNotFoundError:
        return False
    return (status.st_size, status.st_mtime_ns) == (size, _SEALED_NS)


class CodeFolder(LockedByFile):
    """Contents and trees of a host. Adding takes the shared lock, removing unused ones the exclusive lock.

    Args:
        place: Path; made if it is missing, for this user alone.

    Attributes:
        name: Equal for all processes of this machine that use the same folder.

    Raises:
        OSError: See `make_own_folder`.
    """

    def __init__(self, place: Path) -> None:
        super().__init__(place / "lock")
        self._contents, self._trees = place / "contents", place / "trees"
        status = make_own_folder(place)
        for folder in (self._contents, self._trees):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.name = f"{boot_id()}:{status.st_dev}:{status.st_ino}"
        self._open()

    def missing(self, files: Iterable[CodeFile]) -> list[bytes]:
        """Return the digests of contents that are missing or modified."""
        return [
            digest
            for digest, size in {one.digest: one.size for one in files if not one.target}.items()
            if not _is_sealed(self._place_of(digest), size)
        ]

    def _place_of(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self._contents}/{name[:2]}/{name[2:]}"

    def draft(self) -> Draft:
        """Open a draft, to write a content to."""
        return Draft(self._contents / f"{_DRAFT}{secrets.token_hex(8)}")

    def add(self, draft: Draft) -> None:
        """Turn a draft into a content."""
        draft.seal()
        place = self._place_of(draft.digest)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        draft.place.rename(place)

    def tree(self, manifest: Manifest) -> Path:
        """Return the tree of a manifest; make it from its contents if there is none.

        Raises:
            FileNotFoundError: A content is missing.
        """
        place = self._trees / digest_of(manifest.encoded()).hex()
        if place.is_dir():
            self._mend(str(place), manifest)
        else:
            draft = self._trees / f"{_DRAFT}{secrets.token_hex(8)}"
            draft.mkdir(mode=0o700)
            try:
                self._fill(str(draft), manifest)
                draft.rename(place)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process has made it
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        self.touch(place)
        return place

    def _fill(self, draft: str, manifest: Manifest) -> None:
        folders = set[str]()
        for file in manifest.files:
            folder, _, _ = file.name.rpartition("/")
            if folder and folder not in folders:
                os.makedirs(f"{draft}/{folder}", exist_ok=True)
                folders.add(folder)
            self._put(file, f"{draft}/{file.name}")

    def _mend(self, tree: str, manifest: Manifest) -> None:
        """Restore files that were changed or removed in a tree, each atomically."""
        for file in manifest.files:
            place = f"{tree}/{file.name}"
            if not file.target and not _is_sealed(place, file.size):
                draft = f"{tree}/{_DRAFT}{secrets.token_hex(8)}"
                self._put(file, draft)
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.replace(draft, place)

    def _put(self, file: CodeFile, place: str) -> None:
        if file.target:
            os.symlink(file.target, place)
            return
        content = self._place_of(file.digest)
        if file.is_executable:  # a link would share the permission with trees where the file is not executable
            self._copy(content, place, 0o500)
            return
        try:
            os.link(content, place)
        except OSError as error:
            if error.errno not in (errno.EMLINK, errno.EPERM, errno.ENOTSUP):
                raise
            self._copy(content, place, 0o400)  # it has too many links, or the file system has none

    def _copy(self, content: str, place: str, mode: int) -> None:
        shutil.copyfile(content, place)
        os.chmod(place, mode)
        _seal(place)

    def touch(self, tree: Path) -> None:
        """Mark a tree as used now."""
        os.utime(tree)

    def prune(self, kept_seconds: float) -> None:
        """Remove trees unused for `kept_seconds`, contents in no tree, and drafts of dead processes."""
        before = time.time() - kept_seconds
        for tree in self._trees.iterdir():
            with suppress(FileNotFoundError):
                if tree.name.startswith(_DRAFT) or tree.stat().st_mtime < before:
                    gone = tree.rename(tree.with_name(f"{_DRAFT}{secrets.token_hex(8)}"))  # CF-1
                    shutil.rmtree(gone)
        for content in self._contents.glob("*/*"):
            with suppress(FileNotFoundError):
                status = content.stat()
                if status.st_nlink == 1 and status.st_ctime < before:
                    content.unlink()
        for draft in self._contents.glob(f"{_DRAFT}*"):
            draft.unlink(missing_ok=True)


# ---- paths of synchronized files -------------------------------------------------------------------------------------

VARIABLE: Final = "TRIMESH_SYNCED"
"""Environment variable of processes and commands on a host: the folder of its tree."""


def synced(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder passed to `hosts.sync`: on a host its copy, elsewhere the path itself.

    So one line works in the program, on a laptop and on a host: `synced("configs") / "small.yaml"`.

    Args:
        path: Relative path, as passed to `hosts.sync`, or below it. A path that was outside of the working directory
            there has its last component as its name.

    Raises:
        ValueError: On a host: the path is absolute, or leads out of the tree.

    Blocking: never; it reads no file.
    """
    root = os.environ.get(VARIABLE, "")
    if not root:
        return Path(path)
    name = os.path.normpath(path)
    if name != "." and not is_inside(name):
        raise ValueError(f"synced() takes a relative path, as passed to `hosts.sync`, got {os.fspath(path)!r}")
    return Path(root, name)
