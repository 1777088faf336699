"""What every test of tensors runs under."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Let torch compute in the thread that calls it: it keeps those that it starts, and the zombie guard counts them."""
    torch = pytest.importorskip("torch", reason="torch is an extra")
    torch.set_num_threads(1)
