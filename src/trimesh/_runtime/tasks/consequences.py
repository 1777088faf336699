"""Which errors say no more than that something of ours was stopped: a block that is being left does not raise them.

Background work - a broadcast's, a lifespan's - goes on while meshes are stopped one after another, and calls some that
are gone already. Trio cancels all tasks of a nursery at once, so there such errors never come to be. An error that
user code makes itself, also while it handles one of these, is a failure of its own.
"""

from __future__ import annotations

from typing import Final, cast

import trio

from trimesh.errors import ActorFailed, MeshStopped, RemoteCancelled, RestartLimit, leaves, origin

BUDGET_REASON: Final = "budget at sending"
"""Of a `RemoteCancelled` that says that a budget has run out, which has nothing to do with a stop (rule C3)."""


def is_consequence(leaf: BaseException) -> bool:
    """Return whether an exception that is no group says only that what it called, or sent to, was stopped."""
    match leaf:
        case trio.BrokenResourceError() | trio.EndOfChannel():
            return True
        case MeshStopped():
            return _is_of_a_call(leaf)
        case RemoteCancelled(reason=reason):
            return reason != BUDGET_REASON and _is_of_a_call(leaf)
        case ActorFailed():  # a callee that has itself ended by such an error
            return leaf.__cause__ is not None and all(map(is_consequence, leaves(leaf.__cause__)))
        case RestartLimit(causes=causes):
            return bool(causes) and all(is_consequence(one) for cause in causes for one in leaves(cause))
        case _:
            return False


def _is_of_a_call(leaf: MeshStopped | RemoteCancelled) -> bool:
    """Return whether a call has ended by the error: one that user code has made itself names no endpoint called."""
    return origin(leaf).endpoint is not None


def without_consequences(error: Exception) -> Exception | None:
    """Return an error without the leaves that are consequences of a stop, or None when nothing else is in it."""
    if isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        return group.split(is_consequence)[1]
    return None if is_consequence(error) else error
