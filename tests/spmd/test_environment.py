"""Ranks of several hosts."""

from __future__ import annotations

from trimesh.spmd.program import HostPlace, environments


def test_ranks_count_anew_on_each_host() -> None:
    places = [HostPlace("a", "node-a"), HostPlace("b", "node-b"), HostPlace("a", "node-a"), HostPlace("b", "node-b")]
    found = environments(places, 1234, "run")
    assert [one["RANK"] for one in found] == ["0", "1", "2", "3"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "0", "1", "1"]
    assert [one["GROUP_RANK"] for one in found] == ["0", "1", "0", "1"]
    assert {one["LOCAL_WORLD_SIZE"] for one in found} == {"2"}
    alone = environments([HostPlace("a", "node-a", is_alone=True)] * 2, 1234, "run")
    assert [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in alone] == [("0", "1")] * 2
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found} == {("node-a", "1234")}
