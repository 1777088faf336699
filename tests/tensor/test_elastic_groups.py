"""The groups of one set of members, by themselves; over processes they are in tests/service/test_groups.py."""

from __future__ import annotations

import threading

import pytest
from tests.patience import HANG_SECONDS

pytest.importorskip("torch", reason="torch is an extra")

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
