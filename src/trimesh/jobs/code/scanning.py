"""Scanner of the program's files for a tree of code. Runs in a thread: it reads folders, runs git, hashes contents.

SC-1 In a folder of a git repository, files that git ignores are left out; elsewhere no file is ignored.
SC-2 A content is hashed again only if size, time or inode of its file have changed since.

MF-1 Trees with the same names, contents, permissions to execute, links and import paths have the same digest.
MF-2 No name in a manifest leads out of the tree: none is absolute, has `..`, or goes through a link of the same tree.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from trimesh import limits
from trimesh.errors import ProtocolError

DIGEST_BYTES: Final = 32


class CodeFile(msgspec.Struct, frozen=True, array_like=True):
    """A file or a symbolic link of a tree.

    Attributes:
        name: Path in the tree, parts separated by `/`.
        digest: Digest of its content; empty for a link.
        size: Size of its content in bytes.
        is_executable: Whether its owner may execute it.
        target: Target of a link; empty for a file.
    """

    name: str
    digest: bytes
    size: int
    is_executable: bool = False
    target: str = ""


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """All files of a tree, in the order of their names.

    Attributes:
        files: Files and links.
        import_paths: Folders of the tree that belong on `sys.path`, in order; "" is the tree itself.
    """

    files: tuple[CodeFile, ...]
    import_paths: tuple[str, ...]

    @classmethod
    def of(cls, files: Iterable[CodeFile], import_paths: Iterable[str]) -> Manifest:
        return cls(tuple(sorted(files, key=_name_of)), tuple(import_paths))

    def encoded(self) -> bytes:
        """Return the encoded manifest."""
        return _encoder.encode(self)

    @property
    def size(self) -> int:
        """Bytes of all contents."""
        return sum(file.size for file in self.files)


def new_hash() -> hashlib.blake2b:
    """Return a hash object for a content that arrives in parts."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def digest_of(data: bytes) -> bytes:
    """Return the digest of a content, or of a manifest's bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def decoded(data: bytes) -> Manifest:
    """Decode a manifest.

    Raises:
        ProtocolError: It is malformed, or a name in it leads out of the tree.
    """
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a tree of code must be described by a manifest: {error}") from None
    links = {file.name for file in manifest.files if file.target}
    names = set[str]()
    for file in manifest.files:
        if not is_inside(file.name) or file.name in names or not links.isdisjoint(_parents(file.name)):
            raise ProtocolError(f"each file of a tree must have its own path inside the tree, got {file.name!r}")
        if len(file.digest) != (0 if file.target else DIGEST_BYTES) or "\0" in file.target:
            raise ProtocolError(
                f"a file must have a digest of {DIGEST_BYTES} bytes, and a link none but a target, got {file.name!r}"
            )
        names.add(file.name)
    if not all(path == "" or is_inside(path) for path in manifest.import_paths):
        raise ProtocolError(f"folders to import from must be in the tree, got {manifest.import_paths!r}")
    return manifest


def is_inside(name: str) -> bool:
    """Return whether a relative path stays inside its tree."""
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _name_of(file: CodeFile) -> str:
    return file.name


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Manifest)


# ---- scanning --------------------------------------------------------------------------------------------------------

_NEVER: Final = (".git", ".hg", ".svn", "__pycache__", "*.pyc")
_NO_REPOSITORY: Final = 128
_LARGEST_NAMED: Final = 3

_Known = tuple[tuple[int, int, int], bytes]
"""Size, time and inode of a file when it was hashed, and the digest of its content."""


class CodeSource(msgspec.Struct, frozen=True):
    """A given file or folder, and its path in the tree ("" is the tree itself)."""

    path: str
    name: str


class TreeScan(msgspec.Struct, frozen=True):
    """Result of a scan.

    Attributes:
        manifest: Manifest of the tree.
        paths: Path of a local file with each content, by digest.
    """

    manifest: Manifest
    paths: dict[bytes, str]


class Scanner:
    """Finds the files of a tree, repeatedly.

    Args:
        paths: Files and folders, absolute or relative to the working directory. One inside the working directory keeps
            its relative path in the tree; any other gets the last component of its path.
        exclude: `fnmatch` patterns to leave out: of a file or folder name, or of a path below a given folder.

    Raises:
        TypeError, ValueError: They are no paths or patterns, or two paths collide in the tree.
        FileNotFoundError: A path does not exist.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], exclude: Sequence[str]) -> None:
        self.sources = _checked_sources(paths)
        self._excluded = _pattern_of((*_NEVER, *_checked_patterns(exclude)))
        self._known: dict[str, _Known] = {}

    def scan(self) -> TreeScan:
        """Scan the files as they are now.

        Raises:
            ValueError: There are more than `limits.CODE_FILES_MAX` files or `limits.CODE_BYTES_MAX` bytes.
            FileNotFoundError: A given path is gone; or git is missing, for a folder that has a `.gitignore`.
            OSError: A file cannot be read.
        """
        files, paths, known = list[CodeFile](), dict[bytes, str](), dict[str, _Known]()
        largest, total = list[tuple[int, str]](), 0
        for name, path in self._found():
            try:
                status = os.lstat(path)
                if stat.S_ISLNK(status.st_mode):
                    files.append(CodeFile(_checked_name(name), b"", 0, target=_checked_name(os.readlink(path))))
                if not stat.S_ISREG(status.st_mode):
                    continue
                total += status.st_size
                largest = sorted([*largest, (status.st_size, name)], reverse=True)[:_LARGEST_NAMED]
                _check_bounds(len(files) + 1, total, largest)
                known[path] = self._hashed(path, status)
            except FileNotFoundError:  # removed, but still in git's index; or removed meanwhile
                continue
            digest, is_executable = known[path][1], bool(status.st_mode & stat.S_IXUSR)
            files.append(CodeFile(_checked_name(name), digest, status.st_size, is_executable))
            paths[digest] = path
        self._known = known
        return TreeScan(Manifest.of(files, _import_paths(self.sources)), paths)

    def _hashed(self, path: str, status: os.stat_result) -> _Known:
        sign = (status.st_size, status.st_mtime_ns, status.st_ino)
        before = self._known.get(path)
        if before is not None and before[0] == sign:
            return before
        return sign, digest_of(Path(path).read_bytes())

    def _found(self) -> Iterator[tuple[str, str]]:
        """Yield the name in the tree and the path of each file."""
        for source in self.sources:
            if not os.path.isdir(source.path):
                if not os.path.lexists(source.path):
                    raise FileNotFoundError(f"a path of hosts.sync must stay in place, and {source.path} is gone")
                yield source.name, source.path
                continue
            for inner in self._below(source.path):
                name = f"{source.name}/{inner}" if source.name else inner
                yield name, os.path.join(source.path, inner)

    def _below(self, folder: str) -> Iterator[str]:
        """Yield the files below a folder, by their names from there."""
        listed = _listed_by_git(folder)
        for inner in _walked(folder, self._excluded) if listed is None else listed:
            if self._is_excluded(inner):
                continue
            path = os.path.join(folder, inner)
            if listed is not None and not os.path.islink(path) and os.path.isdir(path):
                for deeper in self._below(path):  # a nested repository
                    if not self._is_excluded(f"{inner.rstrip('/')}/{deeper}"):
                        yield f"{inner.rstrip('/')}/{deeper}"
            else:
                yield inner

    def _is_excluded(self, inner: str) -> bool:
        if self._excluded.match(inner):
            return True
        parts = inner.rstrip("/").split("/")
        return any(map(self._excluded.match, parts)) or any(
            self._excluded.match("/".join(parts[:count])) for count in range(2, len(parts))
        )


