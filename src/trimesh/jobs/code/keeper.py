"""The host's side of `HostMesh.sync`: the actor that takes contents, and makes the tree of them.

CK-1 From `begin` to `finish` nothing removes contents of the folder, so what is not missing then is there at the end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from trimesh import limits
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.errors import ProtocolError
from trimesh.jobs.code.folder import CodeFolder, Draft, default_folder
from trimesh.jobs.code.manifest import DIGEST_BYTES, Manifest, decoded

Piece = list[tuple[bytes, bytes, bool]]
"""Parts of contents, in order: digest of the whole, bytes, whether they are its last ones."""


class CodeKeeper(Actor):
    """Keeps the folder of code of its host."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._tree: Path | None = None
        self._draft: Draft | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Open the folder; note that its tree is in use; at the end remove what nothing uses any more."""
        self._folder = await trio.to_thread.run_sync(CodeFolder, default_folder())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._touch)
                yield
                nursery.cancel_scope.cancel(reason="the block of the synchronized code is left")
            if self._folder.lock_alone():
                await trio.to_thread.run_sync(self._folder.prune, limits.CODE_KEPT_SECONDS)
        finally:
            self._forget_draft()
            self._folder.close()

    async def _touch(self) -> None:
        while True:
            await trio.sleep(limits.CODE_TOUCH_SECONDS)
            if self._tree is not None:
                self._folder.touch(self._tree)

    @endpoint
    async def begin(self, manifest: bytes) -> tuple[str, list[bytes]]:
        """Begin to make a tree; return the name of the folder, equal for all hosts that share it, and what it lacks.

        Args:
            manifest: Of the tree.

        Raises:
            ProtocolError: It is none.
        """
        self._forget_draft()
        self._manifest = await trio.to_thread.run_sync(decoded, manifest)
        while not self._folder.lock_shared():  # noqa: ASYNC110 - it is another process
            await trio.sleep(limits.CODE_LOCK_RETRY_SECONDS)
        return self._folder.name, await trio.to_thread.run_sync(self._folder.missing, self._manifest.files)

    @endpoint(thread=True)
    def take(self, piece: Piece) -> list[bytes]:
        """Take parts of contents; return the digests of those that came whole, and are not what they should be."""
        changed = list[bytes]()
        for digest, data, is_last in piece:
            if len(digest) != DIGEST_BYTES:
                raise ProtocolError(f"a digest has {DIGEST_BYTES} bytes, got {len(digest)}")
            if self._draft is None:
                self._draft = self._folder.draft()
            self._draft.write(data)
            if is_last:
                draft, self._draft = self._draft, None
                if draft.digest == digest:
                    self._folder.add(draft)
                else:
                    changed.append(digest)
                    draft.close()
        return changed

    @endpoint
    async def finish(self) -> str:
        """Make the tree, and return where it is."""
        if self._manifest is None:
            raise ProtocolError("a tree is finished once it was begun")
        self._tree = await trio.to_thread.run_sync(self._folder.tree, self._manifest)
        self._folder.unlock()
        return str(self._tree)

    def _forget_draft(self) -> None:
        if self._draft is not None:
            self._draft.close()
            self._draft = None
