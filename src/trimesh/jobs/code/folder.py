"""The folder of a host that holds contents and trees of all jobs of a user. Its methods read and write; in a thread.

    ~/.cache/trimesh/code/contents/3f/9a...         each content once, by digest, read-only
                          trees/<digest>/src/...    a whole tree, its files hard links of contents

CF-1 A tree that has its name is whole: it is made beside, and renamed. So is a content.
CF-2 A content that was written to on its host, through a tree, is not taken for what it was: its time says so.
CF-3 What is removed is in no tree, or in one that was not in use for `limits.CODE_KEPT_SECONDS`; never while another
     process adds to the folder.

CC-1 A folder that others may write to is not used: what is in it is executed.
CC-2 A lock is one of a file that is there: who removes a file holds it alone, and whoever had opened it before opens
     the next one.
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
    """Return where a folder of this user is: `$XDG_CACHE_HOME/trimesh/NAME`, or in `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "trimesh" / name


def make_own_folder(place: Path) -> os.stat_result:
    """Make a folder for this user alone, where it is not there; return what the system says of it (CC-1).

    Raises:
        PermissionError: It belongs to another user, or others may write to it.
        OSError: It cannot be made.
    """
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = place.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{place} must belong to this user, and no other may write to it: it holds code")
    return status


class LockedByFile:
    """What processes of a host use together, or one of them alone. None waits for the lock.

    Args:
        place: The file of the lock; made with the first lock, or before by `_open`.
    """

    def __init__(self, place: Path) -> None:
        self._lock_place = place
        self._lock = -1

    def lock_shared(self) -> bool:
        """Keep it as it is; return False while another process makes or removes some of it."""
        return self._locked(fcntl.LOCK_SH)

    def lock_alone(self) -> bool:
        """Become the only process that uses it; return False while there are others."""
        return self._locked(fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Let others remove what is in no use."""
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
    """A content that is being written, beside the contents; `CodeFolder.add` makes it one.

    Attributes:
        place: Of its file.
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
        """Of what was written."""
        return self._hash.digest()

    def seal(self) -> None:
        """End the writing: from now on a change shows."""
        self._file.close()
        self.place.chmod(0o400)
        _seal(self.place)

    def close(self) -> None:
        """Remove it, if it has not become a content."""
        self._file.close()
        self.place.unlink(missing_ok=True)


def _seal(place: str | Path) -> None:
    os.utime(place, ns=(_SEALED_NS, _SEALED_NS))


def _is_sealed(place: str, size: int) -> bool:
    """Whether a file is there, and nothing has written to it since it was sealed."""
    try:
        status = os.stat(place)
    except FileNotFoundError:
        return False
    return (status.st_size, status.st_mtime_ns) == (size, _SEALED_NS)


class CodeFolder(LockedByFile):
    """Contents and trees of a host. It is locked shared by who adds to it, alone by who removes what is in no use.

    Args:
        place: Made when it is not there, for this user alone.

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
        """Return the digests of contents that are not here, or not as they were."""
        return [
            digest
            for digest, size in {one.digest: one.size for one in files if not one.target}.items()
            if not _is_sealed(self._place_of(digest), size)
        ]

    def _place_of(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self._contents}/{name[:2]}/{name[2:]}"

    def draft(self) -> Draft:
        """Return what a content can be written to."""
        return Draft(self._contents / f"{_DRAFT}{secrets.token_hex(8)}")

    def add(self, draft: Draft) -> None:
        """Make a content of a draft."""
        draft.seal()
        place = self._place_of(draft.digest)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        draft.place.rename(place)

    def tree(self, manifest: Manifest) -> Path:
        """Return the tree of a manifest, whose contents are here; make it where there is none.

        Raises:
            FileNotFoundError: A content is not here.
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
        """Put files again that were changed or removed in a tree, each at once."""
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
        if file.is_executable:  # the permission belongs to the content, which others have without it
            self._copy(content, place, 0o500)
            return
        try:
            os.link(content, place)
        except OSError as error:
            if error.errno not in (errno.EMLINK, errno.EPERM, errno.ENOTSUP):
                raise
            self._copy(content, place, 0o400)  # too many trees have it, or the file system has no links

    def _copy(self, content: str, place: str, mode: int) -> None:
        shutil.copyfile(content, place)
        os.chmod(place, mode)
        _seal(place)

    def touch(self, tree: Path) -> None:
        """Note that a tree is in use."""
        os.utime(tree)

    def prune(self, kept_seconds: float) -> None:
        """Remove trees that were not in use for so long, contents in no tree, and drafts of who has died."""
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


# ---- where synchronized files are, as a process sees it --------------------------------------------------------------

VARIABLE: Final = "TRIMESH_SYNCED"
"""Of the environment of processes and commands on a host: the folder of its tree."""


def synced(path: str | os.PathLike[str]) -> Path:
    """Return where a file or folder is that was given to `hosts.sync`: on a host its copy, elsewhere the path itself.

    So one line works in the program, on a laptop and on a host: `synced("configs") / "small.yaml"`.

    Args:
        path: Relative, as given to `hosts.sync`, or below what was. What was outside of the working directory there
            has its last name.

    Raises:
        ValueError: On a host: the path is absolute, or leads out of the tree.

    Blocking: never; it looks at no file.
    """
    root = os.environ.get(VARIABLE, "")
    if not root:
        return Path(path)
    name = os.path.normpath(path)
    if name != "." and not is_inside(name):
        raise ValueError(f"synced() takes a relative path as `hosts.sync` was given it, got {os.fspath(path)!r}")
    return Path(root, name)
