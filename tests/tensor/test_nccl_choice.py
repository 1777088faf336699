"""Choice between NCCL and gloo for a group of ranks on CUDA devices, found without one."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor.groups import group  # noqa: E402 - needs torch

pytestmark = pytest.mark.torch


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a store where the second rank, on device B, has been already; this rank is on device A."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=device))
    made = torch.distributed.HashStore()
    made.set("device/1", "B")
    return made


def member(device: str) -> Any:
    return types.SimpleNamespace(rank=lambda: 0, size=lambda: 2, device=device)


def test_ranks_with_a_device_each_use_nccl(store: Any) -> None:
    assert group._why_no_nccl(store, member("A")) == ""


def test_ranks_that_share_a_device_are_told_what_nccl_needs(store: Any) -> None:
    assert group._why_no_nccl(store, member("B")) == (
        "NCCL needs a CUDA device for each rank, and 2 ranks share 1; spawn at most 1 ranks here to use NCCL"
    )


def test_torch_without_nccl_is_named(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)

    assert "this build of torch has no NCCL" in group._why_no_nccl(store, member("A"))


def test_warning_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_warned", set[str]())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        group._warn_once("a reason")
        group._warn_once("a reason")
    assert [str(one.message) for one in seen] == ["a reason"]
