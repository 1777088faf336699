"""What survivors of a death say of it: that a peer is gone, in the words of what they talked to it by.

Ranks that meet in a collective, or over a socket of their own, hear of a death by themselves, often before its owner
does. That is no failure beside the death but its consequence, so it is noted on the death, and `except* ProcDied`
catches all there is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, cast

from trimesh import limits
from trimesh._runtime.values.codec import describe
from trimesh.errors import HostLost, LinkLost, Origin, ProcDied, RemoteError, add_note, leaves, origin, text_of

if TYPE_CHECKING:
    from trimesh._runtime.values.reference import MemberInfo

Place = tuple[str, int]
"""A process: host and pid."""
Crew = Collection[Place]
"""The processes of one mesh, those of all incarnations."""

_BY_TYPE: Final = frozenset({"torch.distributed.DistBackendError", "torch.distributed.DistNetworkError"})
"""Errors of torch, which this process need not have imported."""

_BY_TEXT: Final = re.compile(
    r"connection (closed|reset|was likely closed)|broken pipe|timed out waiting .* (recv|send) operation"
    r"|(recv|send|read|write) (timeout|error)|socket closed",
    re.IGNORECASE | re.DOTALL,
)
"""What gloo says in a RuntimeError of its C++ files, and c10d of its store."""

DEATHS: Final = (ProcDied, HostLost, LinkLost)


def says_peer_is_gone(leaf: BaseException) -> bool:
    """Return whether an error that is no group says that the other side of a connection is gone."""
    if isinstance(leaf, RemoteError):
        name, text = leaf.type_name, leaf.message
    else:
        name, text = f"{type(leaf).__module__}.{type(leaf).__qualname__}", text_of(leaf)
    if isinstance(leaf, ConnectionError) or name in _BY_TYPE or name.replace("._C._distributed_c10d", "") in _BY_TYPE:
        return True
    return isinstance(leaf, RuntimeError | RemoteError) and text_says_peer_is_gone(text)


def text_says_peer_is_gone(text: str) -> bool:
    """Return whether the text of an error, or the end of a traceback, says so in the words of gloo or c10d."""
    return ("gloo" in text or "c10d" in text) and _BY_TEXT.search(text) is not None


def fold_into_deaths(errors: Sequence[Exception], crews: Sequence[Crew] | None = None) -> list[Exception]:
    """Return errors without those of survivors that only say that a peer is gone; the death of the peer tells of them.

    Where no member has died they stay: then something else is the matter.

    Args:
        errors: Of members of one mesh, or of several.
        crews: The processes of each mesh, when there are several: only those of one mesh are peers.
    """
    found = [leaf for error in errors for leaf in leaves(error)]
    deaths = [leaf for leaf in found if isinstance(leaf, DEATHS) and origin(leaf).point is not None]
    if not deaths:
        return list(errors)
    dead: set[Place] = {place for leaf in deaths if (place := place_of(origin(leaf))) is not None}

    def is_told(leaf: BaseException) -> bool:
        place = place_of(origin(leaf))
        if place is None or place in dead or not says_peer_is_gone(leaf):
            return False
        return crews is None or any(place in crew and not dead.isdisjoint(crew) for crew in crews)

    told = [leaf for leaf in found if is_told(leaf)]
    if not told:
        return list(errors)
    _note(deaths[0], told)
    return [rest for error in errors if (rest := _without(error, told)) is not None]


def place_of(where: Origin | MemberInfo | None) -> Place | None:
    """Return the process of a member; None for this program, and for one that is not known."""
    return None if where is None or not where.pid else (where.host, where.pid)


def _without(error: Exception, told: Sequence[BaseException]) -> Exception | None:
    if isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        return group.split(lambda leaf: any(leaf is one for one in told))[1]
    return None if any(error is one for one in told) else error


def _note(death: BaseException, told: Sequence[BaseException]) -> None:
    lines = ["those who were connected to it have failed for that reason:"]
    for leaf in told[: limits.SURVIVORS_TOLD]:
        where = origin(leaf)
        place = "" if where is None else f"{describe(where)}: "
        text = " ".join(str(leaf).split())[: limits.SURVIVOR_CHARS]
        lines.append(f"  {place}{type(leaf).__name__}: {text}")
    if len(told) > limits.SURVIVORS_TOLD:
        lines.append(f"  and {len(told) - limits.SURVIVORS_TOLD} more")
    add_note(death, "\n".join(lines))
