"""What of the errors of several ranks is the cause, and what only came of it (rule N3).

- A rank that fails comes before those that waited for it in a collective; they have its error as the cause of theirs.
- The death of a process is the one failure of those that waited for it: what they raise is its context, no sibling.
  Where only they were asked, each has the death as its cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trimesh.errors import CollectiveFailed, set_origin
from trimesh.tensor.controller.engine import unexplained_death
from trimesh.tensor.protocol.errors import PROCESS_ENDED

if TYPE_CHECKING:
    from trimesh.tensor.controller.team import Team


def causes_first(team: Team, deaths: Sequence[Exception], errors: Sequence[Exception]) -> list[Exception]:
    """Return how the ranks of a team have failed, without the consequences of deaths.

    Args:
        team: The ranks.
        deaths: Of those that will not answer any more.
        errors: What the others have answered.
    """
    victims = [(error, root) for error in errors if (root := _victim(error)) is not None]
    if victims and deaths:
        deaths[0].__context__ = deaths[0].__context__ or victims[0][0]
        left_out = {id(error) for error, _ in victims}
        errors = [error for error in errors if id(error) not in left_out]
    elif victims and (death := _death_in(team)) is not None:
        for _, root in victims:
            death.__cause__ = death.__cause__ or root.__cause__  # where the rank was
            root.__cause__ = death
    return [*deaths, *sorted(errors, key=lambda error: isinstance(error, CollectiveFailed))]


def death_at(team: Team, place: int) -> Exception:
    """Return the error for the process at some place of a team, which has ended."""
    peer = team.peers[place]
    if peer.death is None:  # tasks find out how it has ended
        return unexplained_death(team.name, team.origins[place])
    error = peer.death(maybe_executed=True)
    set_origin(error, team.origins[place])
    return error


def _victim(error: BaseException) -> CollectiveFailed | None:
    """Return what the first of the ranks that wait for each other has raised, if that was because of a death."""
    while isinstance(error, CollectiveFailed):
        if str(error) == PROCESS_ENDED:
            return error
        if error.__cause__ is None:
            break
        error = error.__cause__
    return None


def _death_in(team: Team) -> Exception | None:
    places = (place for place, peer in enumerate(team.peers) if peer.death is not None or peer.link is None)
    return next((death_at(team, place) for place in places), None)
