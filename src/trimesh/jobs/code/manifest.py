"""What a tree of files holds, by content. Pure: reads and writes nothing.

MF-1 Two trees with the same names, contents, permissions to execute and links have the same digest, on any machine.
MF-2 No name of a manifest leads out of the tree: none is absolute, has `..`, or goes through a link of the same tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import msgspec

from trimesh.errors import ProtocolError

DIGEST_BYTES: Final = 32


class CodeFile(msgspec.Struct, frozen=True, array_like=True):
    """A file or a symbolic link of a tree.

    Attributes:
        name: Its place in the tree, parts separated by `/`.
        digest: Of its content; empty for a link.
        size: Bytes of its content.
        is_executable: Whether its owner may execute it.
        target: Where a link leads to; empty for a file.
    """

    name: str
    digest: bytes
    size: int
    is_executable: bool = False
    target: str = ""


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """All files of a tree, in the order of their names.

    Attributes:
        files: Those.
        import_paths: Folders of the tree that belong on `sys.path`, first ones first; "" is the tree itself.
    """

    files: tuple[CodeFile, ...]
    import_paths: tuple[str, ...]

    @classmethod
    def of(cls, files: Iterable[CodeFile], import_paths: Iterable[str]) -> Manifest:
        return cls(tuple(sorted(files, key=_name_of)), tuple(import_paths))

    def encoded(self) -> bytes:
        """Return the bytes that say all of it."""
        return _encoder.encode(self)

    @property
    def size(self) -> int:
        """Bytes of all contents."""
        return sum(file.size for file in self.files)


def new_hash() -> hashlib.blake2b:
    """Return what digests a content that comes in parts."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def digest_of(data: bytes) -> bytes:
    """Return the digest of a content, or of a manifest's bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def decoded(data: bytes) -> Manifest:
    """Return the manifest that bytes say.

    Raises:
        ProtocolError: They are no manifest, or a name in it leads out of the tree.
    """
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a tree of code must be described by a manifest: {error}") from None
    links = {file.name for file in manifest.files if file.target}
    names = set[str]()
    for file in manifest.files:
        if not is_inside(file.name) or file.name in names or not links.isdisjoint(_parents(file.name)):
            raise ProtocolError(f"each file of a tree needs a place of its own inside of it, got {file.name!r}")
        if len(file.digest) != (0 if file.target else DIGEST_BYTES) or "\0" in file.target:
            raise ProtocolError(f"a file has a digest of {DIGEST_BYTES} bytes, and a link a target: {file.name!r}")
        names.add(file.name)
    if not all(path == "" or is_inside(path) for path in manifest.import_paths):
        raise ProtocolError(f"folders to import from must be in the tree, got {manifest.import_paths!r}")
    return manifest


def is_inside(name: str) -> bool:
    """Whether a name stays in the tree that it is joined to."""
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _name_of(file: CodeFile) -> str:
    return file.name


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Manifest)
