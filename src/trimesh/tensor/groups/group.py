"""`Group`: process group of some ranks of a team, rebuilt after one of them could not take part (rule N3).

It is one object with one name for the life of the team, so references that torch keeps (a device mesh, the layout of a
distributed tensor, a user's variable) stay valid. It delegates to generations of torch's own groups. A generation is
made on demand and destroyed after a failure, which releases the other ranks.

A generation uses gloo for tensors on the host, at addresses that its ranks agree on (`RankPlace`). Tensors of CUDA
devices use NCCL if each rank has a device of its own, as NCCL requires; else gloo, with copies on the host.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh._runtime.system import host_name
from trimesh._transport.native.carriers import boot_id
from trimesh.config import current
from trimesh.errors import CollectiveFailed, ConfigError
from trimesh.tensor.groups.stores import TeamStore

if TYPE_CHECKING:
    from trimesh.tensor.rank.rank import Rank, TeamOnRank


_c10d: Any = _distributed_c10d  # its stub is incomplete

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
"""Collectives of all ranks, which may be repeated in a new generation."""

POINT_TO_POINT: Final = ("recv", "recv_anysource", "send")
"""Operations of two ranks: not repeated, as the other ranks would not join a new generation."""

_IN_PLACE: Final = frozenset({"allreduce", "allreduce_coalesced", "reduce", "broadcast"})
"""Collectives whose first argument is a list of tensors that a failed attempt may have written to."""


class NamedGroup(dist.ProcessGroup):
    """A process group that delegates its operations to other groups.

    Args:
        index: Index of this rank in the group.
        size: Number of ranks.
        name: See `full_name`.

    Attributes:
        full_name: Name in torch's registry.
    """

    def __init__(self, index: int, size: int, name: str) -> None:
        super().__init__(index, size)  # type: ignore[call-arg]
        self.full_name = name

    # ---- interface for torch ---------------------------------------------------------------------------------

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name in torch's registry."""
        return self.full_name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of a backend that every group has."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override, unused-ignore]
        """Name in torch's registry."""
        return self.full_name

    @property
    def group_desc(self) -> str:  # type: ignore[override, unused-ignore]
        """Description, for logs."""
        return self.full_name


class Group(NamedGroup):
    """Process group of the ranks of a team that differ only in some dimensions.

    Args:
        rank: This rank.
        team: The team.
        number: Number in the group's name.
        places: Places of the group's ranks in the team, in order.
        key: Identifies the group within the team; the same at each of its ranks.
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
        """Run a collective in the current generation, or in a new one.

        Args:
            function: Takes a process group of torch, and returns a work or None.
            may_repeat: Whether to repeat it if the group was broken before this operation.

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
                traceback.clear_frames(error.__traceback__)  # frames refer to the group to be destroyed
                is_last = is_new or not may_repeat
                try:
                    self._check_cause()
                    if is_last:
                        self._leave(error)  # before the others find their connections closed, and take that as a cause
                finally:
                    self._destroy()
                if is_last:
                    raise

    def leave(self, error: BaseException) -> None:
        """Leave the current operation and release the ranks in it; the error becomes the cause of theirs."""
        self._leave(error)
        self._destroy()

    def destroy(self) -> None:
        """Destroy the current generation; peers that are in it, or join it, query the reason."""
        self._destroy()

    def _make(self) -> dist.ProcessGroup:
        try:
            generation = self._ask("join", [self.key], [], self._here()).number
            store = _c10d.PrefixStore(f"{self.key}/{generation}", self.store)
            place = self._place(generation)
            why_not = _why_no_nccl(store, self) if self.device.type == "cuda" else ""
            self._has_nccl = self.device.type == "cuda" and not why_not
            if why_not and self.rank() == 0:
                _warn_once(f"collectives of CUDA tensors use gloo, on copies on the host: {why_not}")
            made = _inner(store, self, place, has_nccl=self._has_nccl)
        except CollectiveFailed:
            raise
        except Exception as error:
            # Another rank has left meanwhile, or this one cannot make the group and must release the others.
            self._check_cause()
            self.leave(error)
            raise
        self._inner = made
        return made

    def _place(self, generation: int) -> RankPlace:
        """Return the address on which this rank listens for the others; see `meeting_place`."""
        own = place_here(current().collectives)
        keys = [f"{self.key}/{generation}/place/{index}" for index in range(self.size())]
        self._ask("set", [keys[self.rank()]], [msgspec.json.encode(own)])
        return meeting_place(own, self._ask("get", keys, seconds=limits.COLLECTIVE_SECONDS).values)

    def _here(self) -> list[int]:
        return [self._team.place, self._team.steps, *self.places]

    def _check_cause(self) -> None:
        """Raise the error of another rank that has left the current operation, if any."""
        self._ask("why", [self.key], [], self._here())

    def _finished(self, work: Any) -> Any:
        """Wait for a work; return a work without references to this generation."""
        if work is None:
            return None
        work.wait()
        if self._has_nccl:  # NCCL has only queued it: users of the result wait in their own stream
            self._watch(work)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return _c10d._create_work_from_future(done)

    def _watch(self, work: Any) -> None:
        """Wait until the device has completed a work. If a rank has left, it never completes and is aborted."""
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
"""Backend name that `torch.distributed` gets for a group. A more precise name would not change its behaviour."""


