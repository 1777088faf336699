"""`HostMesh.sync`: compares the program's files with those of the hosts and sends the missing contents.

    scan --> manifest --begin--> each host: missing digests --> contents, once each --take--> --finish--> a tree
                                                                  all have one: new processes import from it

SY-1 All hosts switch at once, when each has the whole tree. Until then new processes use the previous one.
SY-2 A file that changes while it is sent is never used in a mixed state: the tree is scanned again.

CK-1 From `begin` to `finish` no contents of the folder are removed, so those that `begin` finds are still there.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from trimesh import limits
from trimesh._runtime.life import HostCode, JobHosts, Proc, current_proc
from trimesh._runtime.tasks import in_trio
from trimesh._runtime.watch import showing
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import HostMesh
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import ProtocolError
from trimesh.jobs.code.folder import VARIABLE, CodeFolder, Draft, default_folder
from trimesh.jobs.code.scanning import DIGEST_BYTES, Manifest, Scanner, TreeScan, decoded, digest_of

_KIND: Final = "sync"


class CodeSync:
    """Code of the program on hosts, while its block is open; see `HostMesh.sync`.

    Attributes:
        version: Number of the version on the hosts: 1 when the block is entered.
        digest: Digest of names and contents.
        files: Number of files.
        sent_bytes: Bytes of contents sent for this version; contents that a host already had are not sent again.
        scanner: Scanner of the program's files.
    """

    def __init__(self, hosts: JobHosts | None, keepers: CodeKeeper | None, scanner: Scanner, proc: Proc | None) -> None:
        self.version = 0
        self.digest = ""
        self.files = 0
        self.sent_bytes = 0
        self._hosts = hosts
        self._keepers = keepers
        self.scanner = scanner
        self._proc = proc
        self._updating = trio.Lock()

    async def update(self) -> bool:
        """Send changes since the last update, from any task of the program; return whether there were any.

        Processes spawned from then on use the new files. Running ones keep those that they started with.

        Raises:
            ValueError: The files are too many or too large, or a file changes during each scan.
            OSError: A file cannot be read here, or written on a host.
            HostLost: In a `MeshErrorGroup`, as of any call.

        Blocking: a checkpoint, cancellable; a cancel leaves the previous version.

        Cost: reads the folders and the changed files; sends the contents that a host does not have.
        """
        return await in_trio(self._update)()

    async def _update(self) -> bool:
        if self._hosts is None or self._keepers is None or self._proc is None:
            return False
        async with self._updating:
            for _ in range(limits.CODE_SCANS_MAX):
                scan = await trio.to_thread.run_sync(self.scanner.scan)
                data = scan.manifest.encoded()
                digest = digest_of(data).hex()
                if digest == self.digest:
                    return False
                if await self._bring(scan, data):
                    self.learn(scan)
                    return True
        raise ValueError(
            f"files of hosts.sync must not change while they are sent, and one changed limits.CODE_SCANS_MAX "
            f"({limits.CODE_SCANS_MAX}) times in a row: leave it out by exclude="
        )

    def learn(self, scan: TreeScan) -> None:
        """Record the scan that the hosts now have."""
        self.version += 1
        self.digest, self.files = digest_of(scan.manifest.encoded()).hex(), len(scan.manifest.files)

    async def _bring(self, scan: TreeScan, manifest: bytes) -> bool:
        """Send a tree to all hosts; return False if a file has changed meanwhile."""
        if self._hosts is None or self._keepers is None or self._proc is None:
            return True
        keepers = self._keepers
        self.sent_bytes = 0
        found = list(await keepers.begin.call(manifest))
        points = list(keepers.points())
        leading = {name: rank for rank, (name, _) in reversed(list(enumerate(found)))}
        ranks = sorted(leading.values())
        missing = list(dict.fromkeys(digest for rank in ranks for digest in found[rank][1]))
        # One host of each shared folder takes contents; if each host has its own, one multicast sends them.
        takers = [keepers] if len(ranks) == len(found) else [keepers.slice(**points[rank]) for rank in ranks]
        if missing and not await self._send(takers, missing, scan):
            return False
        if len(takers) < len(found):
            await _on_each(takers, "finish")
        roots = list(await keepers.finish.call())
        self._hosts.set_code(_KIND, [_code_at(root, scan.manifest) for root in roots])
        return True

    async def _send(self, takers: Sequence[CodeKeeper], missing: list[bytes], scan: TreeScan) -> bool:
        assert self._proc is not None
        pieces = _pieces(missing, scan.paths)
        with showing(self._proc, "bringing code to the hosts", len(missing)) as progress:
            piece = await trio.to_thread.run_sync(_next_of, pieces)
            while piece:
                self.sent_bytes += sum(len(data) for _, data, _ in piece)
                ahead = list[Piece]()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_read_ahead, pieces, ahead)
                    changed = await _on_each(takers, "take", piece)
                if any(changed):
                    return False
                progress.done += sum(is_last for _, _, is_last in piece)
                [piece] = ahead
        return True

    async def follow(self) -> None:
        """Update whenever a file changes, until cancelled.

        Raises:
            ModuleNotFoundError: `watchfiles`, of the extra `hosts`, is not installed.
        """
        watchfiles = _watchfiles()
        paths = [source.path for source in self.scanner.sources]
        watching = watchfiles.awatch(
            *paths,
            watch_filter=None,
            debounce=limits.CODE_DEBOUNCE_MS,
            step=limits.CODE_DEBOUNCE_MS // 2,
            rust_timeout=limits.CODE_WATCH_MS,
            yield_on_timeout=True,
        )
        is_first = True
        async for changes in watching:
            if changes or is_first:  # the first time, files may have changed before the watch began
                await self._update()
            is_first = False

    def __repr__(self) -> str:
        return f"<synchronized code, version {self.version}, {self.files} files>"


@asynccontextmanager
async def sync(
    hosts: HostMesh,
    job: JobHosts | None,
    paths: Sequence[str | os.PathLike[str]],
    exclude: Sequence[str],
    *,
    watch: bool,
) -> AsyncGenerator[CodeSync, None]:
    """Send code to hosts; see `HostMesh.sync`."""
    if job is None:
        raise ValueError("sync() needs the hosts of a job, got this host, which has the files already: leave it out")
    if watch:
        _watchfiles()
    proc = current_proc()
    if proc.is_simulated:  # its hosts are this process, which has the files; and it must not use threads
        synced = CodeSync(None, None, Scanner(paths, exclude), None)
        synced.learn(synced.scanner.scan())
        yield synced
        return
    scanner = await trio.to_thread.run_sync(Scanner, paths, exclude)
    job.check_no_code(_KIND)
    async with hosts.spawn_procs({}, name="code") as procs, procs.spawn("code", CodeKeeper) as keepers:
        synced = CodeSync(job, keepers, scanner, proc)
        await synced.update()
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                if watch:
                    nursery.start_soon(synced.follow)
                try:
                    yield synced
                except Exception as error:  # noqa: BLE001 - raised again below: the nursery would wrap it
                    failure = error
                nursery.cancel_scope.cancel(reason="the block of the synchronized code is left")
        finally:
            job.set_code(_KIND, [None] * len(hosts))
        if failure is not None:
            raise failure


def _watchfiles() -> Any:
    try:
        import watchfiles  # noqa: PLC0415 - of an extra
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "hosts.sync(watch=True) needs watchfiles: pip install 'trimesh-actors[hosts]'", name="watchfiles"
        ) from None
    return watchfiles


def _code_at(root: str, manifest: Manifest) -> HostCode:
    paths = tuple(os.fsencode(f"{root}/{path}" if path else root) for path in manifest.import_paths)
    return HostCode(paths, {VARIABLE: root})


async def _on_each(takers: Sequence[CodeKeeper], name: str, *args: Any) -> list[Any]:
    """Call an endpoint of several meshes at once; return all results."""
    found = list[Any]()

    async def call(keepers: Any) -> None:
        found.extend(await getattr(keepers, name).call(*args))

    if len(takers) == 1:
        await call(takers[0])
    else:
        async with trio.open_nursery() as nursery:
            for keepers in takers:
                nursery.start_soon(call, keepers)
    return found


async def _read_ahead(pieces: Iterator[Piece], found: list[Piece]) -> None:
    found.append(await trio.to_thread.run_sync(_next_of, pieces))


def _next_of(pieces: Iterator[Piece]) -> Piece:
    return next(pieces, Piece())


def _pieces(missing: Sequence[bytes], paths: dict[bytes, str]) -> Iterator[Piece]:
    """Yield contents in messages of about `limits.CODE_PIECE_BYTES`; a file that is gone is sent as empty bytes."""
    piece, size = Piece(), 0
    for digest in missing:
        for data, is_last in _parts(paths[digest]):
            piece.append((digest, data, is_last))
            size += len(data)
            if size >= limits.CODE_PIECE_BYTES:
                yield piece
                piece, size = Piece(), 0
    if piece:
        yield piece


def _parts(path: str) -> Iterator[tuple[bytes, bool]]:
    try:
        with open(path, "rb") as file:
            data = file.read(limits.CODE_PIECE_BYTES)
            while following := file.read(limits.CODE_PIECE_BYTES):
                yield data, False
                data = following
            yield data, True
    except FileNotFoundError:
        yield b"", True


# ---- the host's side of `HostMesh.sync`: the actor that receives contents and makes the tree -------------------------

Piece = list[tuple[bytes, bytes, bool]]
"""Parts of contents, in order: digest of the whole content, bytes, whether they are its last."""


class CodeKeeper(Actor):
    """Maintains the code folder of its host."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._tree: Path | None = None
        self._draft: Draft | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Open the folder and mark its tree as used while this actor lives; at the end remove unused parts."""
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
        """Begin a tree; return the name of the folder, equal for all hosts that share it, and the missing digests.

        Args:
            manifest: Manifest of the tree, encoded.

        Raises:
            ProtocolError: It is malformed.
        """
        self._forget_draft()
        self._manifest = await trio.to_thread.run_sync(decoded, manifest)
        while not self._folder.lock_shared():  # noqa: ASYNC110 - another process sets no event here
            await trio.sleep(limits.CODE_LOCK_RETRY_SECONDS)
        return self._folder.name, await trio.to_thread.run_sync(self._folder.missing, self._manifest.files)

    @endpoint(thread=True)
    def take(self, piece: Piece) -> list[bytes]:
        """Write parts of contents; return the digests of complete contents whose bytes differ from their digest."""
        changed = list[bytes]()
        for digest, data, is_last in piece:
            if len(digest) != DIGEST_BYTES:
                raise ProtocolError(f"a digest must have {DIGEST_BYTES} bytes, got {len(digest)}")
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
        """Make the tree, and return its path."""
        if self._manifest is None:
            raise ProtocolError("finish must follow begin")
        self._tree = await trio.to_thread.run_sync(self._folder.tree, self._manifest)
        self._folder.unlock()
        return str(self._tree)

    def _forget_draft(self) -> None:
        if self._draft is not None:
            self._draft.close()
            self._draft = None
