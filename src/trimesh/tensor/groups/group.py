"""`Group`: the process group of some ranks of a team, which is made anew when one of them could not take part (N3).

It is one object, under one name, for as long as the team is: what torch keeps of it (a device mesh, the layout of a
distributed tensor, a user's variable) stays right. Behind it are generations of a group of torch's own, made when one
is needed and destroyed when it has failed: that is what frees the other ranks.

A generation has gloo for tensors of the host, at addresses that its ranks agree upon (`addresses`). Those of CUDA
devices go by NCCL, if each rank has a device of its own, which NCCL insists on; otherwise by gloo, as copies on the
host.
"""

from __future__ import annotations

import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from trimesh import limits
from trimesh.config import current
from trimesh.errors import CollectiveFailed
from trimesh.tensor.groups.addresses import RankPlace, meeting_place, place_here
from trimesh.tensor.groups.host_copies import DEVICES, on_host
from trimesh.tensor.groups.known_dtypes import by_known_dtypes
from trimesh.tensor.groups.team_store import TeamStore
from trimesh.tensor.groups.traffic import TrafficCounts

if TYPE_CHECKING:
    from trimesh.tensor.rank.rank import Rank, TeamOnRank

_c10d: Any = _distributed_c10d  # whose stub leaves out much

COLLECTIVES: Final = (
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""What all ranks do together: may be done again in a new generation."""

POINT_TO_POINT: Final = ("recv", "recv_anysource", "send")
"""What two ranks do: the others would not come to make a new generation."""

_IN_PLACE: Final = frozenset({"allreduce", "allreduce_coalesced", "reduce", "broadcast"})
"""Their first argument is a list of tensors that a failed attempt may have written to."""


class NamedGroup(dist.ProcessGroup):
    """A process group whose operations are those of others behind it.

    Args:
        index: Of this rank among those of the group.
        size: How many there are.
        name: See below.

    Attributes:
        full_name: That torch's registry has it by.
    """

    def __init__(self, index: int, size: int, name: str) -> None:
        super().__init__(index, size)  # type: ignore[call-arg]
        self.full_name = name

    # ---- what torch asks a group -----------------------------------------------------------------------------

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that torch's registry has it by."""
        return self.full_name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of a backend that is there in any case."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override, unused-ignore]
        """The name that torch's registry has it by."""
        return self.full_name

    @property
    def group_desc(self) -> str:  # type: ignore[override, unused-ignore]
        """For people."""
        return self.full_name


class Group(NamedGroup):
    """The process group of the ranks of a team that differ in some dimensions only.

    Args:
        rank: This rank.
        team: The team.
        number: In its name.
        places: Of the group's ranks in the team, in order.
        key: Names the group among those of the team, the same at each of its ranks.
    """

    def __init__(self, rank: Rank, team: TeamOnRank, number: int, places: Sequence[int], key: str) -> None:
        super().__init__(list(places).index(team.place), len(places), f"{rank.mesh}/{number}/{key}")
        self.places = places
        self.key = key
        self.device = rank.device
        self._team = team
        self._ask = partial(rank.outside.ask, team)
        self._leave = partial(rank.outside.leave, team)
        self._counts = rank.above.setdefault(TrafficCounts, TrafficCounts())
        self.store = TeamStore(self._ask)
        self._inner: dist.ProcessGroup | None = None
        self._has_nccl = False

    # ---- generations -----------------------------------------------------------------------------------------

    def run(self, function: Callable[[dist.ProcessGroup], Any], *, may_repeat: bool = True) -> Any:
        """Do something collective in the current generation, or in a new one.

        Args:
            function: Is given a process group of torch's, and returns a work or None.
            may_repeat: Whether it can be done again when the group was broken before this operation.

        Raises:
            CollectiveFailed: Another rank could not take part.
        """
        while True:
            is_new = self._inner is None
            inner = self._inner or self._make()
            try:
                return self._finished(function(inner))
            except Exception as error:
                del inner
                traceback.clear_frames(error.__traceback__)  # they hold what is to be destroyed, too
                self._destroy()
                self._check_cause()
                if is_new or not may_repeat:
                    self.leave(error)
                    raise

    def leave(self, error: BaseException) -> None:
        """Take no part in the current operation, and free those that do; they get the error as the cause of theirs."""
        self._leave(error)
        self._destroy()

    def destroy(self) -> None:
        """Destroy the current generation; the peers that are in it, or come to it, ask why."""
        self._destroy()

    def _make(self) -> dist.ProcessGroup:
        try:
            generation = self._ask("join", [self.key], [], self._here()).number
            store = _c10d.PrefixStore(f"{self.key}/{generation}", self.store)
            place = self._place(generation)
            why_not = _why_no_nccl(store, self) if self.device.type == "cuda" else ""
            self._has_nccl = self.device.type == "cuda" and not why_not
            if why_not and self.rank() == 0:
                _warn_once(f"collectives of CUDA tensors go by gloo, as copies on the host: {why_not}")
            made = _inner(store, self, place, has_nccl=self._has_nccl)
        except CollectiveFailed:
            raise
        except Exception as error:
            # Another has left while the group was made, or it cannot be made here: then the others learn it from us.
            self._check_cause()
            self.leave(error)
            raise
        self._inner = made
        return made

    def _place(self, generation: int) -> RankPlace:
        """Return where this rank listens for the others; see `meeting_place`."""
        own = place_here(current().collectives)
        keys = [f"{self.key}/{generation}/place/{index}" for index in range(self.size())]
        self._ask("set", [keys[self.rank()]], [msgspec.json.encode(own)])
        return meeting_place(own, self._ask("get", keys, seconds=limits.COLLECTIVE_SECONDS).values)

    def _here(self) -> list[int]:
        return [self._team.place, self._team.steps, *self.places]

    def _check_cause(self) -> None:
        """Raise why the current operation cannot be done, if another rank has left it."""
        self._ask("why", [self.key], [], self._here())

    def _finished(self, work: Any) -> Any:
        """Wait for a work; return one that keeps nothing of this generation alive."""
        if work is None:
            return None
        work.wait()
        if self._has_nccl:  # it was only queued: whoever uses the result waits in its own stream
            self._watch(work)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return _c10d._create_work_from_future(done)

    def _watch(self, work: Any) -> None:
        """Wait until a device has done a work: one that waits for a rank that has left waits until we abort."""
        began = time.monotonic()
        while not work.is_completed():
            if time.monotonic() - began > limits.SIGNAL_SECONDS:
                self._check_cause()
                began = time.monotonic()
            time.sleep(limits.COLLECTIVE_POLL_SECONDS)

    def _destroy(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None and self._has_nccl:
            inner.abort()


def _collective(name: str, *, may_repeat: bool) -> Callable[..., Any]:
    def collective(self: Group, *args: Any, **kwargs: Any) -> Any:
        kept = [one.clone() for one in args[0]] if name in _IN_PLACE else []
        attempts = 0

        def attempt(inner: dist.ProcessGroup) -> Any:
            nonlocal attempts
            attempts += 1
            if attempts > 1:
                for one, before in zip(args[0] if kept else (), kept, strict=True):
                    one.copy_(before)
            call = partial(by_known_dtypes, name, getattr(inner, name))
            if self._has_nccl or self.device.type not in DEVICES:
                return call(*args, **kwargs)
            return on_host(call, args, kwargs, gives=name != "send")

        begun = time.monotonic_ns()
        work = self.run(attempt, may_repeat=may_repeat)
        self._counts.count(self.key.partition(" ")[0], name, self.size(), args, begun)
        return work

    collective.__name__ = name
    return collective


for _names, _may_repeat in ((COLLECTIVES, True), (POINT_TO_POINT, False)):
    for _name in _names:
        if hasattr(dist.ProcessGroup, _name):  # each version of torch has its own
            setattr(Group, _name, _collective(_name, may_repeat=_may_repeat))


BACKEND: Final = "gloo"
"""What `torch.distributed` is told that serves a group. More precise names would change nothing that torch does."""


def _why_no_nccl(store: Any, group: Group) -> str:
    """Return why NCCL cannot serve a group, "" if it can; all ranks find the same, whatever each can see."""
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL; install one that has"
    store.set(f"device/{group.rank()}", str(torch.cuda.get_device_properties(group.device).uuid))
    devices = len({store.get(f"device/{rank}") for rank in range(group.size())})
    if devices == group.size():
        return ""
    return (
        f"NCCL needs a CUDA device for each rank, and {group.size()} ranks share {devices}; "
        f"spawn at most {devices} ranks here to use NCCL"
    )


_warned = set[str]()


def _warn_once(text: str) -> None:
    """Warn, once in this process: a group is made anew whenever it has failed."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=2)


def _inner(store: Any, group: Group, place: RankPlace, *, has_nccl: bool) -> dist.ProcessGroup:
    """Return a group of torch's own; all its ranks are here at the same time."""
    timeout = timedelta(seconds=limits.COLLECTIVE_SECONDS)
    rank, size = group.rank(), group.size()
    made: dist.ProcessGroup = _c10d.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    made._set_default_backend(kinds.NCCL if has_nccl else kinds.GLOO)
    gloo = _c10d.ProcessGroupGloo._Options()
    gloo._devices = [_c10d.ProcessGroupGloo.create_device(hostname=place.address)]  # no other is listened on
    gloo._timeout = timeout
    backend: Any = _c10d.ProcessGroupGloo(store, rank, size, gloo)
    made._register_backend(torch.device("cpu"), kinds.GLOO, backend)
    if has_nccl:
        if place.interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={place.interface}")  # NCCL has no other way to be told
        nccl = _c10d.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        backend = _c10d.ProcessGroupNCCL(_c10d.PrefixStore("nccl", store), rank, size, nccl)
        made._register_backend(torch.device("cuda"), kinds.NCCL, backend)
    return made
