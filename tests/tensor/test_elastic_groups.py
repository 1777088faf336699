"""The groups of one set of members, by themselves; over processes they are in tests/service/test_groups.py."""

from __future__ import annotations

import threading

import pytest
from tests.patience import HANG_SECONDS

pytest.importorskip("torch", reason="torch is an extra")

import torch.distributed as dist

from trimesh.service.groups import GroupEnded
from trimesh.tensor.groups import elastic

pytestmark = pytest.mark.torch


def test_member_that_dies_while_the_others_connect_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y11: gloo hears of a death before the owner has told of it, and says that a connection was closed."""
    failed, why = threading.Event(), list[GroupEnded]()

    def fail(*_: object) -> None:
        failed.set()
        raise RuntimeError("Gloo connectFullMesh failed")

    def tell() -> None:
        failed.wait(HANG_SECONDS)
        why.append(GroupEnded("of epoch 1", epoch=1))
        groups.end()

    monkeypatch.setattr(elastic, "_gloo", fail)
    places = [{"dp": 0}, {"dp": 1}]
    groups = elastic.MemberGroups("set/1", places, 0, lambda *_, **__: (0, []), lambda: next(iter(why), None))
    owner = threading.Thread(target=tell)
    owner.start()
    with pytest.raises(GroupEnded, match="of epoch 1") as caught:
        groups._group("all", range(2))
    owner.join()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_who_connects_the_members_is_free_when_the_groups_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y11: gloo waits for one that is gone, and nothing gets it out."""
    connects, goes_on, why, left = threading.Event(), threading.Event(), list[GroupEnded](), list[bool]()

    def wait(*_: object) -> None:
        connects.set()
        left.append(goes_on.wait(HANG_SECONDS))

    def tell() -> None:
        connects.wait(HANG_SECONDS)
        why.append(GroupEnded("of epoch 1", epoch=1))
        groups.end()

    monkeypatch.setattr(elastic, "_gloo", wait)
    places = [{"dp": 0}, {"dp": 1}]
    groups = elastic.MemberGroups("set/1", places, 0, lambda *_, **__: (0, []), lambda: next(iter(why), None))
    owner = threading.Thread(target=tell)
    owner.start()
    with pytest.raises(GroupEnded, match="of epoch 1"):
        groups._group("all", range(2))
    assert left == []
    goes_on.set()
    owner.join()


def test_groups_that_were_left_while_they_were_made_are_none_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y11: a thread that was left behind comes back when the member is in the next group, perhaps."""

    def connect(*_: object) -> object:
        groups.close()
        return object()

    monkeypatch.setattr(elastic, "_gloo", connect)
    groups = elastic.MemberGroups("set/1", [{"dp": 0}], 0, lambda *_, **__: (0, [b"here"]), lambda: None)
    groups.make()
    assert not dist.is_initialized()
    with pytest.raises(KeyError):
        _ = groups.whole
