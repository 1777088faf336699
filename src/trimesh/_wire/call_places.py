"""Where a message was sent to, and from where, as its head says it; and the message that says it for several calls.

A view is sent when it differs from the mesh as spawned: its extent, and the ranks in its order. A caller is sent when
it is an actor. Both are what the sender says of itself: they are for programs to read, and give no right to anything.
"""

# Annotations are not texts here: msgspec would compile each of them in every new process.

from typing import Annotated

import msgspec

from trimesh import limits
from trimesh._wire import watching
from trimesh.errors import Origin, ProtocolError, ShapeError, place_name
from trimesh.ids import MeshId
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region


class _Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class SentView(_Place, frozen=True):
    """The view that a message was sent to.

    Attributes:
        labels, sizes: Its extent.
        ranks: Ranks in the mesh as spawned, in the order of the view; of an arithmetic progression the first two.
    """

    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def point_of(self, point: Point) -> Point:
        """Return where a member, which is at `point` of the mesh as spawned, is in this view.

        Raises:
            ProtocolError: It is not there, or this is no view.
        """
        try:
            extent = Extent(dict(zip(self.labels, self.sizes, strict=True)))
            ranks = self.ranks
            if len(ranks) == 2 and extent.nelements > 2:
                step = ranks[1] - ranks[0]
                rank = (point.rank - ranks[0]) // step if (point.rank - ranks[0]) % step == 0 else -1
            else:
                rank = ranks.index(point.rank)
            return Point(rank, extent, point.mesh, point.rank)
        except (ShapeError, ValueError, TypeError, ArithmeticError) as error:
            where = place_name("", point)
            raise ProtocolError(f"a message must be sent to a view of its mesh, got {self!r} at {where}") from error


class CallerPlace(_Place, frozen=True):
    """The actor that has sent a message.

    Attributes:
        mesh, actor, endpoint: As in an `Origin`.
        labels, sizes: Extent of its mesh as spawned.
        rank: Its place there.
        incarnation: 0 for the first process at that place.
    """

    mesh: str
    actor: str | None
    endpoint: str | None
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    rank: int
    incarnation: int

    @property
    def origin(self) -> Origin:
        """The same for people and programs.

        Raises:
            ProtocolError: It is no place.
        """
        try:
            point = Point(self.rank, Extent(dict(zip(self.labels, self.sizes, strict=True))))
        except (ShapeError, ValueError, TypeError) as error:
            raise ProtocolError(f"a caller must be at a point of its mesh, got {self!r}") from error
        return Origin(point, self.mesh, self.actor, self.endpoint, incarnation=self.incarnation)


def sent_view(region: Region) -> SentView | None:
    """Return what is sent of a view; None for a mesh as spawned, whatever is missing in it."""
    table = region.table
    if region.extent == region.base and table == range(region.base.nelements):
        return None
    is_short = isinstance(table, range) and len(table) > 2
    return SentView(region.extent.labels, region.extent.sizes, tuple(table[:2] if is_short else table))


class Calls(watching.Message, frozen=True, tag=14):
    """So many `Call` of `trimesh._wire.messages`, in this order. No bodies and no ports come with them.

    Attributes:
        mesh, endpoint, budget, view, caller: As in `Call`; the endpoint is no generator.
        calls: Number and payload of each. The credits count a call by the bytes of its payload.
    """

    mesh: MeshId
    endpoint: str
    budget: float | None
    calls: Annotated[tuple[tuple[int, bytes], ...], msgspec.Meta(min_length=1, max_length=limits.CALLS_PER_MESSAGE)]
    view: SentView | None = None
    caller: CallerPlace | None = None