def _why_no_nccl(store: Any, group: Group) -> str:
    """Return why NCCL cannot serve a group, or "" if it can. All ranks get the same answer."""
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
    """Warn once in this process, as a group is rebuilt after each failure."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=2)


def _inner(store: Any, group: Group, place: RankPlace, *, has_nccl: bool) -> dist.ProcessGroup:
    """Make a group of torch; all its ranks call this at the same time."""
    timeout = timedelta(seconds=limits.COLLECTIVE_SECONDS)
    rank, size = group.rank(), group.size()
    made: dist.ProcessGroup = _c10d.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    made._set_default_backend(kinds.NCCL if has_nccl else kinds.GLOO)
    gloo = _c10d.ProcessGroupGloo._Options()
    gloo._devices = [_c10d.ProcessGroupGloo.create_device(hostname=place.address)]  # listen on this address only
    gloo._timeout = timeout
    backend: Any = _c10d.ProcessGroupGloo(store, rank, size, gloo)
    made._register_backend(torch.device("cpu"), kinds.GLOO, backend)
    if has_nccl:
        if place.interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={place.interface}")  # NCCL has no other way to set it
        nccl = _c10d.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        backend = _c10d.ProcessGroupNCCL(_c10d.PrefixStore("nccl", store), rank, size, nccl)
        made._register_backend(torch.device("cuda"), kinds.NCCL, backend)
    return made


# ---- collectives of tensors that the backend cannot reach: done on copies on the host --------------------------------

DEVICES: Final = {"cuda"}
"""Device types whose tensors take part as copies."""


@attrs.frozen(eq=False)
class _WorkOnCopies:
    """Work of a collective on copies.

    Attributes:
        work: Work of the backend.
        outputs: Output tensors, each with its copy.
    """

    work: Any
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def wait(self) -> None:
        """Wait, once, and write to the tensors."""
        self.work.wait()
        for one, copy in self.outputs:
            one.copy_(copy)


def on_host(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, gives: bool) -> Any:
    """Call a method of a process group with host copies of its tensors on devices.

    Args:
        call: The method.
        args: Its arguments.
        kwargs: Its keyword arguments.
        gives: Whether it writes to the tensors that are, or are in, its first argument.

    Returns:
        None, or a work; waiting for it writes the results to the tensors.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copied(one: torch.Tensor) -> torch.Tensor:
        if one.device.type not in DEVICES:
            return one
        copy = one.to("cpu", copy=True)
        pairs.append((one, copy))
        return copy

    first = pytree.tree_map_only(torch.Tensor, copied, list(args[:1]))
    outputs = pairs[:] if gives else []
    rest, named = pytree.tree_map_only(torch.Tensor, copied, (list(args[1:]), kwargs))
    work = call(*first, *rest, **named)
    return None if work is None else _WorkOnCopies(work, outputs)


# ---- known dtypes ----------------------------------------------------------------------------------------------------

# Collectives of dtypes that back ends lack: tensors are sent as bytes, or reduced in a wider dtype.

REDUCING: Final = frozenset(
    {
        "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
        "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    }
)  # fmt: skip
"""Collectives that compute; others only move bytes."""

_KNOWN: Final = frozenset(
    {
        torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64,
    }
)  # fmt: skip

_WIDER: Final = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,  # the same bits
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}


