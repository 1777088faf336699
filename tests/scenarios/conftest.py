"""Says which scripts are to be written anew."""

from __future__ import annotations

import pytest


@pytest.fixture
def rewrites(request: pytest.FixtureRequest) -> bool:
    """Whether scripts are written anew instead of compared."""
    found: bool = request.config.getoption("--rewrite-scenarios")
    return found
