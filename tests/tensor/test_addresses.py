"""Where ranks listen for each other's collectives: on one machine, and on several."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.rdma.namespaces import Namespace, two_namespaces, why_not

import trimesh
from trimesh import ConfigError, MeshErrorGroup, current_rank, leaves, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor.groups.group import (  # noqa: E402 - after the skip
    Interface,
    RankPlace,
    interfaces_here,
    meeting_place,
    place_here,
)

pytestmark = [pytest.mark.real, pytest.mark.torch]

INTERFACES = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "192.0.2.7"),
    Interface("ib0", "10.1.2.3"),
    Interface("eth0", "2001:db8::7"),
]


def said(*places: RankPlace) -> list[bytes]:
    return [msgspec.json.encode(place) for place in places]


@pytest.mark.parametrize(
    ("wanted", "address", "interface"),
    [
        ("eth0", "192.0.2.7", "eth0"),
        ("10.0.0.0/8", "10.1.2.3", "ib0"),
        ("10.1.2.3", "10.1.2.3", "ib0"),
        ("2001:db8::/64", "2001:db8::7", "eth0"),
        ("", "", ""),
    ],
)
def test_setting_names_an_interface_a_network_or_an_address(wanted: str, address: str, interface: str) -> None:
    place = place_here(wanted, INTERFACES)
    assert (place.address, place.interface) == (address, interface)


@pytest.mark.parametrize("wanted", ["eth1", "10.1.2.4", "192.0.3.0/24", "eth"])
def test_setting_that_names_nothing_of_this_machine_says_what_there_is(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"got '.*' on .*, which has lo 127.0.0.1, eth0 192.0.2.7"):
        place_here(wanted, INTERFACES)


def test_this_machine_has_loopback_among_its_interfaces() -> None:
    assert Interface("lo", "127.0.0.1") in interfaces_here()


def test_ranks_of_one_machine_listen_on_loopback_whatever_the_setting_is() -> None:
    one, other = RankPlace("a", "192.0.2.7", "eth0"), RankPlace("a")
    assert meeting_place(one, said(one, other)) == RankPlace("a", "127.0.0.1")


def test_ranks_of_several_machines_listen_where_their_setting_says() -> None:
    one, other = RankPlace("a", "192.0.2.7", "eth0"), RankPlace("b", "192.0.2.8", "eth0")
    assert meeting_place(other, said(one, other)) == other


@pytest.mark.parametrize("bad", [RankPlace("b"), RankPlace("b", "127.0.0.1", "lo"), RankPlace("b", "::1", "lo")])
def test_ranks_of_several_machines_make_no_group_without_a_network_that_is_named(bad: RankPlace) -> None:
    """H7: neither gloo nor NCCL encrypts, so nothing is opened on a network by itself; loopback is of one machine."""
    good = RankPlace("a", "192.0.2.7", "eth0")
    for own in (good, bad):
        with pytest.raises(ConfigError, match=r"at rank 1.*name a network that is trusted"):
            meeting_place(own, said(good, bad))


@pytest.mark.parametrize("bytes_", [b"", b"7", b'["a", 7]', b"\xff"])
def test_what_is_no_place_is_refused(bytes_: bytes) -> None:
    with pytest.raises(ConfigError, match="something else"):
        meeting_place(RankPlace("a"), [bytes_])


# ---- two machines, as namespaces of networks -----------------------------------------------------------------


def enter(spaces: tuple[Namespace, Namespace]) -> None:
    """The `setup` of a process: go to its machine."""
    spaces[current_rank()].enter()


def spawned(spaces: tuple[Namespace, Namespace], **env: str) -> Any:
    return this_host().spawn_procs(
        {"gpus": 2},
        preload=("torch",),
        setup=partial(enter, spaces),
        env=lambda point: {**spaces[point.rank].environment, **env},
    )


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can")
async def test_collective_crosses_the_network_that_the_setting_names_and_no_other() -> None:
    """H7: without it there is no group, and the mesh computes on."""
    with trio.fail_after(2 * HANG_SECONDS), two_namespaces() as spaces:
        async with spawned(spaces) as procs:
            with procs.activate():
                rank = procs.rank_tensor("gpus") + 1
            with pytest.raises(MeshErrorGroup) as caught:
                await trimesh.fetch(rank.reduce("gpus"))
            assert any(isinstance(one, ConfigError) and "collectives" in str(one) for one in leaves(caught.value))
            assert [one.item() for one in (await trimesh.fetch(rank)).values()] == [1, 2]
        async with spawned(spaces, TRIMESH_COLLECTIVES="10.77.0.0/24") as procs:
            with procs.activate():
                rank = procs.rank_tensor("gpus") + 1
            assert (await trimesh.fetch_shard(rank.reduce("gpus"), gpus=1)).item() == 3
