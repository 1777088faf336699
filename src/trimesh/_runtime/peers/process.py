"""What this room asks of its process, and of what other rooms keep in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Any, Protocol

from trimesh._runtime.values.codec import Values
from trimesh.ids import ProcId


class PeerProc(Protocol):
    """The process that has a peer; see `Proc`."""

    @property
    def proc_id(self) -> ProcId:
        """This incarnation."""
        ...

    @property
    def values(self) -> Values:
        """How its values travel."""
        ...

    @property
    def family(self) -> PeerFamily | None:
        """Who has started it; None for one without links to others."""
        ...

    @property
    def members(self) -> Container[ProcId]:
        """Child processes that it owns."""
        ...

    def serve(self, service: Callable[..., Awaitable[object]], *args: Any) -> bool:
        """Run a task for as long as links are served; return False, and do not, when that is over."""
        ...


class PeerFamily(Protocol):
    """Who has started a process; see `Family`."""

    @property
    def parent(self) -> ProcId | None:
        """The process that has started it."""
        ...

    @property
    def root(self) -> ProcId | None:
        """The controller, if it is another one."""
        ...

    @property
    def neighbours(self) -> Container[ProcId]:
        """Controllers of other programs that this one has connected to."""
        ...

    def is_foreign(self, proc_id: ProcId) -> bool:
        """Return whether a process is of another program."""
        ...


class CarriedHoldings(Protocol):
    """The ports of a message that has come; see `CarriedPorts`."""

    @property
    def holdings(self) -> Sequence[object]:
        """Each of them."""
        ...
