"""Process groups of an elastic mesh, for one set of members; they can be aborted from outside.

gloo cannot abort: a collective waits for the bytes of another member, up to the time limit of the group. So each set of
members meets at its own address of the loopback network (in 127.64.0.0/10). Ending its groups shuts down all
connections from and to that address, so that collectives that wait there fail at once.

EG-1 After `end` no collective of these groups waits, and none begins.
EG-2 Connecting the members ends with the groups, too. Its thread is then abandoned: gloo waits in it up to
     `limits.GROUP_CONNECT_SECONDS` for each member that is gone.
EG-3 If a collective or connecting the members fails because the groups have ended, the reason of their end is raised.
     A failure waits up to `limits.GROUP_CAUSE_SECONDS` for that reason.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from trimesh import limits
from trimesh.errors import ConfigError, ShapeError
from trimesh.tensor.groups.group import COLLECTIVES, POINT_TO_POINT, NamedGroup, machine_here, on_host
from trimesh.tensor.groups.groups import register, unregister
from trimesh.tensor.groups.stores import Found, TeamStore

__all__ = ["DeviceMesh", "EpochGroup", "MemberGroups"]

_c10d: Any = _distributed_c10d  # its stub is incomplete

Why = Callable[[], Exception | None]
"""Returns the reason why the groups have ended; None while they have not."""


class EpochGroup(NamedGroup):
    """Process group of some members of one set.

    Args:
        index: Index of this member in the group.
        size: Number of members.
        name: Name in torch's registry.
        why: See `Why`.
        ended: Set when the groups have ended.
    """

    def __init__(self, index: int, size: int, name: str, why: Why, ended: threading.Event) -> None:
        super().__init__(index, size, name)
        self.inner: Any = None
        self._why = why
        self._ended = ended

    def run(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a collective; return a completed work.

        Raises:
            Exception: The reason why the groups have ended, if they have; else torch's error.
        """
        if (why := self._why()) is not None:
            raise why
        inner = self.inner
        try:
            work = on_host(getattr(inner, name), args, kwargs, gives=name != "send")
            if work is None:
                return None
            work.wait()
        except Exception as error:
            del inner
            if (why := _cause(self._why, self._ended)) is None:
                raise
            raise why from error
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return _c10d._create_work_from_future(done)


def _collective(name: str) -> Callable[..., Any]:
    def collective(self: EpochGroup, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, args, kwargs)

    collective.__name__ = name
    return collective


for _name in (*COLLECTIVES, *POINT_TO_POINT):
    if hasattr(dist.ProcessGroup, _name):  # each version of torch has its own
        setattr(EpochGroup, _name, _collective(_name))


