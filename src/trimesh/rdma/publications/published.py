"""`Published`: versions of a set of tensors that other processes follow without torn reads.

FO-1 A version is read into spare memory while it is pinned, then copied to the live tensors without a checkpoint. So
     code of the same thread sees all of one version, or all of the next.
FO-2 If a tensor does not fit, the error is raised before any tensor is changed.
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

    Sent to other processes, it arrives as a handle for readers. They read a version in place or copy it, without the
    publisher's Python, and only while it is pinned: pinned memory is not written, so no read is torn. The publication
    ends with the actor that made it.

    Args:
        slots: Versions that have memory at one time, at least 2: the latest, the one being written, and those that
            readers have pinned. When all but the latest are pinned, `publish` waits.

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
            raise ValueError(f"slots must be 2 to {limits.PUBLISHED_SLOTS_MAX}, got {slots}")
        self._publisher = in_trio_now(_open)(slots)
        self._board, self._number = self._publisher.board, self._publisher.number

    @trio.lowlevel.enable_ki_protection
    async def publish(self, tensors: Mapping[str, Any], *, version: int | None = None) -> int:
        """Publish a copy of tensors as the latest version; return its number, 1 more than the last, from 1.

        Args:
            tensors: Memory as for `RDMABuffer`, by name: a state dict. They must not be written to meanwhile.
            version: Another number, above the latest, such as the training step.

        Raises:
            TypeError, ValueError: A tensor cannot be published, or there are none, or too many; or `version` is not
                above the latest.
            RuntimeError: This is a handle: the process that made it publishes.
            trio.ClosedResourceError: The publication is closed.
            LimitExceeded, OSError: There is no memory for the version.

        Blocking: waits for memory while all versions but the latest are pinned, and for earlier calls; cancellable,
        then nothing is published. Cost: one copy, in the data thread.
        """
        return await in_trio(self._publish)(tensors, version)

    async def _publish(self, tensors: Mapping[str, Any], version: int | None) -> int:
        if self._publisher is None:
            await trio.lowlevel.checkpoint()
            raise RuntimeError("only the object that Published() made can publish, got a handle, which only reads")
        return await self._publisher.publish(tensors, version)

    @trio.lowlevel.enable_ki_protection
    async def wait_newer(self, version: int = 0) -> int:
        """Wait for a version above `version` and return the number of the latest.

        Raises:
            trio.ClosedResourceError: The publication is closed, so there will be none.
            ProcDied, MeshStopped: The publisher's process has ended.
            LimitExceeded: The publication has `limits.PUBLISHED_READERS_MAX` readers.

        Blocking: a checkpoint, cancellable.
        """
        return await in_trio(self._wait_newer)(version)

    async def _wait_newer(self, version: int) -> int:
        return (await self._reading().wait_newer(version)).latest

    def pin(self, version: int | None = None) -> AbstractAsyncContextManager[Snapshot]:
        """Pin a version while a block is open: `async with weights.pin() as snapshot:`.

        Args:
            version: Its number; None pins the latest, and waits for the first one.

        Raises:
            VersionGone: `version` was overwritten, or never existed.
            trio.ClosedResourceError, ProcDied, MeshStopped, LimitExceeded: As `wait_newer`.
            LinkLost: The publisher counts this process as ended, and has dropped the pin. If parts were read by
                `Snapshot.buffer`, leaving the block raises it, too: they may be torn.

        Blocking: entering and leaving are checkpoints; a cancelled block releases its pin, too.
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
        """Update a model to each new version, in one step each: `async for version in weights.follow(model):`.

        Each turn waits for a version above the last, reads the latest into spare memory, copies it into the tensors of
        `target` without a wait in between, and yields its number. Code of the same thread that does not await, such as
        a forward pass, sees one version from beginning to end. Tensors are changed in place: optimizers, hooks and
        compiled functions that refer to them continue with the new values. The loop ends with the publication:
        by its `aclose`, with the actor that made it, or when its mesh is stopped.

        Args:
            target: A module, or a mapping of tensors, arrays and bytearrays, for some or all of the published names.
                Each has the published shape. A torch tensor may be on any device, and of any dtype that the published
                one can be cast to.
            version: Only versions above it are used.
            lock: Held while the tensors are changed: for a forward pass that awaits, or runs in a worker thread, and
                holds the same `trio.Lock` (in an asyncio program, an `asyncio.Lock`).
            renew: Called when the publishing actor or process has ended, also by death. Returns the publication that
                replaces it, whose versions count from 1 again; for example an endpoint's `call_one`, which waits
                while a supervised actor is restarted. If it returns the same one, or raises `MeshStopped`, the loop
                ends.

        Raises:
            TypeError, KeyError, ValueError: `target`, or a tensor of it, does not fit; none was changed.
            ProcDied: The publisher's process has died, and there is no `renew`.
            LinkLost, LimitExceeded, Unresponsive: As `pin` and `Snapshot.read_into`.
            trio.BusyResourceError: Two tasks are in one loop.

        Blocking: each turn is a checkpoint, cancellable: then no tensor is changed. A loop that is left holds nothing.
        Cost: the memory of one more version, and one copy within this process (at about 10 GB/s; for CUDA tensors on
        the device, queued on its current stream), during which its event loop does not run.
        """
        return Following(self, target, version, lock, renew)

    # ---- the end ---------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def aclose(self) -> None:
        """End the publication and release its memory; readers get `trio.ClosedResourceError`. Idempotent.

        Raises:
            RuntimeError: This is a handle.

        Blocking: as `RDMABuffer.aclose`.
        """
        await in_trio(self._aclose)()

    async def _aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._publisher is None:
            raise RuntimeError("only the object that Published() made can close a publication, got a handle on it")
        await self._publisher.aclose()

    async def __aenter__(self) -> Self:
        """Close it when the block is left."""
        if self._publisher is None:
            raise RuntimeError("`async with` needs the object that Published() made, got a handle: use it as it is")
        await in_trio(trio.lowlevel.checkpoint)()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        await self.aclose()

    @property
    def host(self) -> int:
        """The publisher's host, as a number that is the same for all processes of one host."""
        return self._board.handle.granted.home.host

    # ---- serialization ---------------------------------------------------------------------------------------

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
        ProtocolError: The fields are malformed.
    """
    if type(number) is not int or not isinstance(board, RDMABuffer):
        raise ProtocolError("a publication must be named by its number and its board")
    made = Published.__new__(Published)
    made._number, made._board, made._publisher = number, board, None  # noqa: SLF001 - its own class
    return made


def finish(published: Published) -> None:
    """Mark the latest version as the last; existing ones can be read and pinned until `aclose`. For relays."""
    assert published._publisher is not None, "who publishes ends it"  # noqa: SLF001 - its own class
    published._publisher.finish()  # noqa: SLF001


def _open(slots: int) -> Publisher:
    return _publications().open(slots)


def _publications() -> Publications:
    return publications_of(proc_for("a publication is made and read"))


# ---- followers: live tensors that are updated to each version in one step --------------------------------------------


class Pinned(Protocol):
    """Interface of a pinned version that a follower uses."""

    version: int

    def entry(self, name: str) -> TensorEntry:
        """Return the layout of a published tensor; `KeyError` if there is none of that name."""
        ...

    async def read_into(self, tensors: Mapping[str, Any]) -> None:
        """Copy published tensors into those of the same names."""
        ...


class PublicationSource(Protocol):
    """Interface of a publication that a follower uses."""

    async def wait_newer(self, version: int = 0) -> int:
        """Wait for a version above `version`."""
        ...

    def pin(self, version: int | None = None) -> AbstractAsyncContextManager[Pinned]:
        """Pin a version while a block is open."""
        ...


class Following(AsyncIterator[int]):
    """The loop of `Published.follow`.

    Args:
        source: The publication.
        target: The tensors to update.
        version: Only versions above it are used.
        lock: Held during updates.
        renew: Returns the publication that replaces one whose actor or process has ended.
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
        """Update the target to the next version; return its number.

        Raises:
            trio.BusyResourceError: Another task is waiting in the same loop.
        """
        if self._is_reading:
            raise trio.BusyResourceError(
                "a loop of follow() must be used by one task, got a second: call follow() again"
            )
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
        """Follow the publication that replaces an ended one; return whether there is one."""
        try:
            found = await renew()
        except MeshStopped:
            return False
        if found == self._source:
            return False
        self._source, self._version = found, 0
        return True


