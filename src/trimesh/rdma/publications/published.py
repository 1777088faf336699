"""`Published`: versions of a set of tensors that other processes follow, none of them ever torn.

FO-1 A version is read into spare memory while it is pinned, and copied from there without a wait in between: code that
     runs in the same thread sees all of one version, or all of the next.
FO-2 What does not fit is found before the first tensor is changed.
FO-3 Nothing is held between two steps: a loop that is left at any point leaves no pin.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from types import TracebackType
from typing import Any, Protocol, Self, cast

import trio

from trimesh import limits
from trimesh._runtime.life import proc_for
from trimesh._runtime.tasks import in_trio, in_trio_block, in_trio_now
from trimesh.errors import MeshStopped, ProcDied, ProtocolError, place_name
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.publications.board import TensorEntry, describe
from trimesh.rdma.publications.publisher import Publications, Publisher, publications_of
from trimesh.rdma.publications.reading import Reading, Snapshot, snapshot_of


class Published:
    """Versions of a set of named tensors: one process publishes, many read.

    Sent to other processes, it arrives as a handle by which they read. A version is read where it lies, or copied from
    there, without the publisher's Python, and only while it is pinned: memory that a reader has pinned is not written
    to, so no read is torn. It ends with the actor that made it.

    Args:
        slots: How many versions have memory at one time, from 2: the latest, the one that is being written, and those
            that readers have pinned. When all the others are pinned, `publish` waits.

    Raises:
        ValueError: `slots` is not 2 to `limits.PUBLISHED_SLOTS_MAX`.
        RuntimeError: No mesh is open here.

    Example:
        self.weights = trimesh.rdma.Published()                       # in the trainer; an endpoint returns it
        await self.weights.publish(self.model.state_dict())

        async for version in weights.follow(self.model):              # in a generator, in the background
            ...                                                       # the model is of that version now
    """

    __slots__ = ("_board", "_number", "_publisher")

    _board: RDMABuffer
    _number: int
    _publisher: Publisher | None

    def __init__(self, *, slots: int = 2) -> None:
        if not 2 <= slots <= limits.PUBLISHED_SLOTS_MAX:
            raise ValueError(f"a publication has 2 to {limits.PUBLISHED_SLOTS_MAX} slots, got {slots}")
        self._publisher = in_trio_now(_open)(slots)
        self._board, self._number = self._publisher.board, self._publisher.number

    @trio.lowlevel.enable_ki_protection
    async def publish(self, tensors: Mapping[str, Any], *, version: int | None = None) -> int:
        """Copy tensors, and make them the latest version; return its number, from 1, one more each time.

        Args:
            tensors: What `RDMABuffer` takes, by name: a state dict. They must not be written to meanwhile.
            version: Another number, above the latest: that of the training, say.

        Raises:
            TypeError, ValueError: One of them cannot be published, or there are none, or too many; or `version` is not
                above the latest.
            RuntimeError: This is a handle: the process that made it publishes.
            trio.ClosedResourceError: It is closed.
            LimitExceeded, OSError: There is no memory for it.

        Blocking: waits for memory while all versions but the latest are pinned, and for earlier calls; cancellable,
        then nothing is published. Cost: one copy, in the data thread.
        """
        return await in_trio(self._publish)(tensors, version)

    async def _publish(self, tensors: Mapping[str, Any], version: int | None) -> int:
        if self._publisher is None:
            await trio.lowlevel.checkpoint()
            raise RuntimeError("a handle on a publication reads: publish by the object that Published() made")
        return await self._publisher.publish(tensors, version)

    @trio.lowlevel.enable_ki_protection
    async def wait_newer(self, version: int = 0) -> int:
        """Wait until there is a version above `version`, and return the number of the latest.

        Raises:
            trio.ClosedResourceError: It is closed, and there will be none.
            ProcDied, MeshStopped: The publisher's process has ended.
            LimitExceeded: It has `limits.PUBLISHED_READERS_MAX` readers.

        Blocking: a checkpoint, cancellable.
        """
        return await in_trio(self._wait_newer)(version)

    async def _wait_newer(self, version: int) -> int:
        return (await self._reading().wait_newer(version)).latest

    def pin(self, version: int | None = None) -> AbstractAsyncContextManager[Snapshot]:
        """Keep a version as it is for as long as a block: `async with weights.pin() as snapshot:`.

        Args:
            version: Which; by default the latest, for the first of which it waits.

        Raises:
            VersionGone: `version` is not there any more, or was never.
            trio.ClosedResourceError, ProcDied, MeshStopped, LimitExceeded: As `wait_newer`.
            LinkLost: The publisher has come to count this process as ended, and the pin as given back; also when the
                block is left, if parts were read by `Snapshot.buffer`: they may be torn then.

        Blocking: entering and leaving it are checkpoints; a pin is given back also when the block is cancelled.
        """
        return in_trio_block(self._pin(version))

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection
    async def _pin(self, version: int | None) -> AsyncGenerator[Snapshot, None]:
        reading = self._reading()
        pin = await reading.pin(version)
        try:
            snapshot = snapshot_of(reading, pin)
            yield snapshot
            if snapshot.is_lent:
                await reading.check(pin)
        finally:
            await reading.unpin(pin)

    def _reading(self) -> Reading:
        return _publications().reading(self._number, self._board.handle.granted)

    def follow(
        self,
        target: Any,
        *,
        version: int = 0,
        lock: AbstractAsyncContextManager[Any] | None = None,
        renew: Callable[[], Awaitable[Published]] | None = None,
    ) -> Following:
        """Let a model take over each new version, all of it in one step: `async for version in weights.follow(model):`.

        Each turn waits for a version above the last, reads the latest into spare memory, copies it into the tensors of
        `target` without a wait in between, and gives its number. Code of the same thread that does not await, a forward
        pass, has one version from its beginning to its end. Tensors are changed in place: optimizers, hooks, compiled
        functions and whatever else refers to them go on with the new values. The loop ends when the publication does:
        by its `aclose`, with the actor that made it, or as its mesh is stopped.

        Args:
            target: A module, or a mapping of tensors, arrays and bytearrays: some of the published names, or all. Each
                has the shape that was published. A tensor of torch may be on any device, and of any type that the
                published one can be cast to.
            version: The first that is taken over is above it.
            lock: Entered while the tensors are changed. For a forward pass that awaits, or runs in a worker thread,
                and so holds the same `trio.Lock`; in a program of asyncio, an `asyncio.Lock`.
            renew: Called when the actor or the process that published has ended, by death as well; returns the
                publication that takes its place, whose versions count from 1 again: an endpoint's `call_one`, which
                waits while a supervised actor is restarted. If it returns the same one, or raises `MeshStopped`, the
                loop ends.

        Raises:
            TypeError, KeyError, ValueError: `target`, or a tensor of it, does not fit; none was changed.
            ProcDied: The publisher's process has died, and there is no `renew`.
            LinkLost, LimitExceeded, Unresponsive: As `pin` and `Snapshot.read_into`.
            trio.BusyResourceError: Two tasks are in one loop.

        Blocking: each turn is a checkpoint, cancellable: then none is changed. A loop that is left holds nothing.
        Cost: the memory of one version besides, and one copy within this process (10 GB/s, say; for CUDA tensors on the
        device, queued on its current stream), during which its event loop does not run.
        """
        return Following(self, target, version, lock, renew)

    # ---- the end ---------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def aclose(self) -> None:
        """Publish nothing any more, and give the memory back; readers get `trio.ClosedResourceError`. Idempotent.

        Raises:
            RuntimeError: This is a handle.

        Blocking: as `RDMABuffer.aclose`.
        """
        await in_trio(self._aclose)()

    async def _aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._publisher is None:
            raise RuntimeError("a publication is closed by the object that Published() made, got a handle on it")
        await self._publisher.aclose()

    async def __aenter__(self) -> Self:
        """Close it when the block is left."""
        if self._publisher is None:
            raise RuntimeError(
                "a handle on a publication owns nothing that a block could close: use it without a block"
            )
        await in_trio(trio.lowlevel.checkpoint)()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        await self.aclose()

    @property
    def host(self) -> int:
        """Which host it is on, as a number that is the same for all processes of one host."""
        return self._board.handle.granted.home.host

    # ---- how it travels --------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (self._number, self._board)

    def __eq__(self, other: object) -> bool:
        """Return whether both are handles on one publication."""
        return isinstance(other, Published) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)

    @property
    def _name(self) -> tuple[int, int]:
        return self._board.handle.granted.home.epoch, self._number

    def __repr__(self) -> str:
        origin = self._board.owner
        where = f"{place_name(origin.mesh, origin.point)} " if origin.point is not None else ""
        return f"<publication {self._number} of {where}pid {origin.pid}>"


def rebuild(number: Any, board: Any) -> Published:
    """Return a handle on a publication.

    Raises:
        ProtocolError: The fields name none.
    """
    if type(number) is not int or not isinstance(board, RDMABuffer):
        raise ProtocolError("a publication must be named by its number and its board")
    made = Published.__new__(Published)
    made._number, made._board, made._publisher = number, board, None  # noqa: SLF001 - its own class
    return made


def finish(published: Published) -> None:
    """Say that no version follows; those that are there are read and pinned until `aclose`. For relays."""
    assert published._publisher is not None, "who publishes ends it"  # noqa: SLF001 - its own class
    published._publisher.finish()  # noqa: SLF001


def _open(slots: int) -> Publisher:
    return _publications().open(slots)


def _publications() -> Publications:
    return publications_of(proc_for("a publication is made and read"))


# ---- a live set of tensors that takes over each version of a publication, all of it in one step ----------------------


class Pinned(Protocol):
    """A version that is pinned, as a follower needs it."""

    version: int

    def entry(self, name: str) -> TensorEntry:
        """Return what a tensor was published as; `KeyError` if there is none of that name."""
        ...

    async def read_into(self, tensors: Mapping[str, Any]) -> None:
        """Copy published tensors into those of the same names."""
        ...


class PublicationSource(Protocol):
    """A publication, as a follower needs it."""

    async def wait_newer(self, version: int = 0) -> int:
        """Wait until there is a version above `version`."""
        ...

    def pin(self, version: int | None = None) -> AbstractAsyncContextManager[Pinned]:
        """Keep a version as it is for as long as a block."""
        ...


class Following(AsyncIterator[int]):
    """The loop of `Published.follow`.

    Args:
        source: What is followed.
        target: What takes the versions over.
        version: The first that is taken is above it.
        lock: Held while they are.
        renew: Returns the publication that has come in place of one whose actor or process has ended.
    """

    def __init__(
        self,
        source: PublicationSource,
        target: Any,
        version: int,
        lock: AbstractAsyncContextManager[Any] | None,
        renew: Callable[[], Awaitable[PublicationSource]] | None,
    ) -> None:
        _live(target)  # raises
        self._source = source
        self._target = target
        self._version = version
        self._lock = nullcontext() if lock is None else lock
        self._renew = renew
        self._spare: dict[str, Any] = {}
        self._is_reading = False

    def __aiter__(self) -> Following:
        return self

    @trio.lowlevel.enable_ki_protection
    async def __anext__(self) -> int:
        """Take the next version over; return its number.

        Raises:
            trio.BusyResourceError: Another task does so now.
        """
        if self._is_reading:
            raise trio.BusyResourceError("one task follows a publication into one target, got a second: call follow()")
        self._is_reading = True
        try:
            version = await in_trio(self._read_newer)()
            if version is None:
                raise StopAsyncIteration
            async with self._lock:
                live = _live(self._target)
                for name, tensor in live.items():
                    _check(name, tensor, self._spare.get(name))
                for name, tensor in live.items():
                    _copy(self._spare[name], tensor)
                self._version = version
            return version
        finally:
            self._is_reading = False

    async def _read_newer(self) -> int | None:
        """Read the latest version above the last one into spare memory; None at the end of the publication."""
        while True:
            try:
                await self._source.wait_newer(self._version)
                async with self._source.pin() as pinned:
                    live = _live(self._target)
                    self._spare = {
                        name: _spare_for(name, tensor, pinned.entry(name), self._spare.get(name))
                        for name, tensor in live.items()
                    }
                    await pinned.read_into(self._spare)
                    return pinned.version
            except (trio.ClosedResourceError, MeshStopped):
                if self._renew is None:
                    return None
            except ProcDied:
                if self._renew is None:
                    raise
            if not await self._take_the_next(self._renew):
                return None

    async def _take_the_next(self, renew: Callable[[], Awaitable[PublicationSource]]) -> bool:
        """Follow what has come in place of a publication that has ended; return whether there is such a thing."""
        try:
            found = await renew()
        except MeshStopped:
            return False
        if found == self._source:
            return False
        self._source, self._version = found, 0
        return True


def _live(target: Any) -> Mapping[str, Any]:
    """Return the tensors of a target as they are now: those of a module may be others than before."""
    if isinstance(target, Mapping):
        return cast("Mapping[str, Any]", target)
    state = getattr(target, "state_dict", None)
    if state is None:
        raise TypeError(f"a module or a mapping of tensors follows a publication, got {target!r:.100}")
    found: Mapping[str, Any] = state()
    return found


def _spare_for(name: str, live: Any, entry: TensorEntry, spare: Any) -> Any:
    """Return memory that a published tensor is read into, before it is copied to the live one.

    It is as the tensor was published, on the device of the live one, or as the live one is: then `read_into` says
    whether it fits.
    """
    kind, dtype, shape = _describe(name, live)
    device = None
    if kind == entry.kind == "torch":
        dtype, shape, device = entry.dtype, entry.shape, live.device
    if spare is not None and describe(spare) == (kind, dtype, shape) and device == getattr(spare, "device", None):
        made = spare
    elif kind == "torch":
        torch = sys.modules["torch"]
        made = torch.empty(shape, dtype=getattr(torch, dtype), device=live.device)
    elif kind == "numpy":
        made = sys.modules["numpy"].empty(shape, dtype)
    else:
        made = bytearray(*shape)
    if kind == "bytes" and len(made) != entry.nbytes:
        raise ValueError(f"{name!r} must have the size it was published with, {entry.nbytes} bytes, got {len(made)}")
    _check(name, live, made)
    return made


def _describe(name: str, live: Any) -> tuple[str, str, tuple[int, ...]]:
    try:
        return describe(live)
    except TypeError:
        text = "a tensor, an array or a bytearray, to follow a publication"
        raise TypeError(f"{name!r} must be {text}, got {live!r:.100}") from None


def _check(name: str, live: Any, spare: Any) -> None:
    """Refuse what a version cannot be copied into (FO-2)."""
    if spare is None:
        raise KeyError(f"{name!r} has come to what follows a publication while a version was read")
    kind, dtype, shape = _describe(name, live)
    came = describe(spare)
    if (kind, shape) != (came[0], came[2]):
        raise ValueError(f"{name!r} must have the shape it was published with, {came[2]}, got {shape}")
    if kind == "torch":
        torch = sys.modules["torch"]
        if live.is_meta or not torch.can_cast(spare.dtype, live.dtype):
            raise ValueError(f"{name!r} must be able to hold {came[1]}, got {dtype} on {live.device}")
    elif dtype != came[1]:
        raise ValueError(f"{name!r} must be as it was published, {came[1]}, got {dtype}")
    elif not live.flags.writeable if kind == "numpy" else memoryview(live).readonly:
        raise ValueError(f"{name!r} must be writable, got memory that is read-only")


def _copy(spare: Any, live: Any) -> None:
    """Copy a tensor in place: who has a reference to it (an optimizer, a hook, a compiled function) has the new values.

    Autograd counts it as a change: a backward pass over what the old values gave raises.
    """
    kind = describe(live)[0]
    if kind == "torch":
        torch = sys.modules["torch"]
        with torch.inference_mode():  # what was made there can be changed nowhere else, all others anywhere
            live.copy_(spare)
    elif kind == "numpy":
        live[...] = spare
    else:
        memoryview(live).cast("B")[:] = spare