@attrs.frozen(eq=False)
class _WorkOnWider:
    """Work of a collective in a wider dtype.

    Attributes:
        work: Work of the back end.
        outputs: Output tensors, each with the wider one.
        is_turned: Whether the sign bits of unsigned numbers are flipped, so that they order correctly as signed ones.
    """

    work: Any
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    is_turned: bool

    def wait(self) -> None:
        """Wait, once, and write to the tensors."""
        self.work.wait()
        for one, wide in self.outputs:
            one.copy_(_turned(wide).view(one.dtype) if self.is_turned else wide)


def by_known_dtypes(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of a process group with tensors converted to dtypes that its back end supports.

    Args:
        name: Name of the method.
        call: The method.
        args: Its arguments; it writes to the tensors that are, or are in, the first one.
        kwargs: Its keyword arguments.

    Returns:
        None, or a work; waiting for it writes the results to the tensors.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    if all(one.dtype in _KNOWN for one in leaves if isinstance(one, torch.Tensor)):
        return call(*args, **kwargs)
    if name not in REDUCING:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _as_bytes, (args, kwargs))
        return call(*args, **kwargs)
    has_order = any(_orders(getattr(one, "reduceOp", None)) for one in leaves)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def widened(one: torch.Tensor) -> torch.Tensor:
        wider = _WIDER.get(one.dtype)  # torch adds up complex numbers itself
        if wider is None:
            return one
        is_turned = has_order and one.dtype is torch.uint64
        wide = _turned(one.view(wider)) if is_turned else one.to(wider)
        pairs.append((one, wide))
        return wide

    first = pytree.tree_map_only(torch.Tensor, widened, list(args[:1]))
    outputs = pairs[:]
    rest, named = pytree.tree_map_only(torch.Tensor, widened, (list(args[1:]), kwargs))
    work = call(*first, *rest, **named)
    is_turned = has_order and any(one.dtype is torch.uint64 for one, _ in outputs)
    return None if work is None else _WorkOnWider(work, outputs, is_turned)


def _orders(operation: Any) -> bool:
    return bool(operation == dist.ReduceOp.MIN or operation == dist.ReduceOp.MAX)  # noqa: PLR1714 - not the other way


def _as_bytes(one: torch.Tensor) -> torch.Tensor:
    """Return a byte view of a tensor, with one more dimension; all other sizes are unchanged."""
    return one if one.dtype in _KNOWN else one.unsqueeze(-1).view(torch.uint8)


def _turned(wide: torch.Tensor) -> torch.Tensor:
    """Flip the sign bits: signed numbers then order as unsigned ones with the same bits; twice undoes it."""
    return wide ^ torch.iinfo(torch.int64).min


# ---- traffic of collectives, counted as if each used a ring ----------------------------------------------------------

_GATHERED: Final = frozenset(
    {
        "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single",
        "all_gather_single_coalesced",
    }
)  # fmt: skip
"""Collectives whose second argument is this rank's part, which is sent to each other rank."""

_SCATTERED: Final = frozenset(
    {
        "alltoall", "alltoall_base", "all_to_all_single", "reduce_scatter", "_reduce_scatter_base",
        "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    }
)  # fmt: skip
"""Collectives whose second argument has a part for each rank; all but the rank's own are sent."""

_REDUCED: Final = frozenset({"allreduce", "allreduce_coalesced"})
"""Collectives whose first argument is reduce-scattered, then gathered."""


@attrs.define(eq=False)
class TrafficCounts:
    """Traffic of one rank: number of collectives and bytes sent, by labels of the mesh and name of the collective.

    Attributes:
        by_labels: For each group of labels ("dp", "dp,tp"), counts and bytes by name of the collective.
    """

    by_labels: dict[str, dict[str, list[int]]] = attrs.field(factory=dict[str, dict[str, list[int]]])

    def count(self, labels: str, name: str, ranks: int, args: tuple[Any, ...], begun: int = 0) -> None:
        """Count one collective; `begun` is its start time, used only by profiles."""
        del begun
        found = self.by_labels.setdefault(labels, {}).setdefault(name, [0, 0])
        found[0] += 1
        found[1] += sent_bytes(name, ranks, args)


def sent_bytes(name: str, ranks: int, args: tuple[Any, ...]) -> int:
    """Return the bytes that a rank sends if the collective uses a ring; other algorithms are not modelled.

    Collectives with one source or one destination, and point-to-point messages, count all bytes of their arguments.
    """
    if name == "barrier":
        return 0
    if name in _GATHERED:
        return _nbytes(args[1]) * (ranks - 1)
    if name in _SCATTERED:
        return _nbytes(args[1]) * (ranks - 1) // ranks
    if name in _REDUCED:
        return 2 * _nbytes(args[0]) * (ranks - 1) // ranks
    return _nbytes(args[0])


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, Iterable) else 0


