"""A live set of tensors that takes over each version of a publication, all of it in one step.

FO-1 A version is read into spare memory while it is pinned, and copied from there without a wait in between: code that
     runs in the same thread sees all of one version, or all of the next.
FO-2 What does not fit is found before the first tensor is changed.
FO-3 Nothing is held between two steps: a loop that is left at any point leaves no pin.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol, cast

import trio

from trimesh._runtime.tasks import in_trio
from trimesh.errors import MeshStopped, ProcDied
from trimesh.rdma.publications.layout import TensorEntry, describe


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
