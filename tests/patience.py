"""How long tests wait for what must happen."""

from __future__ import annotations

from typing import Final

HANG_SECONDS: Final = 60.0
"""What has not come by then never will: only a broken program is waited for so long, however busy the machine. How soon
it comes is for benchmarks, and for simulation, where time is exact. Half of pytest's own limit, so that the test says
what is missing; children that tests start to be ended live ten times as long."""