# ---- addresses -------------------------------------------------------------------------------------------------------

# Addresses on which the ranks of a process group listen: on loopback, or on a network that a setting names.
#
# Each rank publishes its machine and its address. On one machine all use 127.0.0.1. Otherwise each uses the address of
# the setting `collectives`, without which no group can be made: neither gloo nor NCCL encrypts or authenticates, so the
# user must name the network.

LOOPBACK: Final = "127.0.0.1"
_SIOCGIFADDR: Final = 0x8915
_IPV6: Final = Path("/proc/net/if_inet6")
_NAME_BYTES_MAX: Final = 15
_NO_MACHINE: Final = "a rank must publish its machine and address, got something else"


@attrs.frozen
class Interface:
    """An address of this machine, and the name of the interface that has it."""

    name: str
    address: str


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """Address record that a rank publishes to its group.

    Attributes:
        machine: Equal for ranks that reach each other by 127.0.0.1.
        address: Address to listen on for ranks of other machines; "" for none.
        interface: Name of the interface with that address.
    """

    machine: str
    address: str = ""
    interface: str = ""


def interfaces_here() -> list[Interface]:
    """Return the addresses of this machine, loopback first, in the order of interface numbers."""
    found = list[Interface]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                said = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:_NAME_BYTES_MAX]))
                found.append(Interface(name, socket.inet_ntoa(said[20:24])))
    with suppress(OSError):  # a kernel without IPv6
        for line in _IPV6.read_text(encoding="ascii").splitlines():
            digits, *_, scope, _, name = line.split()
            if scope != "20":  # skip link-local addresses: they need an interface
                found.append(Interface(name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))))
    return found


def place_here(wanted: str, interfaces: Iterable[Interface] | None = None) -> RankPlace:
    """Return the address record of this rank.

    Args:
        wanted: Setting `collectives`: an address, a network, or an interface of this machine; "" for none.
        interfaces: Addresses of this machine; None to query them.

    Raises:
        ConfigError: This machine has no such address.
    """
    if not wanted:
        return RankPlace(machine_here())
    known = list(interfaces_here() if interfaces is None else interfaces)
    for one in known:
        if wanted == one.name or _is_in(one.address, wanted):
            return RankPlace(machine_here(), one.address, one.name)
    has = ", ".join(f"{one.name} {one.address}" for one in known)
    raise ConfigError(
        f"the setting collectives must name an address, a network or an interface of each host, got {wanted!r} on "
        f"{host_name()}, which has {has or 'no address'}"
    )


def meeting_place(own: RankPlace, said: Sequence[bytes]) -> RankPlace:
    """Return the address and interface on which this rank listens; the interface is "" for loopback.

    Args:
        own: Record of this rank.
        said: Encoded records of all ranks of the group.

    Raises:
        ConfigError: The ranks are on several machines, and one of them has no address for the others.
    """
    try:
        places = [msgspec.json.decode(one, type=RankPlace) for one in said]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_NO_MACHINE}: {error}") from None
    if all(place.machine == own.machine for place in places):
        return RankPlace(own.machine, LOOPBACK)
    for index, place in enumerate(places):
        if not place.address or ipaddress.ip_address(place.address).is_loopback:
            raise ConfigError(
                "a process group of ranks on several machines needs the setting collectives, got "
                f"{place.address or 'nothing'} at rank {index}: gloo and NCCL neither encrypt nor authenticate, so "
                'name a network that is trusted, as env={"TRIMESH_COLLECTIVES": "eth0"}, or "10.0.0.0/8"'
            )
    return own


def _is_in(address: str, wanted: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address) in ipaddress.ip_network(wanted, strict=False)
    return False


def machine_here() -> str:
    """Return an id of this loopback interface: boot of the kernel, and network namespace."""
    return hashlib.sha256(f"{boot_id()} {os.stat('/proc/thread-self/ns/net').st_ino}".encode()).hexdigest()[:16]
