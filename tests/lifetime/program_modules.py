"""What the programs of these tests import, for the template that they are copies of."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "programs"))

import actors  # noqa: F401
import guest  # noqa: F401
import stage  # noqa: F401
