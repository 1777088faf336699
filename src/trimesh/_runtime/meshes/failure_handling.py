"""The handlers of failures of one mesh of processes, and of the actors on it, while their blocks are open.

    failure --> handlers, the last opened first --(none has handled it)--> the policy of the mesh

FH-1 a handler is asked as the failure is recorded, before any waiter hears of it, in the order of the failures: what
     it says is as much a part of that moment as the verdict of the policy (X3).
FH-2 a handler that raises has handled nothing: the policy goes on, and the handler's block raises its error.
FH-3 no handler is asked once its block has been left, nor of a failure that its own view does not show.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any

import trio

from trimesh._runtime.tasks.consequences import without_consequences
from trimesh._runtime.values.reference import MeshInfo
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import origin
from trimesh.events import Failure, OnFailure


class _Handling:
    """A handler while its block is open.

    Attributes:
        scope: Around the body.
    """

    def __init__(self, handler: OnFailure, sees: Callable[[int], bool]) -> None:
        self.sees = sees
        self.scope = trio.CancelScope()
        self.errors: list[BaseException] = []
        self._handler = handler
        self._context = contextvars.copy_context()

    def handles(self, failure: Failure) -> bool:
        """Ask the handler, in the context of its block."""
        try:
            answer: Any = self._context.copy().run(self._handler, failure)
            if inspect.iscoroutine(answer):
                answer.close()
            if answer is not None and not isinstance(answer, bool):
                raise TypeError(
                    f"a failure handler must return True (handled) or False, at once, got {answer!r}: make it a plain "
                    "def, and start what waits in a nursery of your own"
                )
        except BaseException as error:  # noqa: BLE001 - raised by the block of the handler
            self.errors.append(error)
            self.scope.cancel(reason="its failure handler has raised an error")
            return False
        return bool(answer)


class FailureHandling:
    """All open handlers of one mesh of processes."""

    def __init__(self) -> None:
        self._open: list[_Handling] = []

    def is_handled(
        self, proc_ranks: Collection[int], info: MeshInfo, ranks: Collection[int], reason: Exception, *, has_ended: bool
    ) -> bool:
        """Return whether a handler takes a failure upon itself.

        Args:
            reason: The failure. One that says only that something was stopped is none.
        """
        if not self._open or without_consequences(reason) is None:
            return False
        points = tuple(info.whole.point(rank) for rank in ranks)
        where = origin(reason)
        is_known = where is not None and where.mesh == info.name
        incarnation = where.incarnation if where is not None and is_known else info.members[min(ranks)].incarnation
        failure = Failure(mesh=info.name, points=points, reason=reason, incarnation=incarnation, has_ended=has_ended)
        asked = [one for one in reversed(self._open) if any(one.sees(rank) for rank in proc_ranks)]
        return any(one.handles(failure) for one in asked)

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection
    async def open(self, handler: OnFailure, sees: Callable[[int], bool]) -> AsyncGenerator[None, None]:
        """Ask `handler` of failures while the body runs.

        Args:
            handler: A plain function.
            sees: Whether it wants to hear of the process of a rank.

        Raises:
            ExceptionGroup: The handler has raised errors, which are in it, beside that of the body.
        """
        one = _Handling(handler, sees)
        error: BaseException | None = None
        await trio.lowlevel.checkpoint()
        self._open.append(one)
        try:
            with one.scope:
                yield
        except BaseException as raised:  # noqa: BLE001 - raised below, beside the errors of the handler
            error = raised
        finally:
            self._open.remove(one)
        if one.errors:
            found = [*one.errors] if error is None else [*one.errors, error]
            raise BaseExceptionGroup("the failure handler has raised errors", found) from None
        if error is not None:
            raise error


def check_handler(handler: Any) -> None:
    """Refuse what cannot be asked at once.

    Raises:
        TypeError: It is no plain function.
    """
    if not callable(handler) or inspect.iscoroutinefunction(handler):
        raise TypeError(
            "on_failure takes a plain function of a Failure: it is asked before any call hears of the failure, so it "
            f"must not wait; got {handler!r}. Start what waits in a nursery of your own: nursery.start_soon(...)"
        )
