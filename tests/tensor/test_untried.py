"""What was never run on a CUDA device says so, once."""

from __future__ import annotations

import warnings

import pytest

from trimesh import untried

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor.protocol.arguments import default_device  # noqa: E402 - it needs torch

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untried, "_said", set[str]())


def test_warning_names_what_has_not_run_and_how_to_run_it() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for what in ("a copy", "a copy", "a sum"):
            untried.warn_untried(what)
    assert [str(one.message).partition(":")[0] for one in seen] == [
        "a copy has been tested without a CUDA device only",
        "a sum has been tested without a CUDA device only",
    ]
    assert all("`make test-cuda`" in str(one.message) for one in seen)


def test_engine_that_finds_a_device_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert default_device() == torch.device("cuda", 3)
    assert [str(one.message).partition(" has ")[0] for one in seen] == ["the tensor engine on CUDA devices"]