class MemberGroups:
    """All process groups of one member, for one set of members.

    Args:
        name: Unique name of the set, the same at each of its members.
        places: Coordinates of the members.
        rank: Index of this member.
        ask: Queries the store of the set; see `TeamStore`.
        why: See `Why`.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[Mapping[str, int]],
        rank: int,
        ask: Callable[..., Any],
        why: Why,
    ) -> None:
        self._name = name
        self._places = places
        self._rank = rank
        self._store = TeamStore(cast("Any", partial(_answer, ask)))
        self._why = why
        self._ended = threading.Event()
        self._address = _address_of(name)
        self._made: dict[str, EpochGroup] = {}
        self._is_default = False
        self._is_closed = False
        self._torch = threading.Lock()  # an abandoned thread that makes groups may return after `close`
        self._waiting: set[threading.Event] = set()

    @property
    def whole(self) -> EpochGroup:
        """Group of all members."""
        return self._made["all"]

    def make(self) -> None:
        """Connect all members; each member calls it, in a thread. Blocks until all are connected.

        Raises:
            ConfigError: The members are on several machines.
            Exception: The reason why the groups have ended meanwhile.
        """
        self._store.set(f"machine/{self._rank}", machine_here())
        machines = {self._store.get(f"machine/{rank}") for rank in range(len(self._places))}
        if len(machines) > 1:
            raise ConfigError(
                f"the members of an elastic group must be on one host, got {len(machines)} hosts: use "
                "trimesh.distribute, or spawn_procs(rendezvous=True) with the setting collectives"
            )
        group = self._group("all", range(len(self._places)))
        with self._torch:
            if not self._is_closed and not dist.is_initialized():
                c10d._update_default_pg(group)
                self._is_default = True

    def device_mesh(self, label: str | None) -> DeviceMesh:
        """Return a device mesh of all members; see `ElasticGroup.device_mesh`."""
        if label is not None:
            return DeviceMesh.from_group(self.whole, "cpu", mesh_dim_names=(label,))
        labels = list(self._places[0])
        sizes = [1 + max(place[one] for place in self._places) for one in labels]
        if math.prod(sizes) != len(self._places):
            raise ShapeError(
                f"a device mesh needs a member at every place of {dict(zip(labels, sizes, strict=True))!r}, got "
                f'{len(self._places)} members: name one dimension for all of them, device_mesh("members")'
            )
        own = self._places[self._rank]
        groups: list[Any] = []
        for one in labels:
            others = [rank for rank, place in enumerate(self._places) if _differ_only(place, own, one)]
            groups.append(self._group(f"{one} of { {**own, one: -1}!r}", others))
        table = torch.arange(len(self._places)).reshape(sizes)
        return DeviceMesh.from_group(groups, "cpu", mesh=table, mesh_dim_names=tuple(labels))

    def end(self) -> None:
        """End all waits in the groups (EG-1) and for them (EG-2). Idempotent; may be called from any thread."""
        self._ended.set()
        for one in list(self._waiting):
            one.set()
        for descriptor in _connections(self._address):
            with suppress(OSError):
                _shut_down(descriptor)

    def close(self) -> None:
        """Remove the groups from torch's registry, and register no more."""
        with self._torch:
            self._is_closed = True
            if self._is_default:
                c10d._update_default_pg(None)
            for group in self._made.values():
                unregister(group, group.full_name)
            self._made.clear()

    def _group(self, key: str, ranks: Sequence[int]) -> EpochGroup:
        found = self._made.get(key)
        if found is not None:
            return found
        ranks = list(ranks)
        made = EpochGroup(ranks.index(self._rank), len(ranks), f"{self._name}/{key}", self._why, self._ended)
        store = _c10d.PrefixStore(key, self._store)
        try:
            made.inner = self._connected(store, ranks.index(self._rank), len(ranks))
        except Exception as error:
            if (why := _cause(self._why, self._ended)) is None:
                raise
            raise why from error
        if (why := self._why()) is not None:  # connections made after the end must not wait either
            self.end()
            raise why
        with self._torch:
            if not self._is_closed:
                register(made, made.full_name, ranks, self._store)
                self._made[key] = made
        return made

    def _connected(self, store: Any, index: int, size: int) -> Any:
        """Return a connected group of torch; raise if the groups end before that."""
        found: list[Any] = []
        done = threading.Event()

        def connect() -> None:
            try:
                found.append(_gloo(store, index, size, self._address))
            except Exception as error:  # noqa: BLE001 - raised below
                found.append(error)
            done.set()

        self._waiting.add(done)
        try:
            if not self._ended.is_set():
                threading.Thread(target=connect, name=f"trimesh gloo {self._name}", daemon=True).start()
                done.wait()
        finally:
            self._waiting.discard(done)
        if not found:
            raise RuntimeError("the groups have ended before their members were connected")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]


def _cause(why: Why, ended: threading.Event) -> Exception | None:
    """Return the reason why the groups have ended, if that has caused a failure (EG-3)."""
    # The connections of a dead member close before its owner reports the death: wait for the report.
    ended.wait(limits.GROUP_CAUSE_SECONDS)
    return why()


def _answer(ask: Callable[..., tuple[int, list[bytes]]], *question: Any, seconds: float | None = None) -> Found:
    return Found(*ask(*question, seconds=seconds))


def _differ_only(one: Mapping[str, int], other: Mapping[str, int], label: str) -> bool:
    return all(one[name] == other[name] for name in one if name != label)


def _gloo(store: Any, index: int, size: int, address: str) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=limits.GROUP_CONNECT_SECONDS)
    backend = _c10d.ProcessGroupGloo(store, index, size, options)
    backend._set_default_timeout(timedelta(seconds=limits.COLLECTIVE_SECONDS))
    made: Any = _c10d.ProcessGroup(store, index, size)
    kinds = dist.ProcessGroup.BackendType
    made._set_default_backend(kinds.GLOO)
    made._register_backend(torch.device("cpu"), kinds.GLOO, backend)
    return made


# ---- connections ---------------------------------------------------------------------------------------------


_ADDRESS_BITS: Final = 22


def _address_of(name: str) -> str:
    """Return the loopback address of a set of members: one of four million."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % (1 << _ADDRESS_BITS)
    return socket.inet_ntoa((0x7F400000 | max(number, 1)).to_bytes(4, "big"))


def _connections(address: str) -> list[int]:
    """Return the file descriptors of this process's connections from or to an address."""
    found: list[int] = []
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(entry)))
            with one:
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if one.family == socket.AF_INET and not listens and address in _ends_of(one):
                    found.append(int(entry))
    return found


def _ends_of(one: socket.socket) -> set[str]:
    ends = {one.getsockname()[0]}
    with suppress(OSError):  # it is not connected
        ends.add(one.getpeername()[0])
    return ends


def _shut_down(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        one.shutdown(socket.SHUT_RDWR)