def _check_bounds(count: int, total: int, largest: list[tuple[int, str]]) -> None:
    if count > limits.CODE_FILES_MAX:
        bound = f"limits.CODE_FILES_MAX ({limits.CODE_FILES_MAX})"
        raise ValueError(
            f"hosts.sync is for code, at most {bound} files, got more: leave data out by exclude= or .gitignore"
        )
    if total > limits.CODE_BYTES_MAX:
        bound = f"limits.CODE_BYTES_MAX ({limits.CODE_BYTES_MAX} bytes)"
        named = ", ".join(name for _, name in largest)
        raise ValueError(
            f"hosts.sync is for code, at most {bound}, got more; the largest files are {named}: leave data out by "
            "exclude= or .gitignore"
        )


def _checked_name(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"hosts.sync takes files whose names are UTF-8, got {name!r}: exclude it") from None
    return name


def _listed_by_git(folder: str) -> list[str] | None:
    """Return the files below a folder that git does not ignore; None if the folder is in no repository."""
    git = shutil.which("git")
    if git is None:
        if Path(folder, ".gitignore").exists():
            raise FileNotFoundError(f"git is needed to apply {folder}/.gitignore, and is not on the PATH: install git")
        return None
    command = [git, "-C", folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # noqa: S603 - no shell
    if done.returncode == _NO_REPOSITORY:
        return None
    if done.returncode != 0:
        raise OSError(f"git cannot list {folder}: {done.stderr.decode(errors='replace').strip()}")
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _walked(folder: str, excluded: re.Pattern[str]) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        inner = os.path.relpath(place, folder)
        prefix = "" if inner == "." else f"{inner}/"
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = [name for name in folders if name not in links and not excluded.match(name)]
        for name in (*names, *links):
            yield prefix + name


def _checked_sources(paths: Sequence[str | os.PathLike[str]]) -> tuple[CodeSource, ...]:
    if not paths:
        raise ValueError('hosts.sync needs files or folders: write hosts.sync("src", "configs"), or hosts.sync(".")')
    found, here = list[CodeSource](), os.getcwd()
    for given in paths:
        path: str = os.fspath(given)
        whole = os.path.abspath(path)
        if not os.path.lexists(whole):
            raise FileNotFoundError(f"hosts.sync needs files or folders that exist, got {path!r}")
        inner = os.path.relpath(whole, here)
        name = "" if inner == "." else inner if is_inside(inner) else os.path.basename(whole)
        for other in found:
            if name == other.name or _is_below(name, other.name) or _is_below(other.name, name):
                raise ValueError(
                    f"paths of hosts.sync must not overlap in the tree, where a path outside the working directory has "
                    f"only its last name, got {other.path!r} and {whole!r}"
                )
        found.append(CodeSource(whole, name))
    return tuple(found)


def _is_below(name: str, folder: str) -> bool:
    return folder == "" or name.startswith(folder + "/")


def _import_paths(sources: Sequence[CodeSource]) -> list[str]:
    """Return the folders that belong on `sys.path`: given folders, and the folders of given files."""
    found = [one.name if os.path.isdir(one.path) else one.name.rpartition("/")[0] for one in sources]
    return list(dict.fromkeys(found))


def _checked_patterns(exclude: Sequence[str]) -> Sequence[str]:
    if isinstance(exclude, str) or not all(isinstance(one, str) and one for one in exclude):
        raise TypeError(f'exclude must be a list of patterns, such as ["*.pt", "runs"], got {exclude!r}')
    return exclude


def _pattern_of(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(one.rstrip("/")) for one in patterns))
