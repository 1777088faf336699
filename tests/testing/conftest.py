"""What tests of the test kit share."""

from __future__ import annotations

from typing import Any

import pytest
from tests.patience import HANG_SECONDS

from trimesh._transport.native.transport import NativeTransport


@pytest.fixture
def long_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process of the test give nobody up who is silent for as long as a test waits."""
    defaults: Any = NativeTransport.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "lease_seconds", 2 * HANG_SECONDS)
