"""What all tests of tensors need."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def _torch_threads():
    """Let torch start its own threads before any test, so that none of them is taken for one that a test has left."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    torch.set_num_threads(1)
    weights = torch.ones(4, 4, requires_grad=True)
    (weights @ weights).sum().backward()  # the threads of autograd


@pytest.fixture(autouse=True)
def _torch_seed(_torch_threads):
    """Let each test draw the same numbers, whatever ran before it: some lie where rounding decides."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    torch.manual_seed(0)
