"""What the agents of a mesh have answered to its owner: which of it is an error, and which of that is news."""

from __future__ import annotations

from collections.abc import Sequence

from trimesh._runtime.calls.invocation import Err, Result
from trimesh.errors import HostLost, LinkLost, MeshErrorGroup, MeshStopped, ProcDied, Unresponsive


def is_silent(result: Result) -> bool:
    """Return whether a rank has not answered in time."""
    return isinstance(result, Err) and isinstance(result.error, Unresponsive) and not result.is_raised


def news_of(results: Sequence[Result]) -> list[Exception]:
    """Return the errors that are told nowhere else: a lost process is its block's, a silent one is killed."""
    known = (ProcDied, HostLost, LinkLost, MeshStopped, Unresponsive)
    return [
        result.error
        for result in results
        if isinstance(result, Err) and (result.is_raised or not isinstance(result.error, known))
    ]


def errors_of(results: Sequence[Result]) -> list[Exception]:
    return [result.error for result in results if isinstance(result, Err)]


def raise_errors(results: Sequence[Result], message: str, mesh: str, endpoint: str | None = None) -> None:
    """Raise the errors among `results` as one group, if there are any."""
    errors = errors_of(results)
    if errors:
        raise MeshErrorGroup(message, errors, mesh=mesh, endpoint=endpoint)
