"""What is to be started: entered by `with`, or opened until it is closed, or given to the block of its mesh."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from trimesh._wire.exceptions.frames import shortens_tracebacks
from trimesh.actor import spawning
from trimesh.blocking.body import AnyBody, Body, body_of
from trimesh.blocking.trio_thread import check_thread
from trimesh.blocking.work import wait

T = TypeVar("T")
InnerT = TypeVar("InnerT")


class Spawning(Generic[T]):
    """A mesh that has not been started.

    `with spawning as mesh:` makes the block the owner. `mesh = spawning.open()` owns it until `mesh.close()`, over the
    cells of a notebook, say. `mesh = spawning.adopt()` hands it to the block of the mesh that it is spawned on.
    Nothing starts before, and each can be done once.
    """

    def __init__(
        self,
        what: str,
        make: Callable[[], spawning.Spawning[Any]],
        face: Callable[[Any, AnyBody | None], T],
        home: AnyBody | None = None,
    ) -> None:
        frame = sys._getframe(2)  # noqa: SLF001 - the caller of spawn_procs(), for the warning
        self._where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self._what = what
        self._make = make
        self._face = face
        self._home = home
        self._is_used = False
        self._body: Body[Any] | None = None

    def __enter__(self) -> T:
        """Start it in a block of its own."""
        return self._enter(keep=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Leave the block: everything that it owns is joined."""
        assert self._body is not None
        return self._body.leave(error)

    @shortens_tracebacks
    def open(self) -> T:
        """Start it, until its `close()`; what is open at the exit of the interpreter is closed then, which is logged.

        A failure that ends it is raised by the calls that are under way, else by the next one, else by `close()`.
        """
        return self._enter(keep=True)

    @shortens_tracebacks
    def adopt(self) -> T:
        """Start it in the block of the mesh that it is spawned on."""
        made = self._use()

        async def adopt() -> Any:
            return await made()

        return self._face(wait(adopt, self._home), self._home)

    def _enter(self, *, keep: bool) -> T:
        make = self._use()
        self._body = body = body_of(make(), self._what, self._home)
        value = body.owns = body.enter(keep=keep)
        return self._face(value, body)

    @shortens_tracebacks
    def close(self) -> None:
        """End what was opened: everything that it owns is joined, in order. A second call does nothing.

        Raises:
            MeshErrorGroup: What has failed, if no call has raised it.
            RuntimeError: It was not opened, or what was opened inside of it is still open.
        """
        if self._body is None:
            raise RuntimeError(f"{self._what} was not opened, so there is nothing to close")
        self._body.close()

    def _use(self) -> Callable[[], spawning.Spawning[Any]]:
        if self._is_used:
            raise RuntimeError(f"{self._what} can be started once: call it again for another mesh")
        self._is_used = True
        check_thread()
        return self._make

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self._what} has not been started, so it has no {name!r}: write `with ... as mesh:` or "
            "`mesh = ....open()` first"
        )

    def __del__(self) -> None:
        if not self.__dict__.get("_is_used", True):
            warnings.warn(
                f"{self._what}, made at {self._where}, was never started: write `with` before it, or .open() after it",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        return f"<{self._what}, not started>"