def _live(target: Any) -> Mapping[str, Any]:
    """Return the current tensors of a target: a module may have replaced some of its own."""
    if isinstance(target, Mapping):
        return cast("Mapping[str, Any]", target)
    state = getattr(target, "state_dict", None)
    if state is None:
        raise TypeError(f"the target of follow() must be a module or a mapping of tensors, got {target!r:.100}")
    found: Mapping[str, Any] = state()
    return found


def _spare_for(name: str, live: Any, entry: TensorEntry, spare: Any) -> Any:
    """Return spare memory into which a published tensor is read before it is copied to the live one.

    It has the published dtype and shape, on the device of the live one; or those of the live one: then `read_into`
    checks whether they fit.
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
    """Raise if a version cannot be copied into a live tensor (FO-2)."""
    if spare is None:
        raise KeyError(f"the target of follow() must not gain tensors while a version is read, got {name!r}")
    kind, dtype, shape = _describe(name, live)
    came = describe(spare)
    if (kind, shape) != (came[0], came[2]):
        raise ValueError(f"{name!r} must have the shape it was published with, {came[2]}, got {shape}")
    if kind == "torch":
        torch = sys.modules["torch"]
        if live.is_meta or not torch.can_cast(spare.dtype, live.dtype):
            raise ValueError(f"{name!r} must be able to hold {came[1]}, got {dtype} on {live.device}")
    elif dtype != came[1]:
        raise ValueError(f"{name!r} must have the dtype it was published with, {came[1]}, got {dtype}")
    elif not live.flags.writeable if kind == "numpy" else memoryview(live).readonly:
        raise ValueError(f"{name!r} must be writable, got memory that is read-only")


def _copy(spare: Any, live: Any) -> None:
    """Copy a tensor in place, so that references to it (optimizers, hooks, compiled functions) see the new values.

    Autograd counts it as a change: a backward pass over results of the old values raises.
    """
    kind = describe(live)[0]
    if kind == "torch":
        torch = sys.modules["torch"]
        with torch.inference_mode():  # inference tensors can be changed only here, other tensors anywhere
            live.copy_(spare)
    elif kind == "numpy":
        live[...] = spare
    else:
        memoryview(live).cast("B")[:] = spare
